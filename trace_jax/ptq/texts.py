"""Text to calibrate and to measure on: a file, or the manual that Python carries with it."""

import importlib
import pathlib

import numpy as np

from trace_jax.checks import message, require
from trace_jax.data.tokenizer import Tokenizer


def python_manual() -> str:
    """The topics of Python's language reference that `help()` shows (PSF licence), in one text."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def load(path: str | None, where: str = "--text") -> str:
    """The text of a UTF-8 file; None: `python_manual`.

    Raises: ValueError, beginning with `where`, if it cannot be read.
    """
    if path is None:
        return python_manual()
    require(pathlib.Path(path).is_file(), where, f"{path}, no file", "a text file")
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(message(where, f"{path}: {error}", "a text file in UTF-8")) from error


def batches(
    tokenizer: Tokenizer, text: str, *, tokens: int, context: int, rows: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first `tokens` ids of a text as batches (rows, context), all valid but the last's end.

    Raises: ValueError if the text has fewer.
    """
    # a character is at least a byte, and a token rarely covers more than 16
    ids = tokenizer.encode(text[: tokens * 16])[:tokens]
    require(len(ids) == tokens, "ptq: tokens of the text", len(ids), f"at least {tokens}")
    found = []
    for start in range(0, tokens, rows * context):
        part = ids[start : start + rows * context]
        padded = np.full(rows * context, tokenizer.pad_id, np.int32)
        padded[: len(part)] = part
        valid = np.arange(rows * context) < len(part)
        found.append((padded.reshape(rows, context), valid.reshape(rows, context)))
    return found
