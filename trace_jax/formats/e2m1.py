"""E2M1, the 4-bit float: codes, rounding by comparison, brackets and packing.

Code = sign << 3 | exponent << 1 | mantissa; the eight magnitudes are 0, .5, 1, 1.5, 2, 3, 4, 6.
Every function takes the *step* of a block (block scale times global scale, float32), so that no
value is ever divided: x is compared with midpoint * step, one float32 multiplication, the same on
every backend. Minus zero is written as code 0: it decodes to 0 either way and tells nothing.
"""

import itertools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BITS = 4
MAX = 6.0
_TINY = 2.0**-126  # a backend may flush what is smaller, so it counts as 0 on all of them
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)  # a tie goes to the even mantissa: the upper neighbour of these


def round_nearest(x: Float[Array, "*A"], step: Float[Array, "*#A"]) -> UInt8[Array, "*A"]:
    """Rounds x / step to the nearest E2M1 code, ties to even, saturating at 6.

    Math:    |code| = #{i : |x| > mid_i * step} with >= at the odd midpoints (0.75, 1.75, 3.5).
    Args:    x: float32; below 2**-126 it counts as 0. step: float32, broadcastable to x; where it
             is 0 or NaN the code is 0.
    Returns: uint8 codes 0..15, never 8 (minus zero is 0). NaN in x gives 0: detect it before.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for midpoint in _MIDPOINTS:
        bound = jnp.float32(midpoint) * step
        above = (magnitude >= bound) if midpoint in _TIES_UP else (magnitude > bound)
        code = code + above.astype(jnp.uint8)
    active = (step > 0) & (magnitude >= jnp.float32(_TINY))
    code = jnp.where(active, code, jnp.uint8(0))
    return with_sign(code, x < 0)


def with_sign(magnitude: UInt8[Array, "*A"], negative: Bool[Array, "*A"]) -> UInt8[Array, "*A"]:
    """Sets the sign bit of magnitude codes 0..7, never on zero."""
    sign = (negative & (magnitude > 0)).astype(jnp.uint8)
    return magnitude | (sign << 3)


def decode(codes: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """The float32 values of codes 0..15, by integer arithmetic (no table, no subnormal trick)."""
    magnitude = (codes & 7).astype(jnp.int32)
    exponent, mantissa = magnitude >> 1, magnitude & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    value = halves.astype(jnp.float32) * 0.5
    return jnp.where(codes >= 8, -value, value)


def index(codes: UInt8[Array, "*A"]) -> Int[Array, "*A"]:
    """Codes in the order of their values: -7..7 (int8); neighbours in value differ by one."""
    magnitude = (codes & 7).astype(jnp.int8)
    return jnp.where(codes >= 8, -magnitude, magnitude)


def from_index(i: Int[Array, "*A"]) -> UInt8[Array, "*A"]:
    """Inverse of `index`; index 0 is code 0."""
    return with_sign(jnp.abs(i).astype(jnp.uint8), i < 0)


def bracket(
    x: Float[Array, "*A"], step: Float[Array, "*#A"]
) -> tuple[Int[Array, "*A"], Int[Array, "*A"]]:
    """The two codewords around clip(x / step, -6, 6), as indices -7..7 (TRACE, BRACKET).

    Math:    lo = max{i : v_i * step <= x}, hi = min{i : v_i * step >= x}; equal if x is a codeword.
    Args:    x: float32; below 2**-126 it counts as 0.
             step: float32 >= 0; where it is 0 or NaN, both are 0.
    Returns: (lo, hi), int8.
    """
    magnitude = jnp.abs(x)
    floor = jnp.zeros(x.shape, jnp.int8)  # largest codeword <= |x|
    ceil = jnp.zeros(x.shape, jnp.int8)  # smallest codeword >= |x|
    for below, value in itertools.pairwise(MAGNITUDES):
        floor = floor + (magnitude >= jnp.float32(value) * step).astype(jnp.int8)
        ceil = ceil + (magnitude > jnp.float32(below) * step).astype(jnp.int8)
    active = (step > 0) & (magnitude >= jnp.float32(_TINY))
    floor, ceil = jnp.where(active, floor, jnp.int8(0)), jnp.where(active, ceil, jnp.int8(0))
    negative = x < 0
    return jnp.where(negative, -ceil, floor), jnp.where(negative, -floor, ceil)


def pack(codes: UInt8[Array, "*A K"]) -> UInt8[Array, "*A half"]:
    """Two codes a byte along the last axis, low nibble = even index. [.5, 6.] packs to 0x71."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: UInt8[Array, "*A half"]) -> UInt8[Array, "*A K"]:
    """Inverse of `pack`."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def pack_bits(bits: UInt8[Array, "*A K"]) -> UInt8[Array, "*A eighth"]:
    """Eight bits (0 or 1) a byte along the last axis, lowest bit first."""
    grouped = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 8, 8)
    weights = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8))
    weights = weights.reshape((1,) * (grouped.ndim - 1) + (8,))
    return jnp.sum(grouped * weights, axis=-1, dtype=jnp.uint8)


def unpack_bits(packed: UInt8[Array, "*A eighth"]) -> UInt8[Array, "*A K"]:
    """Inverse of `pack_bits`.

    Written without an axis of length 8, which made a whole training step 1.4 times slower on CPU
    (`launch/bench.py --suites=step`).
    """
    width = packed.shape[-1] * 8
    shifts = (jnp.arange(width, dtype=jnp.int32) & 7).astype(jnp.uint8)
    shifts = shifts.reshape((1,) * (packed.ndim - 1) + (width,))
    return jnp.right_shift(jnp.repeat(packed, 8, axis=-1), shifts) & 1
