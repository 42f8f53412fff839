"""How a server's rows of side data are laid out: one specification for plug-in and client.

Guidance travels the way routed experts do: SGLang's capturer keeps, for every KV slot and layer,
one row of int32, which we widen. A row is

    [X routes] [1 tag] [bytes of the recorded sites, in the order of `Layout.sites`, zero-padded]

A site's bytes are, for its vectors one after another, all packed bits, then all scale bytes, then
all float32 global scales (little-endian) where the format has one. A site that a layer does not
record leaves its bytes 0. The tag ties a row to its token, so that a row that is missing, stale or
shifted is found by the client. Imports neither JAX nor torch.
"""

import dataclasses
import json
import math
import zlib
from typing import Any

import numpy as np

from trace_jax.checks import require

PROTOCOL = 1
ENVIRONMENT = "TRACE_JAX_SGLANG"  # names the variable with the path of a layout's JSON file
_MASK = 0xFFFFFFFF
# odd constants near 2^32 / golden ratio and of xxHash32: any odd ones would do
_POSITION, _TOKEN, _LAYER = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelled:
    """A number format as its name and options, without the code that computes it."""

    name: str  # of `trace_jax.formats`
    options: tuple[tuple[str, str], ...]  # every field of the format, in order
    block: int  # values that share a scale byte
    has_global: bool  # whether each vector has a float32 global scale

    def option(self, name: str) -> str:
        """The value of an option; raises KeyError for one that the format does not have."""
        return dict(self.options)[name]

    def padded(self, length: int) -> int:
        """The next whole number of blocks."""
        return -(-length // self.block) * self.block


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteLayout:
    """One recorded site of a token."""

    name: str  # out of `guidance.record.SITES`
    format: Spelled
    rows: int  # vectors of a token (experts of the token, or KV heads), each with its own scales
    length: int  # values of a vector
    layers: tuple[int, ...]  # absolute ids

    def bits_bytes(self, kind: str) -> int:
        """Bytes of packed codes ("codes", 4 bits) or mantissa bits ("mantissa", 1) of a vector."""
        return self.format.padded(self.length) * (4 if kind == "codes" else 1) // 8

    @property
    def scale_bytes(self) -> int:
        """Scale bytes of a vector."""
        return self.format.padded(self.length) // self.format.block

    def bytes(self, kind: str) -> int:
        """Bytes of all vectors of one token in one layer."""
        each = self.bits_bytes(kind) + self.scale_bytes + 4 * self.format.has_global
        return self.rows * each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What a server quantises, and what it returns for each processed token and layer."""

    layers: int  # of the model
    topk: int  # X
    kind: str  # of the guidance: "codes" | "mantissa"
    sites: tuple[SiteLayout, ...]  # recorded
    weights: Spelled | None  # of routed experts; None: not quantised
    acts: Spelled | None  # of the inputs of both expert matmuls
    kv: Spelled | None  # of K and V
    quantised: tuple[int, ...]  # layers where the three above hold

    @property
    def columns(self) -> int:
        """int32 numbers of a row beyond the routes."""
        return 1 + math.ceil(sum(site.bytes(self.kind) for site in self.sites) / 4)

    @property
    def seed(self) -> int:
        """32 bits that tell this layout from others; part of every tag."""
        return zlib.crc32(self.to_json().encode())

    def offsets(self) -> dict[str, int]:
        """Where each site's bytes begin, counted from the first byte after the tag."""
        found, at = {}, 0
        for site in self.sites:
            found[site.name] = at
            at += site.bytes(self.kind)
        return found

    def to_json(self) -> str:
        """Canonical text; `from_json` inverts it."""
        facts = {"protocol": PROTOCOL, **dataclasses.asdict(self)}
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def from_json(text: str) -> Layout:
    """Inverse of `Layout.to_json`.

    Raises: ValueError for another protocol, or text that is no layout.
    """
    facts: dict[str, Any] = json.loads(text)
    where, got = "sglang layout: protocol", facts.pop("protocol", None)
    fix = "start the server again with this version of trace_jax"
    require(got == PROTOCOL, where, got, PROTOCOL, fix)

    def spelled(value: dict[str, Any] | None) -> Spelled | None:
        if value is None:
            return None
        return Spelled(**{**value, "options": tuple(tuple(pair) for pair in value["options"])})

    sites = [
        SiteLayout(**{**site, "format": spelled(site["format"]), "layers": tuple(site["layers"])})
        for site in facts.pop("sites")
    ]
    formats = {name: spelled(facts.pop(name)) for name in ("weights", "acts", "kv")}
    facts |= {"sites": tuple(sites), "quantised": tuple(facts["quantised"]), **formats}
    return Layout(**facts)


def tags(layout: Layout, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The tags (S, L) of processed tokens, int32.

    Math: (p C1 xor t C2 xor (l + 1) C3 xor seed) mod 2^32, for position p, token id t, layer l.
    """
    p = np.asarray(positions, np.uint64)[:, None] * np.uint64(_POSITION)
    t = np.asarray(tokens, np.uint64)[:, None] * np.uint64(_TOKEN)
    layer = np.arange(1, layout.layers + 1, dtype=np.uint64)[None, :] * np.uint64(_LAYER)
    mixed = (p ^ t ^ layer ^ np.uint64(layout.seed)) & np.uint64(_MASK)
    return mixed.astype(np.uint32).view(np.int32)
