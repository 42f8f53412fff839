"""Costs, inputs and baselines of the named cases."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.bench import Arrays, Bench
from pallas_kernels.common.cost import Cost
from pallas_kernels.fp4_matmul import inputs, op, ref
from pallas_kernels.fp4_matmul.cases import CASES, Case

# float32: the order of sums. BF16: one rounding either way, of values up to 5 rms
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.04}


def make(case: Case, seed: int) -> Arrays:
    """(x, w)."""
    k_x, k_w = jax.random.split(jax.random.key(seed))
    shared = 1 if case.w_factor == "matrix" else 0
    w = inputs.packed(k_w, (case.outputs,), case.K, case.w, shared)
    return inputs.rows(k_x, case.M, case.K, case.x), w


def cost(case: Case) -> Cost:
    """Packed operands read, the result written."""
    read = inputs.nbytes(case.outputs, case.K, case.w) + inputs.nbytes(case.M, case.K, case.x)
    written = case.M * case.outputs * jnp.dtype(case.out).itemsize
    return Cost(read, written, 2 * case.M * case.outputs * case.K, inputs.units(case.w, case.x))


def _run(case: Case, impl: str) -> Any:
    return functools.partial(op.fp4_matmul, impl=impl, out_dtype=jnp.dtype(case.out))


def baseline(x_MK: jax.Array, w_KO: jax.Array) -> jax.Array:
    """The same in BF16."""
    return jnp.matmul(x_MK, w_KO, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _baseline_make(case: Case, seed: int) -> Arrays:
    k_x, k_w = jax.random.split(jax.random.key(seed))
    shapes = ((k_x, (case.M, case.K)), (k_w, (case.K, case.outputs)))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in shapes)


def _bench(case: Case) -> Bench:
    return Bench(
        op="fp4_matmul",
        case=case.name,
        impls=inputs.impls(case.w, case.x),
        cost=cost(case),
        make=functools.partial(make, case),
        run=functools.partial(_run, case),
        reference=functools.partial(ref.fp4_matmul, out_dtype=jnp.dtype(case.out)),
        tolerance=TOLERANCE[case.out],
        baseline=None if case.small else baseline,
        baseline_make=None if case.small else functools.partial(_baseline_make, case),
        baseline_name="" if case.small else "BF16 dot, XLA",
        small=case.small,
    )


BENCHES: tuple[Bench, ...] = tuple(_bench(case) for case in CASES)
assert len({bench.case for bench in BENCHES}) == len(BENCHES)
