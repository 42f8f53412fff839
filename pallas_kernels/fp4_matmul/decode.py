"""Decoding of packed rows in XLA."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.common.packed import Packed


def of_group(w: Packed, e: Array, dtype: jax.typing.DTypeLike) -> Float[Array, "O K"]:
    codes = jax.lax.dynamic_index_in_dim(w.codes, e, keepdims=False)
    scales = jax.lax.dynamic_index_in_dim(w.scales, e, keepdims=False)
    return Packed(codes=codes, scales=scales, factor=None, format=w.format).operand().astype(dtype)
