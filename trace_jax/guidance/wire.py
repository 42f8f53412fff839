"""One record as bytes, in memory and on disk alike.

    magic | header length, crc | arrays' length, crc | header (JSON) | arrays, at multiples of 64

The header names the run, the record's number in it, the sequence, the version of the weights, the
tokens, layers, sites, formats and the coding, and each array's place. Whoever reads says what it
must be: a record that is truncated, damaged, of another run, sequence, version or make is an error
that says so. Nothing is pickled.
"""

import dataclasses
import json
import struct
import zlib
from typing import Any

import numpy as np

from trace_jax import formats
from trace_jax.checks import message, require
from trace_jax.guidance import codec
from trace_jax.guidance.record import Guidance, GuidanceSpec, SiteRecord, Ticket

MAGIC = b"TRACEG01"
_PREFIX = struct.Struct("<8sIIQI4x")  # magic, header length, its crc, payload length, its crc
_ALIGN = 64
_FIELDS = tuple(field.name for field in dataclasses.fields(SiteRecord))
_FIX = "the run cannot use this record; start it again with the same command"


class GuidanceError(RuntimeError):
    """A record is not what it must be, or the store cannot keep it."""


def facts(ticket: Ticket, run: str) -> dict[str, Any]:
    """What the header of the ticket's record must say, as plain JSON values."""
    plain = _plain(ticket.spec)
    kept = ("serial", "name", "version", "tokens", "prompt_length", "tokens_crc")
    return {"run": run} | {name: getattr(ticket, name) for name in kept} | plain


def pack(guidance: Guidance, expected: dict[str, Any]) -> np.ndarray:
    """The bytes (uint8, a multiple of 64 long) of a record of one sequence.

    Args:   guidance: host leaves (layers, tokens, ...). expected: what `facts` says of it.
    Raises: GuidanceError if sites, layers or tokens are not what is expected.
    """
    where = f"guidance record {expected['name']}"
    sites = sorted(guidance.sites)
    require(
        sites == sorted(expected["sites"]), where, sites, expected["sites"], None, GuidanceError
    )
    for name, made in _plain(guidance.spec).items():
        need = expected[name]
        require(made == need, f"{where}: {name}", made, need, None, GuidanceError)
    for site, text in zip(guidance.spec.sites, guidance.spec.formats, strict=True):
        _check_widths(f"{where}: {site}", guidance.sites[site], text, guidance.spec)
    leaves, offset = [], 0
    for site in sites:
        layers = expected["layers"][expected["sites"].index(site)]
        for field in _FIELDS:
            leaf = getattr(guidance.sites[site], field)
            if leaf is None:
                continue
            leaf = np.asarray(leaf)
            need = (len(layers), expected["tokens"])
            got = f"(layers, tokens) {leaf.shape[:2]}"
            fits = leaf.shape[:2] == need
            require(fits, f"{where}: {site}.{field}", got, need, None, GuidanceError)
            leaves.append((site, field, leaf, offset))
            offset += -(-leaf.nbytes // _ALIGN) * _ALIGN
    listed = [[s, f, leaf.dtype.str, list(leaf.shape), at] for s, f, leaf, at in leaves]
    header = json.dumps(expected | {"leaves": listed}).encode()
    start = -(-(_PREFIX.size + len(header)) // _ALIGN) * _ALIGN
    blob = np.empty(start + offset, np.uint8)
    blob[:start] = 0
    for _, _, leaf, at in leaves:
        end = start + at + leaf.nbytes
        target = blob[start + at : end].view(leaf.dtype)
        target.reshape(leaf.shape)[...] = leaf
        blob[end : end + -leaf.nbytes % _ALIGN] = 0
    crc = zlib.crc32(blob[start:].data)
    prefix = _PREFIX.pack(MAGIC, len(header), zlib.crc32(header), offset, crc)
    blob[: _PREFIX.size] = np.frombuffer(prefix, np.uint8)
    blob[_PREFIX.size : _PREFIX.size + len(header)] = np.frombuffer(header, np.uint8)
    blob.flags.writeable = False
    return blob


def _plain(spec: GuidanceSpec) -> dict[str, Any]:
    """The spec as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(spec)))


def _check_widths(where: str, record: SiteRecord, text: str, spec: GuidanceSpec) -> None:
    """The arrays of a site belong together under its format and coding."""
    bits = np.shape(record.bits)
    width = codec.scales_width(bits[-1], format=formats.get(text), coding=spec.coding)
    need = (*bits[:-1], width)
    got = np.shape(record.scales)
    require(got == need, f"{where}.scales", got, f"{need}, as {text} has it", None, GuidanceError)
    if record.global_scale is not None:
        got, need = np.shape(record.global_scale), (*bits[:-1], 1)
        require(got == need, f"{where}.global_scale", got, need, None, GuidanceError)


def unpack(blob: np.ndarray, ticket: Ticket, run: str, place: str) -> Guidance:
    """The record in `blob`: views of it, after every check.

    Args:   place: where the bytes are, for messages.
    Raises: GuidanceError naming what is wrong: truncation, damage, or a record of something else.
    """
    where = f"guidance record {ticket.name} ({place})"
    header, payload = _split(blob, where)
    for name, need in facts(ticket, run).items():
        got = header.get(name, "nothing")
        require(got == need, f"{where}: {name}", got, need, _FIX, GuidanceError)
    sites: dict[str, dict[str, Any]] = {}
    for site, field, dtype, shape, at in header["leaves"]:
        size = int(np.dtype(dtype).itemsize * np.prod(shape))
        leaf = payload[at : at + size].view(dtype).reshape(shape)
        sites.setdefault(site, dict.fromkeys(_FIELDS))[field] = leaf
    records = {site: SiteRecord(**leaves) for site, leaves in sites.items()}
    return Guidance(sites=records, spec=ticket.spec)


def _split(blob: np.ndarray, where: str) -> tuple[dict[str, Any], np.ndarray]:
    """Header and payload, once their lengths and checksums are right."""
    head = blob[: _PREFIX.size].tobytes().ljust(_PREFIX.size, b"\0")
    magic, header_length, header_crc, length, payload_crc = _PREFIX.unpack(head)
    require(magic == MAGIC, where, f"magic {magic!r}", f"{MAGIC!r}", _FIX, GuidanceError)
    start = -(-(_PREFIX.size + header_length) // _ALIGN) * _ALIGN
    need = f"{start + length} bytes: it is truncated or damaged"
    require(start + length == len(blob), where, f"{len(blob)} bytes", need, _FIX, GuidanceError)
    header = blob[_PREFIX.size : _PREFIX.size + header_length].tobytes()
    for part, data, need_crc in (
        ("header", memoryview(header), header_crc),
        ("arrays", blob[start:].data, payload_crc),
    ):
        got = zlib.crc32(data)
        damaged = message(f"{where}: checksum of the {part}", f"{got:#x}", f"{need_crc:#x}", _FIX)
        if got != need_crc:
            raise GuidanceError(damaged)
    return json.loads(header), blob[start:]
