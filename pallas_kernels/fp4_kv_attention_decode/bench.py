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


def cache(case: Case, rng: np.random.Generator) -> Packed:
    """Random codes, with scales and factors that make values of about 1."""
    format = formats.get(case.format)
    lead = (case.B, case.C, case.J)
    if case.page is not None:
        lead = (case.B * case.C // case.page, case.page, case.J)
    width, bits = format.padded(case.K), format.element.BITS
    codes = rng.integers(0, 256, (*lead, width * bits // 8), np.uint8)
    codes = codes & np.uint8(0xB7) if bits == 8 else codes  # at most 1.9, never NaN
    # up to the byte of 1, and down to that of 1/2
    low, high = (0x30, 0x39) if format.name == "nvfp4" else (126, 128)
    scales = rng.integers(low, high, (*lead, width // format.block), np.uint8)
    factor = None
    if format.has_global:
        factor = jnp.asarray(rng.uniform(0.4, 0.6, (*lead, 1)), jnp.float32)
    codes, scales = jnp.asarray(codes), jnp.asarray(scales)
    return Packed(codes=codes, scales=scales, factor=factor, format=format)


def make(case: Case, seed: int) -> Arrays:
    """(q, k, v, length[, pages]), or (K cache, V cache, k, v, slot[, pages])."""
    rng = np.random.default_rng(seed)
    caches, length = (cache(case, rng), cache(case, rng)), jnp.asarray(case.length, jnp.int32)
    pages = ()
    if case.page is not None:
        shuffled = rng.permutation(case.B * case.C // case.page).reshape(case.B, -1)
        pages = (jnp.asarray(shuffled, jnp.int32),)

    def normal(heads: int) -> jax.Array:
        drawn = rng.standard_normal((case.B, heads, case.K), np.float32)
        return jnp.asarray(drawn, jnp.dtype(case.dtype))

    if case.write:
        return (*caches, normal(case.J), normal(case.J), length, *pages)
    return (normal(case.H), *caches, length, *pages)


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
