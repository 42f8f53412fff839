"""The guidance record: what a rollout returns about its FP4 rounding. Opaque outside qat/ and here.

A record holds, for each site and recorded layer, one `SiteRecord` per token: packed codes (or only
their mantissa bits), the E4M3 block scales as bytes, and the float32 global scale where the site
has one of its own. Source: TRACE (arXiv 2610.07767), sections on guided QAT and compact guidance.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8

# An array on the host, of any shape. Type checkers need not know that numpy goes where jax does.
if TYPE_CHECKING:
    HostArray: TypeAlias = Any
else:
    HostArray = np.ndarray

SITES = ("expert_in", "expert_hidden", "k", "v")
KINDS = ("codes", "mantissa")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidanceSpec:
    """Static facts of a record: what is in it and how it is packed."""

    kind: str  # "codes": 4 bits a value; "mantissa": 1 bit a value
    layers: tuple[int, ...]  # absolute layer ids, ascending; the leading axis of every leaf
    sites: tuple[str, ...]  # names out of SITES
    format: str = "nvfp4"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """Rounding outcomes of one site; the last axis is the quantised one (length K)."""

    bits: UInt8[Array, "*A packed"] | HostArray  # K/2 or K/8 bytes, the first value lowest
    scales: UInt8[Array, "*A N"] | HostArray  # E4M3 bytes, one per block of 16
    global_scale: Float[Array, "*A 1"] | HostArray | None  # None: the site's global scale is 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guidance:
    """Records of all sites. Leading axes: (recorded layers, tokens) or (recorded layers, B, S)."""

    sites: dict[str, SiteRecord]
    spec: GuidanceSpec = dataclasses.field(metadata={"static": True})
