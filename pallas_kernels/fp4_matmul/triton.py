"""`fp4_matmul` as a Pallas-Triton kernel: the grouped one with a single group."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import triton


def matmul(
    x: Packed | Float[Array, "M K"],
    w: Packed,
    *,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool,
) -> Float[Array, "M O"]:
    """See `op.fp4_matmul`. The schedule of the one group is a constant of the program."""
    one = jax.tree.map(lambda a: a[None], w)
    rows = x.shape[0]
    sizes_E = jnp.full(1, rows, jnp.int32)
    how = {"block": max(rows, 1), "out_dtype": out_dtype, "interpret": interpret}
    return triton.fp4_grouped(x, one, sizes_E, **how)
