"""Four Over Six: each block is mapped to 6 or to 4, whichever errs less; the comparison is exact.

E2M1 has no value between 4 and 6, so a block whose large values lie there is better off with its
largest at 4. Both are tried; 4 is taken only if its error is *strictly* smaller.

The errors decide a whole block, and in floating point equal ones need not look equal: a compiler
may contract (x^ - x)^2 + sum to a fused multiply-add or add in another order, and then the
sampler and the trainer choose differently. Here they are integers, so the order of adding is
nothing and there is no rounding to reorder:
    |x| and |x^| are written on the grid of 2^-23 of the binade of the block's largest magnitude
    (24 bits; digits below it are cut off), e = | |x^| - |x| | on it (x^ has the sign of x or is 0),
    "mse" compares sum e^2, exactly, "mae" sum e, "abs_max" max e.
e < 2^24, so e^2 is summed as three sums of products of 12-bit halves, none of which overflows 32
bits for up to 256 values; they are then one number of 56 bits in two words. Against real numbers
each e is off by less than one unit, as float32 arithmetic also is; ties of values on the grid, such
as BF16 values of similar size, are seen as ties.
Source: Four Over Six, arXiv 2512.02010, for the rules.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

RULES = ("mse", "mae", "abs_max")
Parts = tuple[UInt32[Array, "*A N"], ...]


def block_error(
    x: Float[Array, "*A K"], values: Float[Array, "*A K"], amax: Float[Array, "*A N"], rule: str
) -> Parts:
    """The error of each block, in parts that may be added (or, for "abs_max", maximised).

    Args:    x, values: float32 numbers and what they were rounded to. amax: the largest magnitude
             that sets the grid, of each block. rule: one of RULES.
    """
    shape = (*amax.shape, x.shape[-1] // max(amax.shape[-1], 1))
    field = (jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23)[..., None]
    given = _on_grid(jnp.abs(x).reshape(shape), field)
    got = _on_grid(jnp.abs(values).reshape(shape), field)
    error = jnp.minimum(jnp.abs(got - given), 2**24 - 1).astype(jnp.uint32)
    if rule == "abs_max":
        return (jnp.max(error, axis=-1, initial=0),)
    if rule == "mae":
        return (jnp.sum(error, axis=-1, dtype=jnp.uint32),)
    high, low = error >> 12, error & 0xFFF
    products = (high * high, high * low, low * low)
    return tuple(jnp.sum(part, axis=-1, dtype=jnp.uint32) for part in products)


def less(a: Parts, b: Parts) -> Bool[Array, "*A N"]:
    """Whether error a is strictly smaller than error b."""
    if len(a) == 1:
        return a[0] < b[0]
    (high_a, low_a), (high_b, low_b) = _whole(a), _whole(b)
    return (high_a < high_b) | ((high_a == high_b) & (low_a < low_b))


def _on_grid(magnitude: Float[Array, "*A"], field: Int[Array, "*#A"]) -> Int[Array, "*A"]:
    """The magnitude in units of 2^-23 of the binade with that exponent field, cut off."""
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32)
    own = bits >> 23
    digits = jnp.where(own > 0, (bits & 0x7FFFFF) | 0x800000, 0)
    down = jnp.right_shift(digits, jnp.clip(field - own, 0, 24))
    return jnp.left_shift(down, jnp.clip(own - field, 0, 6))


def _whole(parts: Parts) -> tuple[Array, Array]:
    """high^2 2^24 + 2 high low 2^12 + low^2 as (multiples of 2^24, rest)."""
    high, cross, low = parts
    rest = (low & 0xFFFFFF) + ((cross & 0x7FF) << 13)
    return high + (cross >> 11) + (low >> 24) + (rest >> 24), rest & 0xFFFFFF
