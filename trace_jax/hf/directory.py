"""Checkpoint directories written whole or not at all, in shards of bounded size."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from trace_jax.checks import require
from trace_jax.hf import files

SHARD_BYTES = 5 * 10**9


@contextlib.contextmanager
def fresh(path: str | pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
    """A folder beside `path` to write into; it takes the place of `path` when all went well.

    A kill or an error in between leaves `path` as it was.
    Raises: FileExistsError if `path` has content and is not to be overwritten.
    """
    target = pathlib.Path(path)
    full = target.exists() and (not target.is_dir() or any(target.iterdir()))
    need, fix = "a new or empty directory", "another path, or overwrite=True"
    require(overwrite or not full, str(target), "it has content", need, fix, FileExistsError)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        new = temporary / "new"  # made by mkdir, so with the permissions that the user's umask says
        new.mkdir()
        yield new
        if full:
            target.rename(temporary / "old")
        os.replace(new, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """As transformers writes its JSON files."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tensors(
    directory: pathlib.Path,
    declared: Mapping[str, files.Declared],
    values: Iterable[np.ndarray],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """One model.safetensors, or shards and their index; the values come one at a time.

    Args: declared: {name: (dtype, shape)} in the order in which `values` yields them.
    """
    shards = plan(declared, shard_bytes)
    stream, index = iter(values), {}
    for number, shard in enumerate(shards, 1):
        name = files.SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.write(directory / name, shard, itertools.islice(stream, len(shard)))
        index |= dict.fromkeys(shard, name)
    assert next(stream, None) is None, "more values than declared"
    if len(shards) > 1:
        total = sum(_bytes(entry) for entry in declared.values())
        index = {"metadata": {"total_size": total}, "weight_map": index}
        write_json(directory / files.INDEX, index)


def plan(declared: Mapping[str, files.Declared], most: int) -> list[dict[str, files.Declared]]:
    """Neighbours share a shard as long as it stays within `most` bytes."""
    require(most > 0, "save: max_shard_bytes", most, "> 0")
    shards: list[dict[str, files.Declared]] = [{}]
    size = 0
    for name, entry in declared.items():
        bytes_ = _bytes(entry)
        if shards[-1] and size + bytes_ > most:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += bytes_
    return shards


def _bytes(entry: files.Declared) -> int:
    return math.prod(entry[1]) * np.dtype(entry[0]).itemsize
