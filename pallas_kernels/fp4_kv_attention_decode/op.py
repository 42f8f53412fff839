"""Attention of one new token per sequence over a packed FP4 KV cache; the write of its K and V.

A cache is a `Packed` for K and one for V: leaves (B, C, J, ...) with C slots for each of B
sequences and J kv heads, or pages (pages, page, J, ...) that a table (B, N) of page ids hands out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import gradients, impls, packed
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_kv_attention_decode import (
    checks,
    ref_write,
    xla,
)
from pallas_kernels.fp4_kv_attention_decode.ref_write import Record
from pallas_kernels.quantize import rounding

OP = "fp4_kv_attention_decode"


def attention_decode(
    q_BHK: Float[Array, "B H K"],
    k: Packed,
    v: Packed,
    length_B: Int[Array, " B"],
    *,
    impl: str,
    page_table_BN: Int[Array, "B N"] | None = None,
) -> Float[Array, "B H K"]:
    """softmax(q k / sqrt(K)) v over the first `length_B[b]` slots of each sequence.

    Math:    value = fl(element(code) * fl(scale * factor)), rounded to the dtype of q; scores and
             softmax in float32; weights rounded to the dtype of q, their product with v summed in
             float32. "triton" rounds the weights before they are divided by their sum.
    Args:    q_BHK: bfloat16, float16 or float32, after RoPE. Query head h reads kv head
             h // (H / J). length_B: int32, 0..C. page_table_BN: int32; slot c of sequence b is
             slot c % page of page page_table_BN[b, c // page]; entries beyond the length may be
             anything.
    Returns: in the dtype of q; zeros where the length is 0. What slots beyond the length hold, NaN
             too, does not matter.
    Raises:  ValueError, TypeError for shapes and dtypes; NotImplementedError for an impl that
             cannot run this, and under differentiation: decoding has no gradient.
    """
    where = f"{OP}.attention_decode"
    slots = checks.cache(where, k, v, page_table_BN)
    checks.query(where, q_BHK, k, length_B, page_table_BN)
    checks.debug_lengths(where, length_B, slots)
    checks.debug_pages(where, length_B, k.shape, page_table_BN)
    checks.debug_scales(where, k, v, length_B, page_table_BN)
    impl = impls.choose(OP, impl, {"xla": None, "triton": _unread(k, v)})
    # values that a debug check would refuse must not lead out of the arrays
    length_B = jnp.clip(length_B, 0, slots)
    if page_table_BN is not None:
        page_table_BN = jnp.clip(page_table_BN, 0, k.shape[0] - 1)
    run = functools.partial(_attend, impl)
    return gradients.refused(OP, run, q_BHK, k, v, length_B, page_table_BN)


def write(
    cache_k: Packed,
    cache_v: Packed,
    k_BJK: Float[Array, "B J K"],
    v_BJK: Float[Array, "B J K"],
    slot_B: Int[Array, " B"],
    *,
    impl: str,
    record: str | None,
    page_table_BN: Int[Array, "B N"] | None = None,
) -> tuple[Packed, Packed, tuple[Record, Record] | None]:
    """Quantises one K and one V vector for each sequence and kv head and stores them in a slot.

    Math:    plain rounding of the cache's format, bit for bit that of `trace_jax.formats`; each
             vector of K values is a row with a global scale of its own, if the format has one.
    Args:    k_BJK, v_BJK: bfloat16 or float32, after RoPE. slot_B: int32; a slot that is not in
             0..C-1 is not written. record: what guidance keeps of them, "codes", "mantissa" (the
             lowest bit of each code), or None. Two sequences must not write the same slot.
    Returns: (K cache, V cache, (record of K, record of V) or None). The caches take the place of
             the given ones where these are donated, or are not used again in the same program.
    Raises:  as `attention_decode`.
    """
    where = f"{OP}.write"
    slots = checks.cache(where, cache_k, cache_v, page_table_BN)
    checks.new(where, cache_k, k_BJK, v_BJK, slot_B, record, page_table_BN)
    checks.debug_slots(where, slot_B, slots)
    checks.debug_pages(where, slot_B, cache_k.shape, page_table_BN, only_last=True)
    reason = rounding.unsupported(cache_k.format) or _unread(cache_k, cache_v)
    impl = impls.choose(OP, impl, {"xla": None, "triton": reason})
    arrays = (cache_k, cache_v, k_BJK, v_BJK, slot_B, page_table_BN)
    return gradients.refused(OP, functools.partial(_store, impl, record), *arrays)


def _unread(k: Packed, v: Packed) -> str | None:
    """Why the Triton kernels cannot read this cache, or None."""
    biggest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((k, v)))
    if 2**31 <= biggest <= 2**32:
        return (
            "Pallas-Triton takes offsets of 2 to 4 GiB for negative; give one layer, or fewer slots"
        )
    return packed.undecoded("the cache", k)


def _attend(impl: str, *arrays: Any) -> Array:
    if impl == "xla":
        return xla.attention_decode(*arrays)
    from pallas_kernels.fp4_kv_attention_decode import triton

    return triton.attention_decode(*arrays, impl=impl)


def _store(
    impl: str, record: str | None, *arrays: Any
) -> tuple[Packed, Packed, tuple[Record, Record] | None]:
    if impl == "xla":
        return ref_write.write(*arrays, record=record)
    from pallas_kernels.fp4_kv_attention_decode import triton_write

    return triton_write.write(*arrays, record=record, impl=impl)
