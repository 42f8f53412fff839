"""Records on disk: append-only files, read back through memory maps, deleted when consumed.

A folder belongs to one open store at a time (a lock says so). What a killed process left there is
deleted at the next start: nothing refers to it, because rollouts are repeated and records are never
part of a checkpoint. A file that only looks like ours is refused, never deleted. Reading goes
through a memory map of the open file, after a look at its size: a map of a truncated file would
kill the process.
"""

import dataclasses
import fcntl
import mmap
import os
import pathlib
import threading
from typing import Any

import numpy as np

from trace_jax.checks import message, require
from trace_jax.guidance.wire import MAGIC, GuidanceError

SUFFIX = ".guidance"


@dataclasses.dataclass(eq=False, kw_only=True)
class Segment:
    """One file; deleted when it takes no more records and none is left."""

    path: pathlib.Path
    file: Any  # raw binary, read and write
    size: int = 0  # bytes
    live: int = 0  # records that somebody still needs
    full: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record lies."""

    segment: Segment
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.segment.path} at {self.offset}"


class SpillFolder:
    """The files of one store. One thread appends; any may read and free.

    Args:    folder: created if missing. run: names the files. segment_bytes: of a file, about.
    Raises:  GuidanceError if the folder cannot be written, is in use, or holds foreign files that
             are named like ours.
    """

    def __init__(self, folder: pathlib.Path, run: str, segment_bytes: int):
        self.folder, self._run, self._segment_bytes = folder, run, segment_bytes
        self._segments: list[Segment] = []
        self._count = 0
        self._books = threading.Lock()  # for `_segments` and `live`; never held while writing
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("a+")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.leftovers = _remove_leftovers(folder)  # bytes of a killed run, now gone
        except BlockingIOError:
            self._lock.close()
            fix = "wait for that process or stop it, or give a new folder"
            where, need = f"guidance folder {folder}", "a folder of its own"
            raise GuidanceError(message(where, "in use", need, fix)) from None
        except GuidanceError:
            self._lock.close()
            raise
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def append(self, blob: np.ndarray) -> Place:
        """Writes the bytes of one record.

        Raises: GuidanceError if the disk is full or refuses; what was written of it is taken back.
        """
        try:
            segment = self._reserve()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        place = Place(segment=segment, offset=segment.size, length=len(blob))
        try:
            view = blob.data
            while view:
                view = view[segment.file.write(view) :]
        except OSError as error:
            segment.file.truncate(place.offset)  # drop the half-written end
            segment.file.seek(place.offset)
            self.free(place)
            raise _cannot_write(self.folder, error) from error
        segment.size += len(blob)
        segment.full = segment.size >= self._segment_bytes
        return place

    def read(self, place: Place) -> np.ndarray:
        """The bytes of one record, mapped.

        Raises: GuidanceError if the file has become shorter.
        """
        descriptor, end = place.segment.file.fileno(), place.offset + place.length
        size = os.fstat(descriptor).st_size
        fix = "something else changed it; start the run again with the same command"
        need = f"{end} or more: it is truncated"
        require(size >= end, str(place), f"a file of {size} bytes", need, fix, GuidanceError)
        start = place.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(descriptor, end - start, offset=start, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8)[place.offset - start :]

    def free(self, place: Place) -> None:
        """The record is not needed any more; its file goes with its last record."""
        with self._books:
            place.segment.live -= 1
            if place.segment.live == 0:
                self._segments.remove(place.segment)
                _delete(place.segment)

    def close(self) -> None:
        """Deletes all files and gives the folder free."""
        for segment in self._segments:
            _delete(segment)
        self._segments = []
        self._lock.close()

    def _reserve(self) -> Segment:
        """The file that takes the next record, which counts as live from now on."""
        with self._books:
            if not self._segments or self._segments[-1].full:
                path = self.folder / f"{self._run}-{self._count:06d}{SUFFIX}"
                self._segments.append(Segment(path=path, file=path.open("x+b", buffering=0)))
                self._count += 1
            self._segments[-1].live += 1
            return self._segments[-1]


def _remove_leftovers(folder: pathlib.Path) -> int:
    """Deletes what a killed process left; returns its bytes."""
    leftovers = sorted(folder.glob(f"*{SUFFIX}"))
    for path in leftovers:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
        need = f"a file that starts with {MAGIC!r}"
        fix = "it is no guidance of a former run; move it away"
        ours = MAGIC.startswith(start) if len(start) < len(MAGIC) else start == MAGIC
        require(ours, str(path), f"{start!r}", need, fix, GuidanceError)
    size = sum(path.stat().st_size for path in leftovers)
    for path in leftovers:
        path.unlink()
    return size


def _delete(segment: Segment) -> None:
    segment.file.close()
    segment.path.unlink(missing_ok=True)


def _cannot_write(folder: pathlib.Path, error: OSError) -> GuidanceError:
    got = f"{error.strerror or error} ({error.filename or folder})"
    fix = "make room or make it writable, or let more guidance stay in memory"
    return GuidanceError(message(f"guidance folder {folder}", got, "a folder to write to", fix))
