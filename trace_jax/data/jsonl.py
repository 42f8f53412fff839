"""Items from the user's own JSONL: one {"prompt": ..., "answer": ...} object a line."""

import json
import pathlib
from typing import Any

from trace_jax.checks import message, require
from trace_jax.data.items import Item

TASK = "jsonl"


def read_jsonl(path: str, *, answer_required: bool = True, label: str = "") -> tuple[Item, ...]:
    """Reads every line; blank lines are skipped and any other oddity is refused.

    Args:    path: a UTF-8 file. Keys of a line: `prompt` (a non-empty string), `answer` (a string
             or a number, which is taken as its text), and any others, which go to `Prompt.extra`.
             answer_required: False lets `answer` be null, for rewards that judge without one.
             label: put before the uid, which is `<file name>:<line>`.
    Raises:  FileNotFoundError, or ValueError that starts with `<path>:<line>`.
    """
    file = pathlib.Path(path)
    fix = "check config.data.path and config.data.eval_path"
    require(file.is_file(), "config.data", f"no file {path}", "JSONL", fix, FileNotFoundError)
    items = []
    # split on \n alone: str.splitlines would break a line at U+2028 inside a JSON string
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if line.strip():
            prompt, answer, extra = _parse(f"{path}:{number}", line, answer_required)
            uid = f"{label}{file.name}:{number}"
            items.append(Item(uid=uid, text=prompt, answer=answer, task=TASK, extra=extra))
    require(len(items) > 0, path, "no lines", '{"prompt": ..., "answer": ...} objects')
    return tuple(items)


def _text(file: pathlib.Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(message(f"{file}:{line}", error.reason, "UTF-8")) from error


def _parse(where: str, line: str, answer_required: bool) -> tuple[str, str | None, dict[str, Any]]:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # malformed, NaN, or nested without end
        raise ValueError(message(where, f"invalid JSON ({error})", "one JSON object")) from error
    require(isinstance(value, dict), where, f"a JSON {type(value).__name__}", "a JSON object")
    for key in ("prompt", "answer"):
        fix = f"the keys of this line are {sorted(value)}"
        require(key in value, where, f"no {key!r}", 'both "prompt" and "answer"', fix)
    prompt, answer = value.pop("prompt"), value.pop("answer")
    _require_text(f"{where}: prompt", prompt)
    if type(answer) in (int, float):
        answer = str(answer)
    if answer is None and not answer_required:
        return prompt, None, value
    _require_text(f"{where}: answer", answer)
    return prompt, answer, value


def _require_text(where: str, text: object) -> None:
    is_text = isinstance(text, str) and bool(text.strip())
    require(is_text, where, repr(text)[:80], "a text that is not empty")
    # JSON can spell half of a surrogate pair, which is no character and has no encoding
    whole = not any("\ud800" <= char <= "\udfff" for char in str(text))
    require(whole, where, repr(text)[:80], "whole characters (a lone surrogate has no encoding)")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
