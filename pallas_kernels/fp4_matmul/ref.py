"""The specification of `fp4_matmul`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.packed import Packed


def fp4_matmul(
    x: Packed | Float[Array, "M K"], w: Packed, *, out_dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> Float[Array, "M O"]:
    """y = (factor_x * factor_w) * sum_k (code * scale)_x (code * scale)_w.

    Products accumulate in float32, factors come once at the end, and then one rounding. A plain x
    has no factor.
    """
    x_MK = x.operand() if isinstance(x, Packed) else x.astype(jnp.float32)
    w_OK = w.operand()
    width = min(x_MK.shape[1], w_OK.shape[1])  # formats pad K to blocks of their own
    total_MO = jnp.einsum(
        "MK,OK->MO",
        x_MK[:, :width],
        w_OK[:, :width],
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    factor = jnp.ones((1, 1), jnp.float32)
    if isinstance(x, Packed) and x.factor is not None:
        factor = factor * x.factor
    if w.factor is not None:
        factor = factor * w.factor.T
    return (factor * total_MO).astype(out_dtype)
