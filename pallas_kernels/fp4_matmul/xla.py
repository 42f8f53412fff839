"""`fp4_matmul` in plain XLA: decode, one dot, factors."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_matmul import decode, operands


def matmul(
    x: Packed | Float[Array, "M K"], w: Packed, *, out_dtype: jax.typing.DTypeLike
) -> Float[Array, "M O"]:
    """See `op.fp4_matmul`."""
    width = operands.width(x, w)
    narrow = operands.holds(x, w)

    def total(x, w, dtype):
        x_MK = decode.value(x, dtype)[:, :width]
        w_OK = decode.value(w, dtype)[:, :width]
        precision = "highest" if dtype == jnp.float32 else None  # not TF32, not one BF16 pass
        return jnp.einsum(
            "MK,OK->MO", x_MK, w_OK, precision=precision, preferred_element_type=jnp.float32
        )

    # both dtypes hold the operands; CPUs are faster in float32
    total_MO = jax.lax.platform_dependent(
        x, w, cpu=lambda x, w: total(x, w, jnp.float32), default=lambda x, w: total(x, w, narrow)
    )
    x_factor = x.factor if isinstance(x, Packed) else None
    w_factor = None if w.factor is None else w.factor.T
    return operands.scaled(total_MO, x_factor, w_factor).astype(out_dtype)
