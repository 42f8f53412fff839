"""Quantises one token's K and V in registers and stores them into the cache where it stands.

One program a sequence. The cache is input and output at once, so nothing but the slot is touched.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.common import impls
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_kv_attention_decode.ref_write import Record
from pallas_kernels.quantize import rounding
from pallas_kernels.quantize.triton import BLOCK


def write(
    cache_k: Packed,
    cache_v: Packed,
    k_BJK: Float[Array, "B J K"],
    v_BJK: Float[Array, "B J K"],
    slot_B: Int[Array, " B"],
    page_table_BN: Int[Array, "B N"] | None,
    *,
    record: str | None,
    impl: str,
) -> tuple[Packed, Packed, tuple[Record, Record] | None]:
    """See `op.write`."""
    B, J, _ = k_BJK.shape
    format, width = cache_k.format, cache_k.width
    leaves, tree = jax.tree.flatten((cache_k, cache_v))
    first = (slot_B,) if page_table_BN is None else (slot_B, page_table_BN)
    first = (*first, k_BJK, v_BJK)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    if record is not None:
        bits = width // (8 if record == "mantissa" else 2)
        each = [(bits, jnp.uint8), (cache_k.scales.shape[-1], jnp.uint8)]
        each += [(1, jnp.float32)] * format.has_global
        shapes += [jax.ShapeDtypeStruct((B, J, n), dtype) for n, dtype in each * 2]
    body = functools.partial(
        _body, paged=page_table_BN is not None, format=format, width=width, record=record
    )
    found = pl.pallas_call(
        body,
        grid=(B,),
        in_specs=[pl.BlockSpec()] * (len(first) + len(leaves)),
        out_specs=[pl.BlockSpec()] * len(shapes),
        out_shape=shapes,
        input_output_aliases={len(first) + i: i for i in range(len(leaves))},
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
        interpret=impls.interpreted(impl),
        name="fp4_kv_write",
    )(*first, *leaves)
    new_k, new_v = jax.tree.unflatten(tree, found[: len(leaves)])
    if record is None:
        return new_k, new_v, None
    rest = found[len(leaves) :]
    kept = [rest[: len(rest) // 2], rest[len(rest) // 2 :]]
    made = [Record(bits=r[0], scales=r[1], global_scale=r[2] if r[2:] else None) for r in kept]
    return new_k, new_v, (made[0], made[1])


def _body(slot_ref, *refs, paged, format, width, record):
    b = pl.program_id(0)
    table_ref, refs = (refs[0], refs[1:]) if paged else (None, refs)
    new_refs, refs = refs[:2], refs[2:]
    leaves = 2 * (2 + format.has_global)
    cache_refs, record_refs = refs[leaves : 2 * leaves], refs[2 * leaves :]
    lead, place, exists = _place(slot_ref[b], b, table_ref, cache_refs[0].shape[:2])
    for i, new_ref in enumerate(new_refs):
        codes, *stored = _quantize(_load(new_ref, b, width), format)
        packed = _packed(codes, 4, 2)
        mine = slice(i * leaves // 2, (i + 1) * leaves // 2)
        for ref, value in zip(cache_refs[mine], (packed, *stored), strict=True):
            _store(ref, (lead, place), value, exists)
        if record is None:
            continue
        kept = packed if record == "codes" else _packed(codes & 1, 1, 8)
        for ref, value in zip(record_refs[mine], (kept, *stored), strict=True):
            _store(ref, (b,), value, True)


def _place(slot, b, table_ref, shape):
    """(row or page, slot in it, whether it exists)."""
    rows, slots = shape
    if table_ref is None:
        return b, jnp.clip(slot, 0, slots - 1), (slot >= 0) & (slot < slots)
    entries = table_ref.shape[1]
    entry = jnp.clip(slot // slots, 0, entries - 1)
    page = table_ref[b, entry]
    exists = (slot >= 0) & (slot < entries * slots) & (page >= 0) & (page < rows)
    return jnp.clip(page, 0, rows - 1), jnp.where(slot < 0, 0, slot) % slots, exists


def _load(ref, b, width):
    """float32 (heads, width) of sequence b, padded to powers of two with zeros."""
    _, J, K = ref.shape
    head, column = _indices(pl.next_power_of_2(J), pl.next_power_of_2(width))
    inside = (head < J) & (column < K)
    return plt.load(ref.at[b, head, column], mask=inside, other=0.0).astype(jnp.float32)


def _store(ref, place, value, exists):
    head, column = _indices(*value.shape)
    inside = (head < ref.shape[-2]) & (column < ref.shape[-1]) & exists
    plt.store(ref.at[*place, head, column], value.astype(ref.dtype), mask=inside)


def _indices(rows, columns):
    return jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]


def _quantize(x, format):
    """(codes, scale bytes[, global scales]) of rows, int32 and float32."""
    rows, width = x.shape
    shape = (rows, width // format.block, format.block)
    signed = jax.lax.bitcast_convert_type(x, jnp.int32).reshape(shape)
    bits = signed & rounding.MAGNITUDE
    amax = BLOCK.largest(bits)
    g = jnp.ones((1, 1, 1), jnp.float32)
    if format.has_global:
        g = rounding.row_global(jnp.max(amax, axis=1, keepdims=True), format)
    byte = rounding.scale_bytes(bits, amax, g, format, BLOCK)
    codes = rounding.signed(rounding.nearest(bits, rounding.step_of(byte, g, format)), signed)
    found = [codes.reshape(rows, width), byte.reshape(rows, shape[1])]
    return [*found, g.reshape(rows, 1)] if format.has_global else found


def _packed(values, bits, count):
    """`count` values of `bits` bits a byte along the last axis, the first one lowest."""
    rows, width = values.shape
    shift = jnp.arange(count, dtype=jnp.int32)[None, None, :] * bits
    grouped = values.reshape(rows, width // count, count) << shift
    return jnp.sum(grouped, axis=-1, dtype=jnp.int32)
