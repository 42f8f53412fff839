"""Costs, inputs and baselines of the named cases; peers of the plain XLA path on CPU."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.bench import Arrays, Bench
from pallas_kernels.common.cost import Cost
from pallas_kernels.fp4_grouped_matmul import op, ref
from pallas_kernels.fp4_grouped_matmul.cases import CASES, Case
from pallas_kernels.fp4_matmul import inputs
from pallas_kernels.fp4_matmul.bench import TOLERANCE


def make(case: Case, seed: int) -> Arrays:
    """(x, w, group sizes), in training also dy."""
    k_x, k_w, k_dy = jax.random.split(jax.random.key(seed), 3)
    sizes_E = jnp.asarray(case.sizes, jnp.int32)
    x = inputs.rows(k_x, case.M, case.K, case.x)
    if case.train:
        dtype = jnp.dtype(case.w)
        w_EOK = jax.random.normal(k_w, (case.E, case.outputs, case.K), dtype)
        return x, w_EOK, sizes_E, jax.random.normal(k_dy, (case.M, case.outputs), dtype)
    shared = 1 if case.w_factor == "matrix" else 0
    return x, inputs.packed(k_w, (case.E, case.outputs), case.K, case.w, shared), sizes_E


def cost(case: Case) -> Cost:
    """Weights of the groups with rows, rows that have a group, results; three products to train."""
    rows = sum(case.sizes)
    x, w = (
        inputs.nbytes(rows, case.K, case.x),
        inputs.nbytes(case.active * case.outputs, case.K, case.w),
    )
    y = case.M * case.outputs * jnp.dtype(case.out).itemsize
    operations = 2 * rows * case.outputs * case.K
    if not case.train:
        return Cost(x + w, y, operations, inputs.units(case.w, case.x))
    dx, dw = case.M * case.K, case.E * case.outputs * case.K
    written = y + (dx + dw) * jnp.dtype(case.out).itemsize
    kind = "bf16" if case.x == "bfloat16" else "f32"
    return Cost(2 * (x + w) + y, written, 3 * operations, kind)


def with_gradients(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """(x, w, sizes, dy) -> (y, dx, dw)."""

    def run(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
        y, backward = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
        return y, *backward(dy)

    return run


def _run(case: Case, impl: str) -> Any:
    if case.train:
        how = {"impl": impl, "block": case.block}
        return with_gradients(functools.partial(op.grouped_matmul, **how))
    how = {"impl": impl, "block": case.block, "out_dtype": jnp.dtype(case.out)}
    return functools.partial(op.fp4_grouped_matmul, **how)


def _reference(case: Case) -> Any:
    """The specification; at real sizes plain XLA, which small cases hold against it.

    The specification multiplies every row with every group.
    """
    if not case.small:
        return _run(case, "xla")
    if case.train:
        return with_gradients(ref.grouped_matmul)
    return functools.partial(ref.fp4_grouped_matmul, out_dtype=jnp.dtype(case.out))


def ragged(x_MK: jax.Array, w_EKO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """`lax.ragged_dot`, the same product with matrices (K, O)."""
    total = jax.lax.ragged_dot(x_MK, w_EKO, sizes_E, preferred_element_type=jnp.float32)
    return total.astype(x_MK.dtype)


def _baseline_make(case: Case, seed: int) -> Arrays:
    k_x, k_w, k_dy = jax.random.split(jax.random.key(seed), 3)
    x_MK = jax.random.normal(k_x, (case.M, case.K), jnp.bfloat16)
    w_EKO = jax.random.normal(k_w, (case.E, case.K, case.outputs), jnp.bfloat16)
    dy = jax.random.normal(k_dy, (case.M, case.outputs), jnp.bfloat16)
    arrays = x_MK, w_EKO, jnp.asarray(case.sizes, jnp.int32)
    return (*arrays, dy) if case.train else arrays


def _bench(case: Case) -> Bench:
    return Bench(
        op="fp4_grouped_matmul",
        case=case.name,
        impls=("xla", "triton") if case.train else inputs.impls(case.w, case.x),
        cost=cost(case),
        make=functools.partial(make, case),
        run=functools.partial(_run, case),
        reference=_reference(case),
        tolerance=TOLERANCE[case.out],
        baseline=None if case.small else with_gradients(ragged) if case.train else ragged,
        baseline_make=None if case.small else functools.partial(_baseline_make, case),
        baseline_name="" if case.small else "BF16 lax.ragged_dot",
        small=case.small,
    )


BENCHES: tuple[Bench, ...] = tuple(_bench(case) for case in CASES)
assert len({bench.case for bench in BENCHES}) == len(BENCHES)


def peers(experts: int, rows: int, active: int) -> dict[str, tuple[Callable[..., Any], Arrays]]:
    """The same grouped matmul, float32, by us ("ours") and by others; K = 256, O = 512.

    All get the same sorted rows, of `active` of the experts. Who wants matrices (K, O) gets them
    so.
    """
    random = np.random.default_rng(0)
    x_MK = jnp.asarray(random.standard_normal((rows, 256), np.float32))
    w_EOK = jnp.asarray(random.standard_normal((experts, 512, 256), np.float32))
    w_EKO = jnp.asarray(np.ascontiguousarray(np.swapaxes(w_EOK, 1, 2)))
    of_row = np.sort(random.integers(0, active, rows)) * (experts // active)
    sizes_E = jnp.asarray(np.bincount(of_row, minlength=experts), jnp.int32)
    ours = functools.partial(op.grouped_matmul, impl="xla")
    found: dict[str, tuple[Callable[..., Any], Arrays]] = {
        "ours": (ours, (x_MK, w_EOK, sizes_E)),
        "lax.ragged_dot": (ragged, (x_MK, w_EKO, sizes_E)),
        "dense einsum": (_dense, (x_MK, w_EKO, sizes_E)),
    }
    if importlib.util.find_spec("tokamax") is not None:  # from Python 3.12
        tokamax = importlib.import_module("tokamax")
        multiply = functools.partial(tokamax.ragged_dot, implementation="xla")
        found["tokamax.ragged_dot"] = (multiply, (x_MK, w_EKO, sizes_E))
    return found


def _dense(x_MK: jax.Array, w_EKO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Every row with every expert; a mask keeps each row's own."""
    of_row = jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(len(x_MK)), side="right")
    own_ME = jax.nn.one_hot(of_row, len(w_EKO), dtype=x_MK.dtype)
    return jnp.einsum("me,mk,eko->mo", own_ME, x_MK, w_EKO)
