"""NVFP4: E2M1 codes in blocks of 16, one E4M3 scale a block, one float32 global scale.

Specification (all arithmetic float32, in this order, so that every backend agrees bit for bit):
    g      = fl(max(max|x|, 2^-100) * fl(1/2688)) over the axes that share it ("amax"),
           = the smallest 2^e >= that ("pow2"), or 1 ("one"); all zero, NaN or Inf: of max|x| = 2688
    s      = the E4M3 value nearest to max|x_block| / (6 g), ties to even, at most 448, by comparing
             max|x_block| with fl(6 midpoint * g)
    step   = fl(s * g)
    code   = E2M1 nearest to x / step, by comparing |x| with fl(midpoint * step)
    value  = fl(e2m1(code) * step)
The scale starts from an approximate quotient and is corrected by exact comparisons, so it does not
depend on how a backend divides. Blocks holding NaN or Inf get the scale byte 0x7F (NaN) and so
decode to NaN; no finite input ever does. The finite blocks that share a global scale with one are
rounded as under "one". Within 7 % of the largest float32, 6 * step can overflow to Inf.
Source: NVFP4 as in TransformerEngine's reference (2688 = 448 * 6), decode convention of ModelOpt.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from trace_jax.checks import require
from trace_jax.formats import e2m1

BLOCK = 16
GLOBAL_RULES = ("amax", "pow2", "one")
_MAX_SCALE = 448.0
_NAN_BYTE = 0x7F
_E4M3 = np.array([[i] for i in range(127)], np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_E4M3 = _E4M3.reshape(-1)  # the 127 finite non-negative values, in order
# 6 * (midpoint between E4M3 codes c-1 and c): exact in float32; ends never cross
_LOWER6 = np.concatenate([[-1.0], 3.0 * (_E4M3[:-1] + _E4M3[1:])]).astype(np.float32)
_UPPER6 = np.concatenate([_LOWER6[1:], [np.inf]]).astype(np.float32)


def block_amax(x: Float[Array, "*A K"]) -> Float[Array, "*A N"]:
    """max|x| of each block of 16 along the last axis; NaN if the block holds one."""
    require(
        x.shape[-1] % BLOCK == 0,
        "nvfp4: last axis of x",
        x.shape[-1],
        f"a multiple of {BLOCK}",
        "pad the axis with zeros, or choose a width that is a multiple of the block",
    )
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return jnp.max(jnp.abs(blocks), axis=-1)


def global_scale(amax: Float[Array, "*A"], rule: str) -> Float[Array, "*A"]:
    """The float32 global scale (decode convention) for a maximum magnitude; see the module text."""
    require(rule in GLOBAL_RULES, "nvfp4.global_rule", rule, f"one of {list(GLOBAL_RULES)}")
    usable = jnp.isfinite(amax) & (amax > 0)
    if rule == "one":
        return jnp.ones_like(amax)
    # below 2**-100 the product would be subnormal, which backends flush: keep it normal
    scale = jnp.maximum(jnp.where(usable, amax, jnp.float32(2688.0)), jnp.float32(2.0**-100))
    scale = scale * np.float32(1.0 / 2688.0)
    if rule == "pow2":
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
        whole = (bits & 0x7FFFFF) == 0
        exponent = (bits >> 23) + jnp.where(whole, 0, 1)
        return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return scale


def block_scales(
    amax: Float[Array, "*A N"], global_: Float[Array, "*#A 1"]
) -> UInt8[Array, "*A N"]:
    """E4M3 bytes of the block scales: nearest to amax / (6 g), exactly (see the module text)."""
    finite = jnp.isfinite(amax)
    amax = jnp.where(finite, amax, jnp.float32(0))
    guess = jnp.minimum(amax * (np.float32(1 / 6) / global_), jnp.float32(_MAX_SCALE))
    # the byte is compared and corrected below, so the barrier (not the cast) fixes the value:
    # without it XLA:GPU may fold the cast away, and the guess must be an E4M3 code
    code = jax.lax.optimization_barrier(guess.astype(jnp.float8_e4m3fn))
    code = jax.lax.bitcast_convert_type(code, jnp.uint8)
    code = jnp.minimum(code, jnp.uint8(126)).astype(jnp.int32)
    odd = (code & 1) == 1
    upper, lower = jnp.asarray(_UPPER6)[code] * global_, jnp.asarray(_LOWER6)[code] * global_
    up = (amax > upper) | ((amax == upper) & odd)
    down = (amax < lower) | ((amax == lower) & odd)
    code = code + up.astype(jnp.int32) - down.astype(jnp.int32)
    return jnp.where(finite, code.astype(jnp.uint8), jnp.uint8(_NAN_BYTE))


def scale_value(scale_bytes: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """float32 values of E4M3 bytes."""
    return jax.lax.bitcast_convert_type(scale_bytes, jnp.float8_e4m3fn).astype(jnp.float32)


def block_step(
    scale_bytes: UInt8[Array, "*A N"], global_: Float[Array, "*#A 1"] | None
) -> Float[Array, "*A N"]:
    """step = fl(s * g), one per block; `None` stands for a global scale of 1."""
    value = scale_value(scale_bytes)
    return value if global_ is None else value * global_


def spread(per_block: Float[Array, "*A N"]) -> Float[Array, "*A K"]:
    """Repeats one number per block to its 16 values."""
    return jnp.repeat(per_block, BLOCK, axis=-1)


def quantize_rows(
    x: Float[Array, "*A K"], global_: Float[Array, "*#A 1"]
) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A N"]]:
    """Codes and scale bytes of x along its last axis for a given global scale."""
    x = x.astype(jnp.float32)
    scales = block_scales(block_amax(x), global_)
    return e2m1.round_nearest(x, spread(block_step(scales, global_))), scales


def dequantize_rows(
    codes: UInt8[Array, "*A K"],
    scale_bytes: UInt8[Array, "*A N"],
    global_: Float[Array, "*#A 1"] | None,
) -> Float[Array, "*A K"]:
    """float32 values fl(code * fl(s * g))."""
    return e2m1.decode(codes) * spread(block_step(scale_bytes, global_))
