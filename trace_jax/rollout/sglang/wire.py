"""Directories of weights that trainer and servers share: written, verified, read; deltas applied.

    <version>/config.json, trace_manifest.json, and
        model.safetensors (or shards and their index)   full
        delta.trace                                     delta: what changed since `base`

    write_full(root, version, tensors, config)                    by the trainer
    write_delta(root, version, base, previous, tensors, config)   by the trainer
    verify(path)                                                  by the server
    apply(delta, base, out)                                       by the server: a full directory

A directory appears whole, by one rename, or not at all. What `apply` makes is byte for byte what
`write_full` would have written. Needs numpy alone: the server's environment has no JAX.
"""

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.checks import message, require
from trace_jax.rollout.sglang import wire_delta, wire_files, wire_manifest
from trace_jax.rollout.sglang.wire_delta import Change
from trace_jax.rollout.sglang.wire_files import Source
from trace_jax.rollout.sglang.wire_manifest import (
    CONFIG,
    DELTA,
    FIX,
    MANIFEST,
    PROTOCOL,
    Changed,
    Entry,
    File,
    Manifest,
    Raw,
)

__all__ = ["MANIFEST", "PROTOCOL", "Manifest", "Written", "apply", "manifest", "read", "verify"]
__all__ += ["write_delta", "write_full"]
_SLACK = 2**20  # bytes for config.json, and for what a file system needs beside the data
_ENTRY = 400  # bytes of a tensor in manifest, header and index
_BASE = "load the version that the delta names as its base, or send the whole directory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A directory that was written."""

    path: Path
    bytes: int  # of all its files
    seconds: float


def write_full(
    root: str | os.PathLike[str],
    version: str,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    name: str | None = None,
) -> Written:
    """Writes all tensors as <root>/<version>.

    Args:   tensors: by their Hugging Face names, of any dtype of safetensors (bfloat16 by
            ml_dtypes). config: of config.json. name: of the directory, if it is not the version.
    Raises: ValueError for a dtype or a version that cannot be written; FileExistsError;
            OSError naming the folder, bytes needed and free if it is full. Nothing is left then.
    """
    started = time.perf_counter()
    whole = _raws(tensors)
    entries = _entries(whole)
    target = Path(root) / _checked(name or version)
    need = sum(entry.bytes for entry in entries.values()) + _beside(entries)
    with wire_files.fresh(target, need) as folder:
        stream = (one.data for one in whole.values())
        files = wire_files.write_tensors(folder, entries, stream)
        found = _finish(
            folder,
            files,
            config,
            Manifest(version=_checked(version), base=None, kind="full", tensors=entries, files={}),
        )
    return Written(path=target, bytes=found, seconds=time.perf_counter() - started)


