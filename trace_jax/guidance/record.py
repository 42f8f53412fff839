"""The guidance record: what a rollout returns about its FP4 rounding. Opaque outside qat/ and here.

A record holds, for each site and recorded layer, one `SiteRecord` per token: packed codes (or only
their mantissa bits), the block scales, and the global scale where the site has one of its
own; `Coding` says how they are packed. Records are host or device arrays (`Guidance`), or wait in
a store (`store.py`) and are known by their `Ticket`s.
Source: TRACE (arXiv 2610.07767), sections on guided QAT and compact guidance.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8, UInt16

from trace_jax.checks import require

# An array on the host, of any shape. Type checkers need not know that numpy goes where jax does.
if TYPE_CHECKING:
    HostArray: TypeAlias = Any
else:
    HostArray = np.ndarray

SITES = {  # where rounding can be recorded, and the component of a layer that it is in
    "expert_in": "moe",
    "expert_hidden": "moe",
    "mlp_in": "mlp",
    "mlp_hidden": "mlp",
    "k": "attention",
    "v": "attention",
}
KINDS = ("codes", "mantissa")
SCALE_BITS = (2, 3, 4, 8)
GLOBAL_BITS = (16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coding:
    """How a record is packed; see `codec.py` for what is exact."""

    kind: str = "codes"  # "codes": every code; "mantissa": the lowest bit of every code
    scale_bits: int = 8  # low bits kept of each scale byte; 8: whole bytes
    global_bits: int = 32  # of a global scale; 16: two bytes or fewer, for BF16 activations

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "guidance kind", self.kind, f"one of {list(KINDS)}")
        for name, choices in (("scale_bits", SCALE_BITS), ("global_bits", GLOBAL_BITS)):
            value = getattr(self, name)
            require(value in choices, f"guidance {name}", value, f"one of {list(choices)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidanceSpec:
    """Static facts of a record: what is in it and how it is packed."""

    kind: str  # of the coding
    sites: tuple[str, ...]  # names out of SITES
    layers: tuple[tuple[int, ...], ...]  # of each site: absolute ids, ascending; its leading axis
    formats: tuple[str, ...]  # of each site, as `formats.spell` writes it
    scale_bits: int = 8  # of the coding
    global_bits: int = 32  # of the coding

    def __post_init__(self) -> None:
        aligned = len(self.sites) == len(self.layers) == len(self.formats)
        each = all(isinstance(ids, tuple) and list(ids) == sorted(set(ids)) for ids in self.layers)
        got = (self.sites, self.layers, self.formats)
        need = "for each site its ascending layer ids and its format"
        require(aligned and each, "GuidanceSpec (sites, layers, formats)", got, need)

    def layers_of(self, site: str) -> tuple[int, ...]:
        """The layers that have a record of this site."""
        return self.layers[self.sites.index(site)]

    @property
    def coding(self) -> Coding:
        """How the sites are packed."""
        return Coding(kind=self.kind, scale_bits=self.scale_bits, global_bits=self.global_bits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """Rounding outcomes of one site; the last axis is the quantised one (length K)."""

    bits: UInt8[Array, "*A packed"] | HostArray  # packed codes or bits, the first value lowest
    scales: UInt8[Array, "*A S"] | HostArray  # scale bytes of the site's format, or their low bits
    # None: the format has none. float32, or what is left of it with 16 bits
    global_scale: (
        Float[Array, "*A 1"] | UInt16[Array, "*A 1"] | UInt8[Array, "*A 1"] | HostArray | None
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guidance:
    """Records of all sites. Leading axes: (a site's layers, tokens) or (a site's layers, B, S)."""

    sites: dict[str, SiteRecord]
    spec: GuidanceSpec = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticket:
    """A record that waits in a store, and what it must be; the record lives as long as this."""

    source: "Source" = dataclasses.field(repr=False, compare=False)
    serial: int  # number within the store
    name: str  # of the sequence: prompt uid and sample
    spec: GuidanceSpec
    tokens: int  # processed tokens that have a record: positions 0..tokens-1, the prompt included
    prompt_length: int  # of them the first that were given, not sampled
    tokens_crc: int  # `crc_of_tokens` of the whole sequence, its unprocessed last token included
    version: int  # of the weights that sampled it


def crc_of_tokens(tokens_T: np.ndarray) -> int:
    """What ties a record to the sequence it was made with."""
    return zlib.crc32(np.ascontiguousarray(tokens_T, "<i4").tobytes())


class Source(Protocol):
    """What gives records back for tickets; `store.GuidanceStore` is one."""

    def load(
        self,
        tickets: Sequence[Ticket | None],
        like: Ticket,
        tokens_BT: np.ndarray,
        valid_BT: np.ndarray,
    ) -> Guidance:
        """Leaves (layers, B, S, ...) on the host, zero where a row or token has no record."""
        ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredGuidance:
    """Guidance of a batch that waits in a store; `load` brings the rows that are needed."""

    tickets: tuple[Ticket | None, ...]  # one per row; None: a padding row, which has no record
    like: Ticket  # any ticket of the batch: tells the make, also where every row is padding

    @property
    def spec(self) -> GuidanceSpec:
        """Of every record."""
        return self.like.spec

    def take(self, part: slice | np.ndarray) -> "StoredGuidance":
        """Some of the rows; nothing is loaded."""
        rows = np.arange(len(self.tickets))[part]
        tickets = tuple(self.tickets[row] for row in rows)
        return StoredGuidance(tickets=tickets, like=self.like)

    def load(self, tokens_BT: np.ndarray, valid_BT: np.ndarray) -> Guidance:
        """The records of all rows, verified against the tokens of the rows."""
        return self.like.source.load(self.tickets, self.like, tokens_BT, valid_BT)


def stack(records: Sequence[Guidance | None], rows: int, S: int) -> Guidance:
    """Records (layers, tokens, ...) of sequences as one of (layers, rows, S, ...), on the host.

    Args:    records: one per row; None, and rows beyond them: padding, all zero.
    Raises:  ValueError if they are not of one make.
    """
    present = [(row, record) for row, record in enumerate(records) if record is not None]
    makes = {jax.tree.structure(record) for _, record in present}  # sites and spec
    need = "the same sites and spec (or none) in every trajectory"
    require(len(makes) == 1, "batch guidance", makes, need)

    def join(*leaves: np.ndarray) -> np.ndarray:
        first = leaves[0]
        makes = {(leaf.shape[0], leaf.shape[2:], leaf.dtype) for leaf in leaves}
        require(len(makes) == 1, "batch guidance", makes, "leaves of one make")
        stacked = np.zeros((first.shape[0], rows, S, *first.shape[2:]), first.dtype)
        for (row, _), leaf in zip(present, leaves, strict=True):
            stacked[:, row, : leaf.shape[1]] = leaf
        return stacked

    return jax.tree.map(join, *(record for _, record in present))
