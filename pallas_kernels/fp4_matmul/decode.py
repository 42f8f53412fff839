"""Decoding of packed rows in plain XLA, written for CPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import tiles
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_matmul import operands


def value(x: operands.Operand, dtype: jax.typing.DTypeLike) -> Float[Array, "*A K"]:
    """code * scale, or a plain operand, in a dtype that holds it; the bits of `Packed.operand`.

    FP4 nibbles are taken by a shift for each value: on CPU that is twice as fast as unpacking them
    as pairs, which breaks up the vector loop. The barrier has each scale decoded once, not once
    for each value.
    """
    if not isinstance(x, Packed):
        return x.astype(dtype)
    if x.format.name not in operands.WEIGHTS:
        return x.operand().astype(dtype)
    byte = jnp.repeat(x.codes.astype(jnp.int32), 2, axis=-1)
    nibble = (jnp.arange(x.width, dtype=jnp.int32) & 1) * 4
    code = (byte >> nibble.reshape((1,) * (byte.ndim - 1) + (x.width,))) & 15
    scale = tiles.scale_value(x.scales.astype(jnp.int32), x.format)
    scale = jax.lax.optimization_barrier(scale)
    return (tiles.e2m1_value(code) * jnp.repeat(scale, x.format.block, axis=-1)).astype(dtype)


def of_group(w: Packed, e: Array, dtype: jax.typing.DTypeLike) -> Float[Array, "O K"]:
    """`value` of one matrix."""
    codes, scales = (
        jax.lax.dynamic_index_in_dim(part, e, keepdims=False) for part in (w.codes, w.scales)
    )
    return value(Packed(codes=codes, scales=scales, factor=None, format=w.format), dtype)
