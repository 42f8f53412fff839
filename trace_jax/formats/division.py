"""Float32 division that is the same on every backend: long division of the integer significands.

Backends divide differently (XLA:CPU multiplies by a reciprocal, XLA:GPU may emit an approximate
quotient), which is enough to move an E4M3 scale or an E2M1 code across a tie. Where a reference
divides, this is the quotient IEEE 754 asks for, subnormals included.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

_HIDDEN = 1 << 23
_INF = 0x7F800000
_NAN = 0x7FC00000


def divide(a: Float[Array, "*#A"], b: Float[Array, "*#A"]) -> Float[Array, "*A"]:
    """a / b in float32, rounded to nearest, ties to even.

    Math:    significands as integers of 24 bits; three digits of base 256 of the quotient, the
             remainder as sticky bit, one rounding.
    Args:    a, b: float32, broadcastable; subnormals count as they are, whatever the backend does.
    Returns: float32; x/0 is Inf, 0/0, Inf/Inf and NaN are NaN. A subnormal quotient is written
             exactly; the next float operation on it may flush it.
    """
    a, b = jnp.broadcast_arrays(a, b)
    bits_a = jax.lax.bitcast_convert_type(a, jnp.uint32)
    bits_b = jax.lax.bitcast_convert_type(b, jnp.uint32)
    sign = (bits_a ^ bits_b) & jnp.uint32(1 << 31)
    bits_a, bits_b = bits_a & jnp.uint32(0x7FFFFFFF), bits_b & jnp.uint32(0x7FFFFFFF)
    result = _quotient(bits_a, bits_b)
    inf, nan = jnp.uint32(_INF), jnp.uint32(_NAN)
    result = jnp.where((bits_a == 0) | (bits_b == inf), jnp.uint32(0), result)
    result = jnp.where((bits_a == inf) | (bits_b == 0), inf, result)
    undefined = ((bits_a == 0) & (bits_b == 0)) | ((bits_a == inf) & (bits_b == inf))
    result = jnp.where(undefined | (bits_a > inf) | (bits_b > inf), nan, result)
    return jax.lax.bitcast_convert_type(result | sign, jnp.float32)


def _quotient(bits_a: UInt32[Array, "*A"], bits_b: UInt32[Array, "*A"]) -> UInt32[Array, "*A"]:
    """Bits of the quotient of two positive finite numbers, given as bits."""
    exponent_a, a = _normalised(bits_a)
    exponent_b, b = _normalised(bits_b)
    b = jnp.maximum(b, jnp.uint32(1))  # b == 0 is dealt with by the caller
    below = a < b
    a = jnp.where(below, a << 1, a)  # now 1 <= a / b < 2
    exponent = exponent_a - exponent_b + jnp.where(below, 126, 127)
    digits, rest = jnp.uint32(1), a - b  # the first digit is 1
    for _ in range(3):
        rest = rest << 8
        digit = jax.lax.div(rest, b)
        rest = rest - digit * b
        digits = (digits << 8) | digit
    # 25 bits and a sticky one; a subnormal result loses more of them
    drop = jnp.clip(2 - exponent, 1, 26).astype(jnp.uint32)
    kept = digits >> drop
    lost = digits - (kept << drop)
    half = jnp.left_shift(jnp.uint32(1), drop - 1)
    sticky = rest > 0
    up = (lost > half) | ((lost == half) & (sticky | ((kept & 1) == 1)))
    kept = kept + up.astype(jnp.uint32)
    # the hidden bit of a normal result adds one to the exponent field, a carry one more
    field = jnp.clip(exponent - 1, 0, 254).astype(jnp.uint32) << 23
    return jnp.where(exponent >= 255, jnp.uint32(_INF), jnp.minimum(field + kept, jnp.uint32(_INF)))


def _normalised(bits: UInt32[Array, "*A"]) -> tuple[Array, UInt32[Array, "*A"]]:
    """(biased exponent, significand with its top bit at 23), also of subnormals."""
    field = (bits >> 23).astype(jnp.int32)
    fraction = bits & jnp.uint32(_HIDDEN - 1)
    shift = jax.lax.clz(fraction).astype(jnp.int32) - 8
    small = jnp.left_shift(fraction, jnp.clip(shift, 0, 23).astype(jnp.uint32))
    exponent = jnp.where(field == 0, 1 - shift, field)
    return exponent, jnp.where(field == 0, small, fraction | jnp.uint32(_HIDDEN))