def write_delta(
    root: str | os.PathLike[str],
    version: str,
    base: str,
    previous: Mapping[str, np.ndarray],
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> Written:
    """Writes as <root>/<version> what has to change for `previous`, of version `base`.

    Args:   previous, tensors: as in `write_full`; names, shapes and dtypes may differ.
    Raises: As `write_full`.
    """
    started = time.perf_counter()
    whole, old = _raws(tensors), _raws(previous)
    entries = _entries(whole)

    def compare(name: str) -> tuple[str, Change | None, int | None]:
        one, before = whole[name], old.get(name)
        if before is None or (before.dtype, before.shape) != (one.dtype, one.shape):
            return name, wire_delta.whole(one.data), None
        change = wire_delta.encode(before.data, one.data)
        return name, change, None if change is None else wire_files.crc(before.data)

    found = {n: (c, b) for n, c, b in wire_files.in_threads(compare, whole) if c is not None}
    changes = {
        name: Changed(
            form=change.form,
            index=change.index.nbytes,
            values=change.values.nbytes,
            crc32=wire_files.crc(change.index, change.values),
            base_crc32=base_crc,
        )
        for name, (change, base_crc) in found.items()
    }
    parts = [part for change, _ in found.values() for part in (change.index, change.values)]
    target = Path(root) / _checked(version)
    need = sum(part.nbytes for part in parts) + _beside(entries)
    with wire_files.fresh(target, need) as folder:
        files = {DELTA: wire_files.write_bytes(folder / DELTA, parts)}
        size = _finish(
            folder,
            files,
            config,
            Manifest(
                version=version,
                base=_checked(base),
                kind="delta",
                tensors=entries,
                files={},
                changes=changes,
            ),
        )
    return Written(path=target, bytes=size, seconds=time.perf_counter() - started)


def manifest(path: str | os.PathLike[str]) -> Manifest:
    """What a directory says it holds; see `verify`."""
    return wire_manifest.load(Path(path))


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Compares every byte of a directory with its manifest.

    Raises: ValueError naming the file, and tensor, that is missing, truncated, damaged, or not in
            the manifest; for another protocol; for names that lead out of the directory.
    """
    path = Path(path)
    found = wire_manifest.load(path)
    _check_listing(path, found)
    for name, file in found.files.items():
        if name == DELTA or not name.endswith(".safetensors"):
            _check_file(path, name, file)
    if found.kind == "full":
        with Source(path, found) as source:

            def check(name: str) -> None:
                _check_crc(path, name, found.tensors[name], source.crc(name))

            for _ in wire_files.in_threads(check, found.tensors):
                pass
    return found


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a full directory, each compared with its checksum.

    Returns: arrays in memory of their own; bfloat16 as uint16 and float8 as uint8, bit for bit
             (`manifest(path).tensors[name].dtype` says which).
    Raises:  ValueError as `verify`, or for a delta.
    """
    path = Path(path)
    found = wire_manifest.load(path)
    require(found.kind == "full", str(path), f"a {found.kind}", "a full directory", "apply it")
    with Source(path, found) as source:

        def get(name: str) -> np.ndarray:
            data, entry = source.read(name), found.tensors[name]
            _check_crc(path, name, entry, wire_files.crc(data))
            return wire_manifest.array(entry, data)

        return dict(zip(found.tensors, wire_files.in_threads(get, found.tensors), strict=True))


def apply(
    delta: str | os.PathLike[str], base: str | os.PathLike[str], out: str | os.PathLike[str]
) -> Written:
    """Makes the full directory `out` of a delta and the full directory of its base.

    All that is read and made is compared with checksums; `out` needs no verification after it.
    Raises: ValueError if the base is of another version, or differs in a tensor, from what the
            delta was made from, or if either is damaged; OSError as `write_full`. `out` then is
            not there.
    """
    started = time.perf_counter()
    delta, base, out = Path(delta), Path(base), Path(out)
    new, old = wire_manifest.load(delta), wire_manifest.load(base)
    _check_base(delta, new, base, old)
    config = _read_small(delta, CONFIG, new.files[CONFIG])
    offsets = _offsets(new)
    descriptor = wire_files.open_file(delta, DELTA, new.files[DELTA].bytes)
    try:
        with (
            Source(base, old) as source,
            wire_files.fresh(out, new.tensor_bytes + _beside(new.tensors)) as folder,
        ):

            def make(name: str) -> np.ndarray:
                entry, change = new.tensors[name], new.changes.get(name)
                if change is not None and change.base_crc32 is None:
                    data = np.empty(entry.bytes, np.uint8)
                else:
                    data = source.read(name)
                if change is not None:
                    where = f"{delta / DELTA}: {name}"
                    parts = _change(descriptor, offsets[name], change, where)
                    wire_delta.decode(parts, data, where)
                _check_crc(out, name, entry, wire_files.crc(data))
                return data

            stream = wire_files.in_threads(make, new.tensors)
            files = wire_files.write_tensors(folder, new.tensors, stream)
            files[CONFIG] = wire_files.write_bytes(folder / CONFIG, [config])
            full = dataclasses.replace(new, base=None, kind="full", files=files, changes={})
            size = _write_manifest(folder, full)
    finally:
        os.close(descriptor)
    return Written(path=out, bytes=size, seconds=time.perf_counter() - started)


def _checked(version: str) -> str:
    return wire_manifest.checked_name(version, "weights: version")


def _raws(tensors: Mapping[str, np.ndarray]) -> dict[str, Raw]:
    return {name: wire_manifest.raw(name, array) for name, array in tensors.items()}


def _entries(tensors: Mapping[str, Raw]) -> dict[str, Entry]:
    require(bool(tensors), "weights: tensors", "none", "at least one")
    files = wire_files.shards({name: (one.dtype, one.shape) for name, one in tensors.items()})
    crcs = wire_files.in_threads(lambda one: wire_files.crc(one.data), tensors.values())
    return {
        name: Entry(file=files[name], dtype=one.dtype, shape=one.shape, crc32=crc32)
        for (name, one), crc32 in zip(tensors.items(), crcs, strict=True)
    }


def _beside(entries: Mapping[str, Entry]) -> int:
    return _SLACK + _ENTRY * len(entries) + 3 * sum(len(name) for name in entries)


def _finish(
    folder: Path, files: dict[str, File], config: Mapping[str, Any], found: Manifest
) -> int:
    """Writes config and manifest; returns the bytes of all files."""
    files[CONFIG] = wire_files.write_json(folder / CONFIG, config)
    return _write_manifest(folder, dataclasses.replace(found, files=files))


def _write_manifest(folder: Path, found: Manifest) -> int:
    last = wire_files.write_bytes(folder / MANIFEST, [wire_manifest.dumps(found)])
    return last.bytes + sum(file.bytes for file in found.files.values())


def _check_listing(path: Path, found: Manifest) -> None:
    """A loader reads whatever lies in a directory: nothing may that the manifest does not name."""
    with os.scandir(path) as listing:
        there = {entry.name for entry in listing}
    wanted = {*found.files, MANIFEST}
    got, need = f"no {sorted(wanted - there)}", "every file of its manifest"
    require(wanted <= there, str(path), got, need, FIX)
    got, need = f"also {sorted(there - wanted)}", "no file that its manifest does not name"
    require(there <= wanted, str(path), got, need, FIX)


def _check_file(path: Path, name: str, file: File) -> None:
    descriptor = wire_files.open_file(path, name, file.bytes)
    try:
        got = wire_files.file_crc(descriptor, 0, file.bytes, str(path / name))
    finally:
        os.close(descriptor)
    require(got == file.crc32, str(path / name), f"crc32 {got}", file.crc32, FIX)


def _read_small(path: Path, name: str, file: File) -> bytes:
    descriptor, data = wire_files.open_file(path, name, file.bytes), np.empty(file.bytes, np.uint8)
    try:
        wire_files.fill(descriptor, 0, data, str(path / name))
    finally:
        os.close(descriptor)
    got = wire_files.crc(data)
    require(got == file.crc32, str(path / name), f"crc32 {got}", file.crc32, FIX)
    return data.tobytes()


def _check_crc(path: Path, name: str, entry: Entry, got: int) -> None:
    where = f"{path / entry.file}: {name}"
    require(got == entry.crc32, where, f"crc32 {got}", entry.crc32, FIX)


def _check_base(delta: Path, new: Manifest, base: Path, old: Manifest) -> None:
    require(new.kind == "delta", str(delta), f"a {new.kind} directory", "a delta")
    require(old.kind == "full", str(base), f"a {old.kind}", "a full directory", _BASE)
    where, need = f"{delta}: base", f"version {new.base}"
    require(old.version == new.base, where, f"version {old.version} in {base}", need, _BASE)
    for name, entry in new.tensors.items():
        change = new.changes.get(name)
        if change is not None and change.base_crc32 is None:
            continue
        wanted = entry.crc32 if change is None else change.base_crc32
        there = old.tensors.get(name)
        same = there is not None and (there.dtype, there.shape) == (entry.dtype, entry.shape)
        if there is None or not same or there.crc32 != wanted:
            got = "none" if there is None else f"{there.dtype} {there.shape} crc32 {there.crc32}"
            need = f"{entry.dtype} {entry.shape} crc32 {wanted}"
            raise ValueError(message(f"{base}: {name}", got, need, _BASE))


def _offsets(found: Manifest) -> dict[str, int]:
    at, end = {}, 0
    for name, change in found.changes.items():
        at[name] = end
        end += change.index + change.values
    return at


def _change(descriptor: int, offset: int, change: Changed, where: str) -> Change:
    data = np.empty(change.index + change.values, np.uint8)
    wire_files.fill(descriptor, offset, data, where)
    got = wire_files.crc(data)
    require(got == change.crc32, where, f"crc32 {got}", change.crc32, FIX)
    index, values = data[: change.index], data[change.index :]
    return Change(form=change.form, index=index, values=values)
