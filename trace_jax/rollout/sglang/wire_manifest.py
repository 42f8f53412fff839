"""What a directory of weights holds: its manifest, which is read as data of whom nothing is known.

The manifest is JSON with a CRC-32 of its own; every size in it is checked before anything is
allocated. Its tensors are those of the full version whether the directory is full or a delta, so a
delta that was applied can be compared with what the trainer holds.
"""

import dataclasses
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.checks import message, require
from trace_jax.rollout.sglang import wire_delta

PROTOCOL = 1
MANIFEST = "trace_manifest.json"
DELTA = "delta.trace"  # not *.safetensors: a server without the plug-in finds no weights in it
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
FIX = "the directory is damaged: publish the weights again"
_LONGEST = 2**28  # bytes; 55 thousand tensors, of a 30B model, take 10 MB
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")  # of files and versions
_MOST_BYTES = 2**48  # of a tensor
_CRC = b',"crc32":'

# safetensors' name of a dtype: bytes of an element, and the NumPy dtype that holds its bits
DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "<f8"),
    "F32": (4, "<f4"),
    "F16": (2, "<f2"),
    "BF16": (2, "<u2"),
    "F8_E4M3": (1, "u1"),
    "F8_E5M2": (1, "u1"),
    "I64": (8, "<i8"),
    "I32": (4, "<i4"),
    "I16": (2, "<i2"),
    "I8": (1, "i1"),
    "U64": (8, "<u8"),
    "U32": (4, "<u4"),
    "U16": (2, "<u2"),
    "U8": (1, "u1"),
    "BOOL": (1, "?"),
}
_KNOWN = {np.dtype(kind).name: code for code, (_, kind) in DTYPES.items() if code[0] in "IUB"}
_KNOWN |= {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_KNOWN |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "bool": "BOOL"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raw:
    """A tensor's bytes."""

    dtype: str  # of DTYPES
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 (N,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a manifest; `file` is that of the full directory."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype][0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """A file in a manifest. The checksum of a safetensors file is that of its header."""

    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """A tensor that a delta changes: sizes of its part of the file, in the order of tensors."""

    form: str
    index: int  # bytes
    values: int  # bytes
    crc32: int  # of both
    base_crc32: int | None  # of the old tensor; None where it does not matter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a directory holds."""

    version: str
    base: str | None  # the version that a delta changes
    kind: str  # "full" | "delta"
    tensors: dict[str, Entry]  # of the full version, in the order of its files
    files: dict[str, File]
    changes: dict[str, Changed] = dataclasses.field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors of the full version."""
        return sum(entry.bytes for entry in self.tensors.values())


def raw(name: str, array: np.ndarray) -> Raw:
    """The bytes of an array, copied only if it is not contiguous.

    Raises: ValueError for a dtype that safetensors has no name for.
    """
    code = _KNOWN.get(array.dtype.name)
    need = f"one of {sorted(_KNOWN)}, little-endian"
    good = code is not None and array.dtype.byteorder != ">"
    require(good, f"weights: {name}: dtype", array.dtype, need)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Raw(dtype=str(code), shape=tuple(array.shape), data=data)


def array(entry: Entry, data: np.ndarray) -> np.ndarray:
    """A tensor's bytes as NumPy holds them: bfloat16 as uint16, float8 as uint8."""
    return data.view(DTYPES[entry.dtype][1]).reshape(entry.shape)


def checked_name(name: object, where: str) -> str:
    """A version or the name of a file, which cannot lead out of its directory.

    Raises: ValueError for any other text.
    """
    good = isinstance(name, str) and _NAME.fullmatch(name) is not None
    require(good, where, repr(name), "letters, digits, '.', '_' and '-', at most 121, no path")
    return str(name)


def dumps(manifest: Manifest) -> bytes:
    """The text of a manifest, with its checksum at the end."""
    facts: dict[str, Any] = {"protocol": PROTOCOL, **vars(manifest)}
    for name in ("tensors", "files", "changes"):
        facts[name] = {key: vars(value) for key, value in facts[name].items()}
    text = json.dumps(facts, separators=(",", ":")).encode()
    return text[:-1] + _CRC + b"%d}" % zlib.crc32(text)


def load(path: Path) -> Manifest:
    """The manifest of a directory; no other file is looked at.

    Raises: ValueError if there is none, or it is damaged, of another protocol, or says what cannot
            be: names that are paths, unknown dtypes, sizes that do not fit together.
    """
    where = str(path / MANIFEST)
    facts = _read(path, where)
    got, fix = facts.pop("protocol", None), "the same version of trace_jax on both sides"
    require(got == PROTOCOL, f"{where}: protocol", repr(got), PROTOCOL, fix)
    try:
        manifest = _parsed(facts)
    except (KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(message(where, got, "the fields of a manifest", FIX)) from error
    _check(manifest, where)
    return manifest


def _read(path: Path, where: str) -> dict[str, Any]:
    fix = "give a directory that trace_jax.rollout.sglang.wire wrote"
    need = f"a regular file of at most {_LONGEST} bytes"
    try:
        facts = os.lstat(path / MANIFEST)
        good = stat.S_ISREG(facts.st_mode) and facts.st_size <= _LONGEST
        require(good, where, f"mode {facts.st_mode:o}, {facts.st_size} bytes", need, fix)
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise ValueError(message(where, error.strerror, need, fix)) from error
    body, _, last = text.rpartition(_CRC)
    body, got, need = body + b"}", last.decode(errors="replace"), "the crc32 of what precedes it"
    require(last == b"%d}" % zlib.crc32(body), f"{where}: crc32", repr(got[:20]), need, FIX)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(message(where, f"no JSON ({error})", "a manifest", FIX)) from error
    require(isinstance(found, dict), where, type(found).__name__, "an object", FIX)
    return found


def _parsed(facts: dict[str, Any]) -> Manifest:
    tensors = {
        name: Entry(**{**entry, "shape": tuple(entry["shape"])})
        for name, entry in facts.pop("tensors").items()
    }
    files = {name: File(**entry) for name, entry in facts.pop("files").items()}
    changes = {name: Changed(**entry) for name, entry in facts.pop("changes").items()}
    return Manifest(**facts, tensors=tensors, files=files, changes=changes)


def _check(manifest: Manifest, where: str) -> None:
    checked_name(manifest.version, f"{where}: version")
    if manifest.base is not None:
        checked_name(manifest.base, f"{where}: base")
    good = (manifest.kind, manifest.base is None) in (("full", True), ("delta", False))
    got = f"{manifest.kind!r} of base {manifest.base!r}"
    require(good, f"{where}: kind", got, "'full' without a base or 'delta' with one", FIX)
    for name, file in manifest.files.items():
        checked_name(name, f"{where}: file")
        _numbers(f"{where}: {name}", file.bytes, file.crc32)
    for name, entry in manifest.tensors.items():
        at = f"{where}: {name}"
        checked_name(entry.file, f"{at}: file")
        known = isinstance(entry.dtype, str) and entry.dtype in DTYPES
        require(known, f"{at}: dtype", repr(entry.dtype), f"one of {list(DTYPES)}", FIX)
        _numbers(at, *entry.shape, entry.crc32)
        require(entry.bytes <= _MOST_BYTES, at, f"{entry.bytes} bytes", f"<= {_MOST_BYTES}", FIX)
    wanted = {CONFIG} | ({DELTA} if manifest.kind == "delta" else files_of(manifest.tensors))
    got, need = sorted(manifest.files), sorted(wanted)
    require(manifest.files.keys() == wanted, f"{where}: files", got, need, FIX)
    _check_changes(manifest, where)


def _check_changes(manifest: Manifest, where: str) -> None:
    total = 0
    for name, change in manifest.changes.items():
        at = f"{where}: change of {name}"
        require(name in manifest.tensors, at, "no such tensor", "one of the manifest", FIX)
        good = change.form in wire_delta.FORMS
        require(good, at, repr(change.form), f"one of {wire_delta.FORMS}", FIX)
        numbers = [change.index, change.values, change.crc32]
        numbers += [] if change.base_crc32 is None else [change.base_crc32]
        _numbers(at, *numbers)
        entry, whole = manifest.tensors[name], change.form == "whole"
        good = (change.index, change.values) == (0, entry.bytes) if whole else True
        good = good and (whole or change.base_crc32 is not None)
        need = "all bytes of the tensor as 'whole', or a base that the others change"
        require(good, at, str(change), need, FIX)
        total += change.index + change.values
    if manifest.kind == "delta":
        got = f"changes of {total} bytes in a file of {manifest.files[DELTA].bytes}"
        same = total == manifest.files[DELTA].bytes
        require(same, f"{where}: {DELTA}", got, "as many in both", FIX)
    else:
        got = f"{len(manifest.changes)} changes"
        require(not manifest.changes, where, got, "none in a full directory", FIX)


def _numbers(where: str, *numbers: Any) -> None:
    good = all(type(n) is int and 0 <= n <= _MOST_BYTES for n in numbers)
    require(good, where, f"numbers {numbers!r}", f"whole ones of 0..{_MOST_BYTES}", FIX)


def files_of(tensors: Mapping[str, Entry]) -> set[str]:
    """The files that a full directory keeps tensors in, with their index if there are several."""
    found = {entry.file for entry in tensors.values()}
    return found | ({INDEX} if len(found) > 1 else set())
