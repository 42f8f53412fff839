"""The specification of the write, and its plain-XLA path: a token's vectors are few."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.common.packed import Packed
from trace_jax.formats import Format, e2m1
from trace_jax.formats.base import parity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What guidance keeps of the vectors written: whole scale bytes, float32 global scales."""

    bits: UInt8[Array, "B J packed"]  # codes as in the cache, or their lowest bits, 8 a byte
    scales: UInt8[Array, "B J S"]
    global_scale: Float[Array, "B J 1"] | None


def write(
    cache_k: Packed,
    cache_v: Packed,
    k_BJK: Float[Array, "B J K"],
    v_BJK: Float[Array, "B J K"],
    slot_B: Int[Array, " B"],
    page_table_BN: Int[Array, "B N"] | None,
    *,
    record: str | None,
) -> tuple[Packed, Packed, tuple[Record, Record] | None]:
    """See `op.write`."""
    place = _place(cache_k, slot_B, page_table_BN)
    caches, records = [], []
    for cache, x in ((cache_k, k_BJK), (cache_v, v_BJK)):
        new, kept = _quantize(x, cache.format, record)
        caches.append(jax.tree.map(lambda c, n: c.at[place].set(n, mode="drop"), cache, new))
        records.append(kept)
    return caches[0], caches[1], None if record is None else (records[0], records[1])


def _place(cache: Packed, slot_B: Array, page_table_BN: Array | None) -> tuple[Array, Array]:
    """Indices of the leading two axes, out of range where there is no such slot."""
    rows, slots = jnp.arange(slot_B.shape[0]), cache.shape[1]
    if page_table_BN is None:
        return rows, jnp.where(slot_B < 0, slots, slot_B)
    inside = (slot_B >= 0) & (slot_B < page_table_BN.shape[1] * slots)
    slot_B = jnp.where(inside, slot_B, 0)
    page = page_table_BN[rows, slot_B // slots]
    return jnp.where(inside & (page >= 0), page, cache.shape[0]), slot_B % slots


def _quantize(x: Array, format: Format, record: str | None) -> tuple[Packed, Record]:
    rows = format.pad(x.astype(jnp.float32))
    global_ = format.row_global(rows)
    codes, scales = format.quantize_rows(rows, global_)
    bits = format.pack_codes(codes)
    factor = None if global_ is None else format.decode_scale(global_)
    kept = e2m1.pack_bits(parity(codes)) if record == "mantissa" else bits
    stored = Packed(codes=bits, scales=scales, factor=factor, format=format)
    return stored, Record(bits=kept, scales=scales, global_scale=global_)
