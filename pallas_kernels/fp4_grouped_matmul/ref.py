"""The specification of `fp4_grouped_matmul` and `grouped_matmul`: every expert, then choose."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.packed import Packed


def fp4_grouped_matmul(
    x: Packed | Float[Array, "M K"],
    w: Packed,
    group_sizes_E: Int[Array, " E"],
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> Float[Array, "M O"]:
    """y[m] = (factor_x[m] * factor_w[e]) * x[m] w[e]^T for the group e that row m falls in.

    x and w are code * scale. Products accumulate in float32 and are rounded once; rows past the
    last group are 0.
    """
    x_MK = x.operand() if isinstance(x, Packed) else x.astype(jnp.float32)
    w_EOK = w.operand()
    width = min(x_MK.shape[1], w_EOK.shape[2])  # formats pad K to blocks of their own
    y_MO = _each(x_MK[:, :width], w_EOK[..., :width], group_sizes_E)
    factor = jnp.ones((1, 1), jnp.float32)
    if isinstance(x, Packed) and x.factor is not None:
        factor = factor * x.factor
    if w.factor is not None:
        factor_EO = jnp.broadcast_to(w.factor[..., 0], (*w_EOK.shape[:1], w.factor.shape[1]))
        factor = factor * factor_EO[jnp.minimum(_group(x.shape[0], group_sizes_E), len(w_EOK) - 1)]
    return jnp.where(_inside(x.shape[0], group_sizes_E), factor * y_MO, 0).astype(out_dtype)


def grouped_matmul(
    x_MK: Float[Array, "M K"], w_EOK: Float[Array, "E O K"], group_sizes_E: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """y[m] = x[m] w[e]^T, accumulated in float32, rounded once; rows past the last group are 0."""
    wide = x_MK.astype(jnp.float32), w_EOK.astype(jnp.float32)
    return _each(*wide, group_sizes_E).astype(x_MK.dtype)


def _group(rows: int, sizes_E: Int[Array, " E"]) -> Int[Array, " M"]:
    return jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(rows), side="right")


def _inside(rows: int, sizes_E: Int[Array, " E"]) -> Array:
    return (jnp.arange(rows) < jnp.sum(sizes_E))[:, None]


def _each(x_MK: Array, w_EOK: Array, sizes_E: Int[Array, " E"]) -> Array:
    group_M1 = _group(len(x_MK), sizes_E)[:, None]
    y_MO = jnp.zeros((len(x_MK), w_EOK.shape[1]), jnp.float32)
    for e, w_OK in enumerate(w_EOK):
        own_MO = jnp.einsum("MK,OK->MO", x_MK, w_OK, precision="highest")
        y_MO = jnp.where(group_M1 == e, own_MO, y_MO)
    return y_MO
