"""Costs, inputs and baselines of the named cases."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.bench import Arrays, Bench
from pallas_kernels.common.cost import Cost
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_kv_attention_decode import op, ref, ref_write
from pallas_kernels.fp4_kv_attention_decode.cases import CASES, Case
from pallas_kernels.quantize import rounding
from trace_jax import formats


def cache(case: Case, key: jax.Array) -> Packed:
    """Random codes, with scales and factors that make values of about 1."""
    format = formats.get(case.format)
    lead = (case.B, case.C)
    if case.page is not None:
        lead = (case.B * case.C // case.page, case.page)
    lead, width = (*lead, case.J), format.padded(case.K)
    k_codes, k_scales, k_factor = jax.random.split(key, 3)
    bits = format.element.BITS
    codes = jax.random.bits(k_codes, (*lead, width * bits // 8), jnp.uint8)
    codes = codes & 0xB7 if bits == 8 else codes  # at most 1.9, never NaN
    scales = jax.random.bits(k_scales, (*lead, width // format.block), jnp.uint8)
    one = 0x38 if format.name == "nvfp4" else 127  # the byte of 1
    scales = jnp.uint8(one - 8) + (scales & 7) if format.name == "nvfp4" else one - (scales & 1)
    factor = None
    if format.has_global:
        factor = jax.random.uniform(k_factor, (*lead, 1), jnp.float32, 0.4, 0.6)
    return Packed(codes=codes, scales=scales, factor=factor, format=format)


def make(case: Case, seed: int) -> Arrays:
    """(q, k, v, length[, pages]), or (K cache, V cache, k, v, slot[, pages])."""
    key = jax.random.key(seed)
    k_q, k_k, k_v, k_pages, k_new = jax.random.split(key, 5)
    caches, dtype = (cache(case, k_k), cache(case, k_v)), jnp.dtype(case.dtype)
    length = jnp.asarray(case.length, jnp.int32)
    pages = () if case.page is None else (_pages(case, k_pages),)
    if not case.write:
        q = jax.random.normal(k_q, (case.B, case.H, case.K), jnp.float32).astype(dtype)
        return (q, *caches, length, *pages)
    shape = (case.B, case.J, case.K)
    new = [jax.random.normal(k, shape, jnp.float32).astype(dtype) for k in (k_q, k_new)]
    return (*caches, *new, length, *pages)


def _pages(case: Case, key: jax.Array) -> jax.Array:
    assert case.page is not None
    each = case.C // case.page
    return jax.random.permutation(key, case.B * each).astype(jnp.int32).reshape(case.B, each)


def run(case: Case, impl: str) -> Any:
    """The op as a function of the arguments."""

    def attend(q: Any, k: Any, v: Any, length: Any, pages: Any = None) -> Any:
        return op.attention_decode(q, k, v, length, impl=impl, page_table_BN=pages)

    def write(cache_k: Any, cache_v: Any, k: Any, v: Any, slot: Any, pages: Any = None) -> Any:
        return op.write(
            cache_k, cache_v, k, v, slot, impl=impl, record=case.record, page_table_BN=pages
        )

    return write if case.write else attend


def _reference(case: Case) -> Any:
    if not case.write:
        return ref.attention_decode

    def write(cache_k: Any, cache_v: Any, k: Any, v: Any, slot: Any, pages: Any = None) -> Any:
        return ref_write.write(cache_k, cache_v, k, v, slot, pages, record=case.record)

    return write


def baseline(q_BHK: jax.Array, k_BCJK: jax.Array, v_BCJK: jax.Array, length_B: jax.Array) -> Any:
    """The same attention over a BF16 cache."""
    B, H, K = q_BHK.shape
    C, J = k_BCJK.shape[1:3]
    q = q_BHK.reshape(B, J, H // J, K)
    score = jnp.einsum("bjgk,bcjk->bjgc", q, k_BCJK, preferred_element_type=jnp.float32)
    seen = (jnp.arange(C)[None, :] < length_B[:, None])[:, None, None, :]
    score = jnp.where(seen, score * jnp.float32(K**-0.5), jnp.float32(-1e30))
    weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
    out = jnp.einsum("bjgc,bcjk->bjgk", weight, v_BCJK, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(B, H, K)


def _baseline_make(case: Case, seed: int) -> Arrays:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((case.B, case.H, case.K), *[(case.B, case.C, case.J, case.K)] * 2)
    drawn = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    return (*drawn, jnp.asarray(case.length, jnp.int32))


def cost(case: Case) -> Cost:
    """Attention reads the slots below the lengths, a write touches one slot a sequence."""
    format, wide = formats.get(case.format), jnp.dtype(case.dtype).itemsize
    width = format.padded(case.K)
    vector = width * format.element.BITS // 8 + width // format.block * format.scale_bytes
    vector += 4 * format.has_global
    vectors, table = 2 * case.J * vector, 4 * case.B * (case.page is not None)
    if case.write:
        kept = {None: 0, "codes": vector, "mantissa": vector - width * 3 // 8}[case.record]
        written = case.B * (vectors + 2 * case.J * kept)
        read = 2 * case.B * case.J * case.K * wide + 4 * case.B + table
        return Cost(read, written, 16 * case.B * case.J * case.K, "f32")
    slots, q = sum(case.length), case.B * case.H * case.K * wide
    pages = 0 if case.page is None else sum(math.ceil(n / case.page) for n in case.length)
    read = slots * vectors + q + 4 * case.B + 4 * pages
    return Cost(read, q, 4 * slots * case.H * case.K)


def _tolerance(case: Case) -> float:
    if case.write:
        return 0.0
    # float32: order of sums. Else weights are rounded to the dtype before or after their division
    # by the sum, and the result once more: a few ulp
    return 2e-5 if case.dtype == "float32" else 8 * float(jnp.finfo(case.dtype).eps)


def _bench(case: Case) -> Bench:
    triton = not case.write or rounding.unsupported(formats.get(case.format)) is None
    plain = not case.write and case.page is None and not case.small
    return Bench(
        op=op.OP,
        case=case.name,
        impls=("xla", "triton") if triton else ("xla",),
        cost=cost(case),
        make=functools.partial(make, case),
        run=functools.partial(run, case),
        reference=_reference(case),
        tolerance=_tolerance(case),
        baseline=baseline if plain else None,
        baseline_make=functools.partial(_baseline_make, case) if plain else None,
        baseline_name="attention over a BF16 cache, XLA" if plain else "",
        small=case.small,
    )


BENCHES: tuple[Bench, ...] = tuple(_bench(case) for case in CASES)
assert len({bench.case for bench in BENCHES}) == len(BENCHES)
assert all(np.min(case.length) >= 0 and np.max(case.length) <= case.C for case in CASES)
