"""Grouped matmuls: rows sorted by group (expert), one matrix a group, sizes known on device only.

`fp4_grouped_matmul` is the sampler's product, `grouped_matmul` the trainer's, with its gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.common import debug, gradients, impls
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import xla
from pallas_kernels.fp4_matmul import operands
from trace_jax.checks import require


def fp4_grouped_matmul(
    x: Packed | Float[Array, "M K"],
    w: Packed,
    group_sizes_E: Int32[Array, " E"],
    *,
    impl: str,
    block: int = 1,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> Float[Array, "M O"]:
    """Multiplies each row with the packed matrix of its group.

    Math:    y[m] = (factor_x[m] * factor_w[e]) * sum_k (code * scale)_x (code * scale)_w, e the
             group in whose range m falls; accumulated in float32, rounded once.
    Args:    x: packed rows (W4A4, W4A8), factor (M, 1), (1, 1) or None; or BF16 or float32 (W4A16).
             w: packed (E, O, K), factor (E, 1, 1), (E, O, 1) or None.
             group_sizes_E: rows of each group, in order; may be 0; sum <= M.
             impl: "xla" | "triton" | "triton_interpret" | "mosaic_gpu" (NVFP4 x NVFP4 or MXFP4 x
             MXFP4 only).
             block: a promise that each size is a multiple of it, as in the library's blocked rows.
    Returns: (M, O) in `out_dtype`; rows past the last group are exactly 0. No cost grows with E
             but a few operations on the sizes.
    Raises:  ValueError, TypeError for operands that do not fit; NotImplementedError for an `impl`
             that cannot run them, and under differentiation.
    """
    where = "fp4_grouped_matmul"
    operands.check(where, x, w, 3, out_dtype)
    _check_groups(where, x.shape[0], w.shape[0], group_sizes_E, block)
    impl = impls.choose(where, impl, operands.has(x, w))
    operands.check_values(where, x=x, w=w)
    if impl == "xla":
        run = xla.fp4_grouped
    elif impl == "mosaic_gpu":
        from pallas_kernels.fp4_grouped_matmul import mosaic_gpu

        run = mosaic_gpu.grouped
    else:
        from pallas_kernels.fp4_grouped_matmul import triton

        run = functools.partial(triton.fp4_grouped, interpret=impls.interpreted(impl))
    run = functools.partial(run, block=block, out_dtype=out_dtype)
    return gradients.refused(where, run, x, w, group_sizes_E)


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E O K"],
    group_sizes_E: Int32[Array, " E"],
    *,
    impl: str,
    block: int = 1,
) -> Float[Array, "M O"]:
    """Multiplies each row with the matrix of its group, with a gradient for both.

    Math:    y[m] = x[m] w[e]^T;  dx[m] = dy[m] w[e];  dw[e] = sum_{m in e} dy[m]^T x[m]. Each is
             accumulated in float32 and rounded once.
    Args:    x, w: one dtype, BF16 or float32, also that of the result. impl: "xla" | "triton" |
             "triton_interpret". group_sizes_E, block: see `fp4_grouped_matmul`.
    Returns: (M, O); rows past the last group are exactly 0, and so is dw of an empty group.
    Raises:  ValueError, TypeError, NotImplementedError as `fp4_grouped_matmul`.
    """
    where = "grouped_matmul"
    for name, array in (("x", x), ("w", w)):
        fits = array.dtype in (jnp.bfloat16, jnp.float32)
        need = "bfloat16 or float32"
        require(fits, f"{where}: {name}: dtype", array.dtype, need, error=TypeError)
    same = x.dtype == w.dtype
    require(same, f"{where}: dtypes", f"{x.dtype} and {w.dtype}", "one", error=TypeError)
    for name, array, rank in (("x", x, 2), ("w", w, 3)):
        need = "(M, K)" if rank == 2 else "(E, O, K)"
        require(array.ndim == rank, f"{where}: {name}: shape", array.shape, need)
    require(x.shape[1] == w.shape[2], f"{where}: K", f"{x.shape[1]} and {w.shape[2]}", "one K")
    _check_groups(where, x.shape[0], w.shape[0], group_sizes_E, block)
    impl = impls.choose(where, impl, {"xla": None, "triton": None})
    return _grouped(x, w, group_sizes_E, impl, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x, w, sizes, impl, block):
    return _products(impl)[0](x, w, sizes, block)


def _forward(x, w, sizes, impl, block):
    return _grouped(x, w, sizes, impl, block), (x, w, sizes)


def _backward(impl, block, saved, dy):
    dx, dw = _products(impl)[1](dy, *saved, block)
    return dx, dw, None


_grouped.defvjp(_forward, _backward)


def _products(impl: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(x, w, sizes, block) -> y, and (dy, x, w, sizes, block) -> (dx, dw)."""
    if impl == "xla":
        return xla.grouped, xla.grouped_backward
    from pallas_kernels.fp4_grouped_matmul import triton_training as triton

    interpret = impls.interpreted(impl)
    forward = functools.partial(triton.grouped, interpret=interpret)
    return forward, functools.partial(triton.grouped_backward, interpret=interpret)


def _check_groups(where: str, rows: int, experts: int, sizes: Array, block: int) -> None:
    require(experts >= 1, f"{where}: w: groups", experts, "at least one")
    whole = sizes.dtype == jnp.int32  # narrower ones overflow where they are added up
    require(whole, f"{where}: group_sizes_E: dtype", sizes.dtype, "int32", error=TypeError)
    fits = sizes.shape == (experts,)
    require(fits, f"{where}: group_sizes_E: shape", sizes.shape, f"({experts},), as w has")
    fix = "pad the rows, or promise less"
    whole = block >= 1 and rows % block == 0
    require(whole, f"{where}: block", block, f"a divisor of the {rows} rows of x", fix)
    bad = jnp.sum((sizes < 0) | (sizes % block != 0), dtype=jnp.int32)
    total = jnp.sum(jnp.clip(sizes, 0, rows + 1))  # of what is too large enough, so no overflow
    debug.check(
        bad == 0,
        f"{where}: group_sizes_E: got {{bad}} that are negative or no multiple of block {block}, "
        "need none. Fix: count the rows of each group, padded to whole blocks.",
        bad=bad,
    )
    debug.check(
        total <= rows,
        f"{where}: group_sizes_E: got {{total}} rows in all or more, need at most the {rows} of x. "
        "Fix: sort the rows by group and count them.",
        total=total,
    )
