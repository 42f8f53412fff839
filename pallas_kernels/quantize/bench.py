"""Costs, inputs and baseline of the named cases: a plain copy of x, which reads and writes more."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.bench import Arrays, Bench
from pallas_kernels.common.cost import Cost
from pallas_kernels.quantize import op, ref
from pallas_kernels.quantize.cases import CASES, Case
from trace_jax import formats

# Assumed operations a value, not counted: the PTX for Hopper has about 39 instructions a value for
# NVFP4, 31 for MXFP4 and 157 for Four Over Six, integer ones included, so the bound is optimistic.
_OPERATIONS = 20
_ADAPTIVE = 90


def rows(M: int, K: int, dtype: str, seed: int) -> jax.Array:
    """Normal values on a grid of 1/8, so that many are ties, in rows of different size."""
    k_x, k_rows = jax.random.split(jax.random.key(seed))
    x = jnp.round(jax.random.normal(k_x, (M, K), jnp.float32) * 8) / 8
    power = jax.random.randint(k_rows, (M, 1), -8, 8).astype(jnp.float32)
    return (x * jnp.exp2(power)).astype(dtype)


def make(case: Case, seed: int) -> Arrays:
    """(x,)."""
    return (rows(case.M, case.K, case.dtype, seed),)


def cost(case: Case) -> Cost:
    """x read once; codes, scales and global scales written."""
    format = formats.get(case.format)
    padded = format.padded(case.K)
    written = case.M * (padded // 2 + padded // format.block + 4 * format.has_global)
    adaptive = case.format == "4over6"
    operations = case.M * padded * (_ADAPTIVE if adaptive else _OPERATIONS)
    return Cost(case.M * case.K * jnp.dtype(case.dtype).itemsize, written, operations, "f32")


def _run(case: Case, impl: str) -> Any:
    return functools.partial(op.quantize, format=case.format, impl=impl)


def _reference(case: Case) -> Any:
    return functools.partial(ref.quantize, global_=None, format=formats.get(case.format))


def _bench(case: Case) -> Bench:
    return Bench(
        op="quantize",
        case=case.name,
        impls=("xla", "triton", "mosaic_tpu"),
        cost=cost(case),
        make=functools.partial(make, case),
        run=functools.partial(_run, case),
        reference=_reference(case),
        tolerance=0.0,
        baseline=None if case.small else jnp.copy,
        baseline_name="" if case.small else "copy",
        small=case.small,
    )


BENCHES: tuple[Bench, ...] = tuple(_bench(case) for case in CASES)
assert len({bench.case for bench in BENCHES}) == len(BENCHES)
