"""S1P2, HiF4's element: sign, one integer bit and two fraction bits: 0, .25, ..., 1.75.

Code = sign << 3 | 4 * magnitude, so the codes in the order of their values are consecutive and
their lowest bits alternate, as in E2M1. Ties go away from zero, as HiF4 defines. -0 is written 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trace_jax.formats import e2m1

BITS = 4
MAX = 1.75
_TINY = 2.0**-126  # a backend may flush what is smaller


def round_nearest(x: Float[Array, "*A"], step: Float[Array, "*#A"]) -> UInt8[Array, "*A"]:
    """Rounds x / step to the nearest code, ties away from zero, saturating at 1.75.

    Math:    |code| = #{k in 1..7 : |x| >= fl((k - 1/2)/4 step)}.
    Args:    x: float32. step: float32, broadcastable to x; where it is 0 or NaN the code is 0.
    Returns: uint8 codes 0..15, never 8. NaN in x gives 0: detect it before.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for k in range(1, 8):
        code = code + (magnitude >= jnp.float32((k - 0.5) / 4) * step).astype(jnp.uint8)
    active = (step > 0) & (magnitude >= jnp.float32(_TINY))
    return e2m1.with_sign(jnp.where(active, code, jnp.uint8(0)), x < 0)


def bracket(
    x: Float[Array, "*A"], step: Float[Array, "*#A"]
) -> tuple[Int[Array, "*A"], Int[Array, "*A"]]:
    """The two codewords around clip(x / step, -1.75, 1.75), as indices -7..7 (int8)."""
    magnitude = jnp.abs(x)
    floor, ceil = jnp.zeros(x.shape, jnp.int8), jnp.zeros(x.shape, jnp.int8)
    for k in range(1, 8):
        floor = floor + (magnitude >= jnp.float32(k / 4) * step).astype(jnp.int8)
        ceil = ceil + (magnitude > jnp.float32((k - 1) / 4) * step).astype(jnp.int8)
    active = (step > 0) & (magnitude >= jnp.float32(_TINY))
    floor, ceil = jnp.where(active, floor, jnp.int8(0)), jnp.where(active, ceil, jnp.int8(0))
    return jnp.where(x < 0, -ceil, floor), jnp.where(x < 0, -floor, ceil)


index = e2m1.index
from_index = e2m1.from_index


def decode(codes: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """The float32 values of codes 0..15."""
    value = (codes & 7).astype(jnp.float32) * jnp.float32(0.25)
    return jnp.where(codes >= 8, -value, value)
