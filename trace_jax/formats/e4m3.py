"""E4M3 (no infinities, largest 448): codes, rounding by comparison and brackets.

Code = sign << 7 | exponent << 3 | mantissa; 127 magnitudes, 0x7F is NaN and never written for a
number. As in `e2m1`, x is compared with fl(midpoint * step), so no quotient decides: an
approximate one only says where to look, and is corrected by comparison. There is no cast to a
narrow float that a compiler could delete, and -0 is written as 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

BITS = 8
MAX = 448.0
_LAST = 126  # magnitude code of 448
_NORMAL = 8  # first code with a hidden bit: 2**-6
_BIAS = 120 << 3  # float32 exponent field 121 is 2**-6
_TINY = 2.0**-126  # a backend may flush what is smaller


def round_nearest(x: Float[Array, "*A"], step: Float[Array, "*#A"]) -> UInt8[Array, "*A"]:
    """Rounds x / step to the nearest E4M3 code, ties to even, saturating at 448.

    Math:    the code c with fl(mid_{c-1} step) < |x| < fl(mid_c step), even where equal.
    Args:    x: float32; below 2**-126 it counts as 0. step: float32, broadcastable to x; where it
             is 0 or NaN the code is 0.
    Returns: uint8 codes, never 0x7F, 0x80 or 0xFF. NaN in x gives 0: detect it before.
    """
    magnitude, active, step = _parts(x, step)
    code = _near(magnitude, step)
    odd = (code & 1) == 1
    upper = _middle(code) * step
    up = (code < _LAST) & ((magnitude > upper) | ((magnitude == upper) & odd))
    code = code + up.astype(jnp.int32)
    code = jnp.where(active, code, 0).astype(jnp.uint8)
    return code | (((x < 0) & (code > 0)).astype(jnp.uint8) << 7)


def bracket(
    x: Float[Array, "*A"], step: Float[Array, "*#A"]
) -> tuple[Int[Array, "*A"], Int[Array, "*A"]]:
    """The two codewords around clip(x / step, -448, 448), as indices -126..126.

    Math:    lo = max{i : fl(v_i step) <= x}, hi = min{i : fl(v_i step) >= x}.
    Args:    as `round_nearest`.
    Returns: (lo, hi), int8; equal if x is a codeword.
    """
    magnitude, active, step = _parts(x, step)
    code = _near(magnitude, step)
    above = _value(code) * step > magnitude
    next_too = (code < _LAST) & (_value(jnp.minimum(code + 1, _LAST)) * step <= magnitude)
    floor = code - above.astype(jnp.int32) + next_too.astype(jnp.int32)
    short = (floor < _LAST) & (_value(floor) * step < magnitude)
    ceil = floor + short.astype(jnp.int32)
    floor, ceil = jnp.where(active, floor, 0), jnp.where(active, ceil, 0)
    low, high = jnp.where(x < 0, -ceil, floor), jnp.where(x < 0, -floor, ceil)
    return low.astype(jnp.int8), high.astype(jnp.int8)


def index(codes: UInt8[Array, "*A"]) -> Int[Array, "*A"]:
    """Codes in the order of their values: -126..126 (int8)."""
    magnitude = (codes & 127).astype(jnp.int8)
    return jnp.where(codes >= 128, -magnitude, magnitude)


def from_index(i: Int[Array, "*A"]) -> UInt8[Array, "*A"]:
    """Inverse of `index`; index 0 is code 0."""
    return jnp.abs(i).astype(jnp.uint8) | ((i < 0).astype(jnp.uint8) << 7)


def decode(codes: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """The float32 values of codes; 0x7F and 0xFF are NaN."""
    magnitude = (codes & 127).astype(jnp.int32)
    value = jnp.where(magnitude == 127, jnp.float32(jnp.nan), _value(magnitude))
    return jnp.where(codes >= 128, -value, value)


def _parts(x: Array, step: Array) -> tuple[Array, Array, Array]:
    """(|x|, where the code is not 0 for want of x or step, a step that is safe to divide by)."""
    magnitude = jnp.abs(x)
    active = (step > 0) & (magnitude >= jnp.float32(_TINY))
    return magnitude, active, jnp.where(step > 0, step, jnp.float32(1))


def _near(magnitude: Float[Array, "*A"], step: Float[Array, "*#A"]) -> Int[Array, "*A"]:
    """The code below |x| / step, or next to it where the quotient is within 2^-20 of that one.

    So an approximate quotient suffices, and the nearest code is this one or the one above it.
    """
    # powers of two keep the reciprocal and the product away from the ends of float32
    shift = jnp.where(step >= 1, jnp.float32(2.0**-64), jnp.float32(2.0**64))
    quotient = (magnitude * shift) * (1 / (step * shift))
    quotient = jnp.minimum(quotient, jnp.float32(MAX))
    normal = (jax.lax.bitcast_convert_type(quotient, jnp.int32) >> 20) - _BIAS
    small = (quotient * jnp.float32(512)).astype(jnp.int32)
    return jnp.clip(jnp.where(quotient >= jnp.float32(2.0**-6), normal, small), 0, _LAST)


def _bits(code: Int[Array, "*A"], half: int) -> Float[Array, "*A"]:
    """Value of a magnitude code, plus half a unit of its last place if `half` is 1."""
    normal = ((code + _BIAS) << 20) | (half << 19)
    normal = jax.lax.bitcast_convert_type(normal.astype(jnp.int32), jnp.float32)
    small = (2 * code + half).astype(jnp.float32) * jnp.float32(2.0**-10)
    return jnp.where(code >= _NORMAL, normal, small)


def _value(code: Int[Array, "*A"]) -> Float[Array, "*A"]:
    return _bits(code, 0)


def _middle(code: Int[Array, "*A"]) -> Float[Array, "*A"]:
    """The midpoint between a code and the next."""
    return _bits(code, 1)
