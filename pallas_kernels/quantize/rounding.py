"""Block rounding on tiles inside kernels: exact, without division, tables or subnormals.

`trace_jax.formats` is the specification, to which everything here is equal bit for bit. Values come
as the int32 bits of their magnitudes, which are ordered as the magnitudes are (NaN on top), so that
maxima and comparisons are integer instructions and NaN needs no care. All is elementwise on arrays
that broadcast; what a block is, the caller knows: it passes the reductions over one.

A block scale starts from an approximate reciprocal of the global scale, a few Newton steps from its
bits. That points at an E4M3 code or the one below, which one exact comparison then decides.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import tiles
from trace_jax.formats import Format

MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
MAX_WIDTH = 1 << 14  # what a GPU program's registers hold, and a sum of two counts in 32 bits
KERNEL_FORMATS = ("nvfp4", "mxfp4")
ADAPTIVE = ("mse", "mae", "abs_max")  # the rules of Four Over Six
_TIES_UP = (0, 1, 0, 1, 0, 1, 0)  # of the midpoints between codes c and c+1, where c is odd
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BELOW_NORMAL = 0x007FFFFF  # what is not larger counts as 0
_NEVER = MAGNITUDE  # a bound that no magnitude exceeds
_LAST = 126  # E4M3 code of 448
_E4M3_BIAS = 120 << 3  # E4M3 code = (float32 bits >> 20) - this, from 2^-6 on


@dataclasses.dataclass(frozen=True)
class Block:
    """Reductions over the values of a block; the result broadcasts against the values."""

    largest: Callable[[Any], Any]
    total: Callable[[Any], Any]


def too_wide(K: int) -> str | None:
    """Why a GPU program cannot hold rows of K values, or None."""
    return None if K <= MAX_WIDTH else f"rows of up to {MAX_WIDTH} values, not {K}"


def unsupported(format: Format) -> str | None:
    """Why kernels cannot round to this format, or None."""
    if format.name not in KERNEL_FORMATS:
        return f"kernels round to {' and '.join(KERNEL_FORMATS)}, not to {format.name}"
    if getattr(format, "convention", "exact") != "exact":
        return "other libraries' conventions divide; kernels only compare"
    if not format.per_row:
        return "16x16 tiles span rows; kernels see one row at a time"
    return None


def magnitude_bits(x):
    """Bits of |x| of float32 values."""
    return jax.lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE


def number(bits):
    """float32 with these bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def row_global(amax, format):
    """float32 global scale for the bits of a row's largest magnitude; 1 where there is none."""
    rule = getattr(format, "global_rule", "one")
    if rule == "one":
        return jnp.ones(amax.shape, jnp.float32)
    target = {"max": 6 * 448.0, "static_4": 4 * 448.0}.get(format.scale_rule, 6 * 256.0)
    usable = (amax > BELOW_NORMAL) & (amax < INF)
    least = number(jnp.maximum(amax, 27 << 23))  # 2^-100: the product stays normal
    scale = jnp.where(usable, least * jnp.float32(1.0 / target), jnp.float32(1))
    if rule == "pow2":
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
        return number((bits + 0x7FFFFF) & INF)
    return scale


def reciprocal(g):
    """About 1 / g, to 2^-22, for positive normal g; in products, so that nothing is contracted."""
    bits = jax.lax.bitcast_convert_type(g, jnp.int32)
    found = number(0x7EF311C7 - bits)  # within 13 %
    for _ in range(3):
        # 1 - g r in units of 2^-24: whole numbers keep it from becoming a fused multiply-add
        product = (g * found * 2.0**24).astype(jnp.int32)
        found = found * (((2 << 24) - product).astype(jnp.float32) * 2.0**-24)
    return found


def nvfp4_byte(amax, g, near, top: int):
    """E4M3 byte nearest to amax / (top g) for bits of block maxima; `near` is about 1 / g."""
    finite = amax < INF
    value = number(jnp.where(finite, amax, 0))
    guess = jnp.minimum(value * (near * jnp.float32(1 / top)), jnp.float32(448))
    normal = (jax.lax.bitcast_convert_type(guess, jnp.int32) >> 20) - _E4M3_BIAS
    small = (guess * 512.0).astype(jnp.int32)
    code = jnp.minimum(jnp.where(guess >= 2.0**-6, normal, small), _LAST)
    bound = _times_middle(code, top) * g
    up = (value > bound) | ((value == bound) & ((code & 1) == 1))
    code = jnp.where(up & (code < _LAST), code + 1, code)
    return jnp.where(finite, code, 0x7F)


