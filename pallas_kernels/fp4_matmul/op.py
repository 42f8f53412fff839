"""`fp4_matmul`: rows times a matrix in block-scaled FP4."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import gradients, impls
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_matmul import operands, xla


def fp4_matmul(
    x: Packed | Float[Array, "M K"],
    w: Packed,
    *,
    impl: str,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> Float[Array, "M O"]:
    """Multiplies rows with a packed matrix, as block-scaled tensor cores do.

    Math:    y = (factor_x * factor_w) * sum_k (code * scale)_x (code * scale)_w, accumulated in
             float32, rounded once.
    Args:    x: packed rows (W4A4, W4A8), factor (M, 1), (1, 1) or None; or BF16 or float32 (W4A16).
             w: packed (O, K), factor (O, 1), (1, 1) or None.
             impl: "xla" | "triton" | "triton_interpret" | "mosaic_gpu" (NVFP4 x NVFP4 or MXFP4 x
             MXFP4 only).
    Returns: (M, O) in `out_dtype`. K of one side may be padded with zeros to its blocks.
    Raises:  ValueError, TypeError for operands that do not fit; NotImplementedError for an `impl`
             that cannot run them, and under differentiation.
    """
    where = "fp4_matmul"
    operands.check(where, x, w, 2, out_dtype)
    impl = impls.choose(where, impl, operands.has(x, w))
    operands.check_values(where, x=x, w=w)
    if impl == "xla":
        run = xla.matmul
    elif impl == "mosaic_gpu":
        from pallas_kernels.fp4_matmul import mosaic_gpu

        run = mosaic_gpu.matmul
    else:
        from pallas_kernels.fp4_matmul import triton

        run = functools.partial(triton.matmul, interpret=impls.interpreted(impl))
    return gradients.refused(where, functools.partial(run, out_dtype=out_dtype), x, w)
