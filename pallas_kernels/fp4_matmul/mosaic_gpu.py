"""`fp4_matmul` on Blackwell's block-scaled tensor cores: one group that has all rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.common import blackwell, blackwell_mma
from pallas_kernels.common.packed import Packed


def matmul(
    x: Packed,
    w: Packed,
    *,
    out_dtype: jax.typing.DTypeLike,
    w_scales: UInt8[Array, "Y G 32 16"] | None = None,
) -> Float[Array, "M O"]:
    """See `op.fp4_matmul`; NVFP4 x NVFP4 or MXFP4 x MXFP4.

    Args: w_scales: `blackwell.swizzle_scales(w.scales)`, made once when the weights change; None:
          made here, on each call.
    """
    rows, outputs = x.shape[0], w.shape[0]
    if rows == 0:
        return jnp.zeros((0, outputs), out_dtype)
    tiling = blackwell.tiling(rows, 1, outputs)
    one = Packed(
        codes=w.codes[None],
        scales=w.scales[None],
        factor=None if w.factor is None else w.factor[None],
        format=w.format,
    )
    schedule = blackwell.dense_schedule(rows, tiling.tokens)
    scales = None if w_scales is None else w_scales[None]
    operands = blackwell.operands(x, one, scales, *schedule, tiling)
    return blackwell_mma.run(operands, tiling, outputs=outputs, out_dtype=out_dtype)
