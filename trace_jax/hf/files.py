"""Safetensors files, read and written one tensor at a time.

A tensor is read by its offset into a buffer of its own: mapped pages would count as memory of this
process for as long as the map lives. Headers are checked before anything is read.
Format: 8 bytes little-endian N, N bytes of JSON {name: {dtype, shape, data_offsets}}, the data.
Source: the description of the format in the safetensors repository.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from trace_jax.checks import message, require

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "BOOL": np.bool_,
}
NAME_OF = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
Declared = tuple[Any, tuple[int, ...]]  # dtype and shape of a tensor to be written
_LARGEST_HEADER = 100_000_000  # bytes, as in the reference implementation
_ALIGNMENT = 64  # bytes; a CPU array of JAX can then take the buffer as it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a tensor lies."""

    file: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    bytes: int


def read_headers(directory: str | pathlib.Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint directory: its single file, or the shards of its index.

    Of both the single file, as transformers does; a file of another name if it is the only one.
    Raises: FileNotFoundError or ValueError naming the file, and the tensor where there is one.
    """
    directory = pathlib.Path(directory)
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        files = sorted(directory.glob("*.safetensors"))
        need, fix = f"{SINGLE}, or shards with {INDEX}", "download the whole checkpoint"
        require(len(files) == 1, str(directory), f"{len(files)} safetensors files", need, fix)
        return read_header(files[0])
    index = _read_index(directory / INDEX)
    found: dict[str, Stored] = {}
    for name in sorted(set(index.values())):
        path = directory / name
        need = f"the shard that {INDEX} names"
        good = path.is_file() and path.parent == directory
        require(good, str(path), "no such file", need, error=FileNotFoundError)
        header = read_header(path)
        listed = {tensor for tensor, shard in index.items() if shard == name}
        for what, names in (
            (f"tensors that {INDEX} does not list there", header.keys() - listed),
            (f"no tensors that {INDEX} lists there", listed - header.keys()),
        ):
            require(not names, str(path), f"{what}: {some(names)}", "what the index lists")
        found |= header
    return found


def _read_index(path: pathlib.Path) -> Mapping[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(message(str(path), repr(error), "JSON with a weight_map")) from error
    good = isinstance(index, dict) and all(isinstance(v, str) for v in index.values()) and index
    require(bool(good), str(path), "another weight_map", "{tensor: file} with some tensor")
    return index


def read_header(path: pathlib.Path) -> dict[str, Stored]:
    """Every tensor of one file.

    Raises: ValueError if the file is truncated, or its header does not describe it.
    """
    size, where = path.stat().st_size, str(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        need = f"a header of at most {_LARGEST_HEADER} bytes within the file ({size} bytes)"
        good = 0 < length <= min(_LARGEST_HEADER, size - 8)
        fix = "it is truncated, or no safetensors file"
        require(good, where, f"a header of {length} bytes", need, fix)
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            got = f"a header that is no JSON ({error})"
            raise ValueError(message(where, got, "JSON")) from error
    require(isinstance(header, dict), where, "a header that is no object", "a JSON object")
    header.pop("__metadata__", None)
    found = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    end, last = 8 + length, "the header"
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        need = f"data from byte {end} on, where that of {last} ends"
        require(stored.offset == end, f"{where}: {name}", f"byte {stored.offset}", need)
        end, last = stored.offset + stored.bytes, name
    need = f"{end} bytes: the end of {last}"
    require(size == end, where, f"{size} bytes", need, "truncated or damaged: fetch it again")
    return found


def _entry(path: pathlib.Path, name: str, entry: Any, start: int) -> Stored:
    where = f"{path}: {name}"
    keys = {"dtype", "shape", "data_offsets"}
    good = isinstance(entry, dict) and keys <= entry.keys()
    require(good, where, repr(entry), f"an object with {sorted(keys)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    good = isinstance(dtype, str) and dtype in DTYPES
    require(good, where, f"dtype {dtype!r}", f"one of {list(DTYPES)}")
    require(_counts(shape), where, f"shape {shape!r}", "whole numbers >= 0")
    good = _counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]
    require(good, where, f"data_offsets {offsets!r}", "[start, end] with 0 <= start <= end")
    kind, bytes_ = np.dtype(DTYPES[dtype]), offsets[1] - offsets[0]
    need = f"{math.prod(shape) * kind.itemsize}: {dtype} of shape {shape}"
    require(math.prod(shape) * kind.itemsize == bytes_, where, f"{bytes_} bytes", need)
    return Stored(
        file=path, dtype=kind, shape=tuple(shape), offset=start + offsets[0], bytes=bytes_
    )


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def some(names: Iterable[str], most: int = 8) -> str:
    """Names for an error: the first few, and how many there are."""
    ordered = sorted(names)
    rest = f", ... ({len(ordered)} in all)" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that starts where JAX can take it without copying."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


class Reader:
    """Open files of a checkpoint; reads tensors by name. A context manager."""

    def __init__(self, tensors: Mapping[str, Stored]):
        self.tensors = tensors
        self._files: dict[pathlib.Path, int] = {}

    def __enter__(self) -> Any:  # the class itself, or the one that extends it
        return self

    def __exit__(self, *exc_info: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def dtype(self, name: str) -> np.dtype:
        """Of a tensor."""
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        """The tensor, in its own memory."""
        stored = self.tensors[name]
        out = empty(stored.shape, stored.dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Fills a contiguous array of the tensor's size and dtype."""
        assert out.nbytes == self.tensors[name].bytes
        self._fill(name, out, 0)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the tensor's first axis, in their own memory."""
        stored = self.tensors[name]
        out = empty((stop - start, *stored.shape[1:]), stored.dtype)
        self._fill(name, out, start * (stored.bytes // max(stored.shape[0], 1)))
        return out

    def _fill(self, name: str, out: np.ndarray, skip: int) -> None:
        stored = self.tensors[name]
        assert out.flags.c_contiguous and out.dtype == stored.dtype
        if stored.file not in self._files:
            self._files[stored.file] = os.open(stored.file, os.O_RDONLY)
        descriptor, view = self._files[stored.file], out.reshape(-1).view(np.uint8).data
        done = 0
        while done < out.nbytes:
            got = os.preadv(descriptor, [view[done:]], stored.offset + skip + done)
            where, need = f"{stored.file}: {name}", f"{out.nbytes} bytes"
            require(got > 0, where, f"the file's end after {done} bytes", need)
            done += got


def write(
    path: pathlib.Path, tensors: Mapping[str, tuple[Any, tuple[int, ...]]], values: Any
) -> None:
    """Writes a file; the values come one at a time and only one is held.

    Args: tensors: {name: (dtype, shape)} in the order in which `values` yields the arrays.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        entry = {"dtype": NAME_OF[np.dtype(dtype)], "shape": list(shape)}
        header[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts on a whole number of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (dtype, shape)), value in zip(tensors.items(), values, strict=True):
            value = np.ascontiguousarray(value).reshape(shape)
            assert value.dtype == np.dtype(dtype), (name, value.dtype)
            file.write(value.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