def _times_middle(code, top: int):
    """`top` times the midpoint between the values of a magnitude code and the next, exact.

    In whole numbers: XLA, which runs interpreted kernels, would move a constant factor on to the
    global scale, where it rounds.
    """
    exponent = jnp.maximum(code >> 3, 1)
    halves = jnp.where(code >= 8, 17, 1) + 2 * (code & 7)  # of a unit of the last place
    return (halves * top).astype(jnp.float32) * number((exponent + (127 - 11)) << 23)


def mx_byte(amax, rule: str):
    """E8M0 byte of bits of block maxima, for E2M1 elements: 6 = 1.5 * 2^2, one bit of mantissa."""
    fraction, field = amax & 0x7FFFFF, amax >> 23
    if rule == "ceil":
        field = jnp.where(fraction > 0, field + 1, field)
    elif rule == "even":
        field = (amax + (1 << 21)) >> 23
    elif rule == "round_up":
        field = jnp.where(fraction > 1 << 22, field + 1, field)
    return jnp.where(amax < INF, jnp.maximum(field - 2, 0), 0xFF)


def step_of(byte, g, format):
    """float32 step of scale bytes; NaN where the scale is."""
    scale = tiles.scale_value(byte, format)
    return scale * g if format.has_global else scale


def bounds(step):
    """For each of the seven midpoints the bits that a magnitude must exceed to pass it.

    Where the step is 0 or NaN nothing passes. A tie passes upwards to an even code.
    """
    active = step > 0
    found = []
    for midpoint, tie in zip(_MIDPOINTS, _TIES_UP, strict=True):
        bits = jax.lax.bitcast_convert_type(step * jnp.float32(midpoint), jnp.int32)
        passed = jnp.maximum(bits - tie, BELOW_NORMAL)
        found.append(jnp.where(active, passed, _NEVER))
    return found


def nearest(bits, step):
    """Magnitude codes 0..7, int32, of magnitudes (bits, no NaN) under a step."""
    return passed(bits, bounds(step))


def passed(bits, seven):
    """How many of seven ascending bounds are exceeded: three comparisons, the middle one first."""
    high = bits > seven[3]
    middle = bits > jnp.where(high, seven[5], seven[1])
    upper = jnp.where(middle, seven[6], seven[4])
    lower = jnp.where(middle, seven[2], seven[0])
    low = bits > jnp.where(high, upper, lower)
    return jnp.where(high, 4, 0) | jnp.where(middle, 2, 0) | jnp.where(low, 1, 0)


def signed(code, bits):
    """Codes with the sign bit of the values' bits, never on zero."""
    return jnp.where((bits < 0) & (code > 0), code + 8, code)


def scale_bytes(bits, amax, g, format, block: Block):
    """Scale bytes, int32, of blocks of values with these magnitudes (bits)."""
    if format.name == "mxfp4":
        return mx_byte(amax, format.rule)
    near = reciprocal(g) if format.has_global else g  # Triton cannot take the bits of a literal 1
    if format.scale_rule not in ADAPTIVE:
        return nvfp4_byte(amax, g, near, 4 if format.scale_rule == "static_4" else 6)
    candidates = [nvfp4_byte(amax, g, near, top) for top in (6, 4)]
    six, four = (_error(bits, amax, step_of(b, g, format), format, block) for b in candidates)
    return jnp.where(_less(four, six), candidates[1], candidates[0])


def _error(bits, amax, step, format, block: Block):
    """Error of each block in parts, as `formats.nvfp4_adaptive` defines it in whole numbers."""
    value = tiles.e2m1_value(nearest(bits, step)) * step
    field = amax >> 23
    got = _on_grid(magnitude_bits(value), field)
    error = jnp.minimum(jnp.abs(got - _on_grid(bits, field)), 2**24 - 1)
    if format.scale_rule == "abs_max":
        return (block.largest(error),)
    if format.scale_rule == "mae":
        return (block.total(error),)
    high, low = error >> 12, error & 0xFFF
    return tuple(block.total(part) for part in (high * high, high * low, low * low))


def _on_grid(bits, field):
    own = bits >> 23
    digits = jnp.where(own > 0, (bits & 0x7FFFFF) | 0x800000, 0)
    down = jax.lax.shift_right_logical(digits, jnp.clip(field - own, 0, 24))
    return jax.lax.shift_left(down, jnp.clip(own - field, 0, 6))


def _less(a, b):
    if len(a) == 1:
        return a[0] < b[0]
    (high_a, low_a), (high_b, low_b) = _whole(a), _whole(b)
    return (high_a < high_b) | ((high_a == high_b) & (low_a < low_b))


def _whole(parts):
    high, cross, low = parts
    rest = (low & 0xFFFFFF) + ((cross & 0x7FF) << 13)
    return high + (cross >> 11) + (low >> 24) + (rest >> 24), rest & 0xFFFFFF
