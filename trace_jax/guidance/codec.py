"""Packs rounding outcomes into a `SiteRecord` and counts what a record costs.

"codes" keeps the 4-bit code of each value, "mantissa" only its lowest bit: sorted by value, the
signed E2M1 codebook has alternating mantissa bits, so of two neighbours exactly one carries the
recorded bit. Source: TRACE (arXiv 2610.07767), compact guidance.
"""

from jaxtyping import Array, Float, UInt8

from trace_jax.checks import require
from trace_jax.formats import e2m1, nvfp4
from trace_jax.guidance.record import KINDS, SiteRecord


def encode(
    codes: UInt8[Array, "*A K"],
    scales: UInt8[Array, "*A N"],
    global_scale: Float[Array, "*A 1"] | None,
    kind: str,
) -> SiteRecord:
    """Packs codes, E4M3 scale bytes and an optional float32 global scale. K: multiple of 16."""
    require(kind in KINDS, "guidance kind", kind, f"one of {list(KINDS)}")
    bits = e2m1.pack(codes) if kind == "codes" else e2m1.pack_bits(codes & 1)
    return SiteRecord(bits=bits, scales=scales, global_scale=global_scale)


def decode(record: SiteRecord, kind: str) -> tuple[UInt8[Array, "*A K"], Float[Array, "*A N"]]:
    """(codes 0..15, or mantissa bits 0..1; the step fl(s*g) of each block)."""
    values = e2m1.unpack(record.bits) if kind == "codes" else e2m1.unpack_bits(record.bits)
    return values, nvfp4.block_step(record.scales, record.global_scale)


def site_bytes(values: int, kind: str, rows_with_global: int) -> int:
    """Bytes of one token at one site and layer: bits, scales, and 4 bytes per own global scale."""
    bits = values * (4 if kind == "codes" else 1) // 8
    return bits + values // nvfp4.BLOCK + 4 * rows_with_global
