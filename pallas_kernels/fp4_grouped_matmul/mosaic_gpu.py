"""`fp4_grouped_matmul` on Blackwell's block-scaled tensor cores.

Tiles of tokens hold rows of one group each; how many there are, and which, is known on the device
only, so the kernel reads the schedule and its programs share the tiles that are in use.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.common import blackwell, blackwell_mma
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import schedule


def grouped(
    x: Packed,
    w: Packed,
    group_sizes_E: Int32[Array, " E"],
    *,
    block: int,
    out_dtype: jax.typing.DTypeLike,
    w_scales: UInt8[Array, "E Y G 32 16"] | None = None,
) -> Float[Array, "M O"]:
    """See `op.fp4_grouped_matmul`; NVFP4 x NVFP4 or MXFP4 x MXFP4.

    Args: w_scales: `blackwell.swizzle_scales(w.scales)`, made once when the weights change; None:
          made here, on each call.
    """
    rows, (experts, outputs, _) = x.shape[0], w.shape
    if rows == 0:
        return jnp.zeros((0, outputs), out_dtype)
    tiling = blackwell.tiling(rows, experts, outputs)
    # rows of no group are tiles of a group past the last one, whose weights are zeros
    tiles = schedule.cut(group_sizes_E, rows=rows, size=tiling.tokens, block=block, rest=True)
    cut = (tiles.group_T, tiles.start_T, tiles.stop_T, tiles.used)
    operands = blackwell.operands(x, w, w_scales, *cut, tiling)
    return blackwell_mma.run(operands, tiling, outputs=outputs, out_dtype=out_dtype)
