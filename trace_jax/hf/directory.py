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

from trace_jax.checks import message, require
from trace_jax.hf import files

SHARD_BYTES = 5 * 10**9


@contextlib.contextmanager
def fresh(path: str | pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
    """A folder beside `path` to write into; it takes the place of `path` when all went well.

    An error while writing leaves `path` as it was. Two renames then put the new folder in place of
    a full one: an error in between puts the old one back and keeps the finished new one, a kill
    keeps both, in a hidden folder beside `path`. A symbolic link stays and its target is replaced.
    Raises: FileExistsError if `path` has content and is not to be overwritten; ValueError if it can
            not be replaced; OSError that says where the new folder is if it could not take over.
    """
    target = pathlib.Path(os.path.realpath(path))
    full = _check(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        new = temporary / "new"  # made by mkdir, so with the permissions that the user's umask says
        new.mkdir()
        yield new
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    inside = _is_here(target)
    _take_over(new, target, full)
    if inside:  # else the process would stay in the folder that is gone
        os.chdir(target)
    shutil.rmtree(temporary, ignore_errors=True)


def _check(target: pathlib.Path, overwrite: bool) -> bool:
    """Whether something is at the target, which can be moved away."""
    where = str(target)
    need = "a place whose directory can be replaced"
    require(not target.is_symlink(), where, "a symbolic link to itself", need)
    mount = target.parent == target or os.path.ismount(target)
    require(not mount, where, "a mount point", need, "a directory in it")
    full = target.exists() and (not target.is_dir() or any(target.iterdir()))
    need, fix = "a new or empty directory", "another path, or overwrite=True"
    require(overwrite or not full, where, "it has content", need, fix, FileExistsError)
    # a directory is moved into another one only by who may write to it
    free = not target.is_dir() or os.access(target, os.W_OK)
    require(free, where, "a directory that is read-only", "one that can be replaced", "chmod u+w")
    return full


def _is_here(target: pathlib.Path) -> bool:
    try:
        return target.exists() and os.path.samefile(target, os.curdir)
    except OSError:  # the working directory is gone
        return False


def _take_over(new: pathlib.Path, target: pathlib.Path, full: bool) -> None:
    """Renames the finished folder; whatever fails, neither it nor the old one is removed."""
    old = new.parent / "old"
    try:
        if full:
            target.rename(old)
        os.replace(new, target)
    except BaseException as error:
        if os.path.lexists(old) and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                old.rename(target)
        if not isinstance(error, OSError):
            raise
        kept = f"; what was there is in {old}" if os.path.lexists(old) else ""
        got, need = f"{error}{kept}", "to rename the finished checkpoint to it"
        text = message(str(target), got, need, f"it is complete in {new}: move it yourself")
        raise OSError(error.errno, text) from error


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
