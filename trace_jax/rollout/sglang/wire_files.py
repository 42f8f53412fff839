"""Files of weights on disk: safetensors and small ones, written whole or not at all.

A directory holds exactly the files that its manifest names, and a safetensors file exactly the
header that the manifest implies, so nothing that is read from a directory is taken on trust: names
are plain names of regular files, sizes are compared before memory is asked for, and every byte is
under a CRC-32. Numbers are little-endian. numpy and the standard library only: NumPy has no
bfloat16, so tensors are bytes with the name of a dtype.
"""

import collections
import concurrent.futures
import contextlib
import errno
import json
import math
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trace_jax.checks import message, require
from trace_jax.rollout.sglang.wire_manifest import DTYPES, FIX, INDEX, Entry, File, Manifest

SHARD_BYTES = 4 * 2**30
_CHUNK = 4 * 2**20  # bytes read at once for a checksum
_WORKERS = min(8, os.cpu_count() or 1)
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

_A = TypeVar("_A")
_B = TypeVar("_B")


def crc(*parts: Any) -> int:
    """CRC-32 of buffers one after another."""
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def in_threads(work: Callable[[_A], _B], items: Iterable[_A]) -> Iterator[_B]:
    """Results in order; only a few are computed ahead of who takes them."""
    waiting: collections.deque[concurrent.futures.Future[_B]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * _WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# ---- safetensors ----------------------------------------------------------------------------


def shards(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """Which file each tensor {name: (dtype, shape)} is in; neighbours share one."""
    number, size, at = 0, 0, {}
    for name, (dtype, shape) in shapes.items():
        bytes_ = math.prod(shape) * DTYPES[dtype][0]
        if size and size + bytes_ > SHARD_BYTES:
            number, size = number + 1, 0
        size += bytes_
        at[name] = number
    if number == 0:
        return dict.fromkeys(at, "model.safetensors")
    return {n: f"model-{i + 1:05d}-of-{number + 1:05d}.safetensors" for n, i in at.items()}


def header(tensors: Mapping[str, Entry]) -> bytes:
    """The beginning of a safetensors file with exactly these tensors, in this order."""
    facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in tensors.items():
        start, end = end, end + entry.bytes
        facts[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def by_file(tensors: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """The tensors of each file."""
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in tensors.items():
        found.setdefault(entry.file, {})[name] = entry
    return found


def write_tensors(
    folder: Path, tensors: Mapping[str, Entry], stream: Iterator[np.ndarray]
) -> dict[str, File]:
    """Writes the files of a full directory; `stream` yields the bytes of the tensors in order."""
    files = {}
    for name, inside in by_file(tensors).items():
        start = header(inside)
        size = len(start) + sum(entry.bytes for entry in inside.values())
        with (folder / name).open("xb") as file:
            file.write(start)
            for _, data in zip(inside, stream, strict=False):
                file.write(data.data)
            _sync(file)
            assert file.tell() == size, name
        files[name] = File(bytes=size, crc32=crc(start))
    if len(files) > 1:
        facts: dict[str, Any] = {"metadata": {"total_size": sum(e.bytes for e in tensors.values())}}
        facts["weight_map"] = {name: entry.file for name, entry in tensors.items()}
        files[INDEX] = write_json(folder / INDEX, facts)
    return files


def write_json(path: Path, value: Mapping[str, Any]) -> File:
    """Writes a small file."""
    return write_bytes(path, [json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"])


def write_bytes(path: Path, parts: Iterable[Any]) -> File:
    """Writes buffers one after another."""
    found, size = 0, 0
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            found, size = zlib.crc32(part, found), size + memoryview(part).nbytes
        _sync(file)
    return File(bytes=size, crc32=found)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


class Source:
    """Open files of a full directory; tensors are read by name, from any thread."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Opens the files and compares their sizes and headers.

        Raises: ValueError naming the file that is not what the manifest says.
        """
        self.path, self.tensors = path, manifest.tensors
        self._files: dict[str, int] = {}
        self._at: dict[str, tuple[str, int]] = {}
        try:
            for name, inside in by_file(manifest.tensors).items():
                self._files[name] = open_file(path, name, manifest.files[name].bytes)
                start = header(inside)
                found = np.empty(len(start), np.uint8)
                where, need = str(path / name), "that of the manifest's tensors and no others"
                fits = len(start) <= manifest.files[name].bytes
                if fits:
                    fill(self._files[name], 0, found, where)
                same = fits and found.tobytes() == start
                require(same, where, "another header", need, FIX)
                offset = len(start)
                for tensor, entry in inside.items():
                    self._at[tensor] = (name, offset)
                    offset += entry.bytes
                got, need = f"{manifest.files[name].bytes} bytes", f"{offset} bytes"
                require(offset == manifest.files[name].bytes, where, got, need, FIX)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, name: str) -> np.ndarray:
        """The bytes of a tensor, in memory of their own. Checksums are up to the caller."""
        file, offset = self._at[name]
        data = np.empty(self.tensors[name].bytes, np.uint8)
        fill(self._files[file], offset, data, f"{self.path / file}: {name}")
        return data

    def crc(self, name: str) -> int:
        """CRC-32 of a tensor as it is on disk."""
        file, offset = self._at[name]
        where = f"{self.path / file}: {name}"
        return file_crc(self._files[file], offset, self.tensors[name].bytes, where)


def open_file(path: Path, name: str, size: int) -> int:
    """A descriptor of a regular file of so many bytes in a directory; links are not followed.

    Raises: ValueError if it is missing, something else, or of another size.
    """
    where, need = str(path / name), f"a regular file of {size} bytes, as the manifest says"
    try:
        # O_NONBLOCK: a named pipe in its place must not hold up who opens it
        descriptor = os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        what = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(message(where, what, need, FIX)) from error
    facts = os.fstat(descriptor)
    regular = stat.S_ISREG(facts.st_mode)
    if not regular or facts.st_size != size:
        os.close(descriptor)
        got = f"{facts.st_size} bytes" if regular else "no regular file"
        raise ValueError(message(where, got, need, FIX))
    return descriptor


def fill(descriptor: int, offset: int, out: np.ndarray, where: str) -> None:
    """Reads exactly `out.nbytes` bytes. Raises: ValueError if the file ends before."""
    view, done = out.data, 0
    while done < out.nbytes:
        got = os.preadv(descriptor, [view[done:]], offset + done)
        require(got > 0, where, f"the end after {done} bytes", f"{out.nbytes} bytes", FIX)
        done += got


def file_crc(descriptor: int, offset: int, size: int, where: str) -> int:
    """CRC-32 of a part of a file."""
    room, found = np.empty(min(size, _CHUNK), np.uint8), 0
    for start in range(0, size, _CHUNK):
        part = room[: min(_CHUNK, size - start)]
        fill(descriptor, offset + start, part, where)
        found = zlib.crc32(part.data, found)
    return found


# ---- whole or not at all --------------------------------------------------------------------


@contextlib.contextmanager
def fresh(target: Path, need_bytes: int) -> Iterator[Path]:
    """A folder to write into that becomes `target` when all went well, and is gone otherwise.

    Raises: FileExistsError if `target` is there already; OSError naming the folder, the bytes that
            are needed and those that are free if the disk is full.
    """
    fix = "versions are never reused: publish under another one"
    require(
        not os.path.lexists(target), str(target), "it exists", "a new name", fix, FileExistsError
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    if free_bytes(target.parent) < need_bytes:
        raise _full(errno.ENOSPC, target.parent, need_bytes)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        new = temporary / "new"  # made by mkdir, so with the permissions that the umask says
        new.mkdir()
        yield new
        _sync_folder(new)
        os.rename(new, target)
        _sync_folder(target.parent)
    except OSError as error:
        if error.errno in _FULL_DISK:
            raise _full(error.errno, target.parent, need_bytes) from error
        raise
    finally:
        shutil.rmtree(temporary)


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write there."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _full(number: int, folder: Path, need_bytes: int) -> OSError:
    got, need = f"a full disk, {free_bytes(folder)} bytes free", f"{need_bytes} bytes for weights"
    fix = "make room there, or name another folder (config.server.weights)"
    return OSError(number, message(str(folder), got, need, fix))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
