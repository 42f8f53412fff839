"""NVFP4: E2M1 codes in blocks of 16, one E4M3 scale a block, one float32 global scale.

Specification of convention "exact" (arithmetic in float32, in this order, so that every backend
agrees bit for bit), with T = 6 and M = 448:
    g      = fl(max(max|x|, 2^-100) * fl(1/(T M))) over the axes that share it ("amax"),
           = the smallest 2^e >= that ("pow2"), or 1 ("one"); all zero, NaN or Inf: g = 1
    s      = the E4M3 value nearest to max|x_block| / (T g), ties to even, at most 448, by comparing
             max|x_block| with fl(T midpoint * g)
    step   = fl(s * g)
    code   = E2M1 nearest to x / step, by comparing |x| with fl(midpoint * step)
    value  = fl(e2m1(code) * step)
The scale starts from an approximate quotient and is corrected by exact comparisons, so it does not
depend on how a backend divides. Blocks holding NaN or Inf get the scale byte 0x7F (NaN) and so
decode to NaN; no finite input ever does. The finite blocks that share a global scale with one are
rounded as under "one". Within 7 % of the largest float32, 6 * step can overflow to Inf.

Options: `convention` rounds as another library does (`nvfp4_conventions`); `scale_rule` "static_4"
has T = 4, and "mse", "mae", "abs_max" are Four Over Six (`nvfp4_adaptive`): M = 256, T = 6 in g,
and each block takes T = 6 or 4, whichever errs less; `block_shape` "16x16" gives each 16 x 16 tile
of the last two axes of the rows one scale, stored as 16 equal rows of 1 x 16 blocks, so that a
matrix and its transpose have the same values and any 1 x 16 reader can take it.
Source: NVFP4 as in TransformerEngine's reference (2688 = 448 * 6), decode convention of ModelOpt.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from trace_jax.checks import require
from trace_jax.formats import e2m1, nvfp4_adaptive, nvfp4_conventions
from trace_jax.formats.base import Format, largest, product

BLOCK = 16
GLOBAL_RULES = ("amax", "pow2", "one")
CONVENTIONS = ("exact", *nvfp4_conventions.CONVENTIONS)
BLOCK_SHAPES = ("1x16", "16x16")
SCALE_RULES = ("max", "static_4", *nvfp4_adaptive.RULES)
_MAX_SCALE = 448.0
_NAN_BYTE = 0x7F
_TINY = 2.0**-126
_E4M3 = np.array([[i] for i in range(127)], np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_E4M3 = _E4M3.reshape(-1)  # the 127 finite non-negative values, in order
# midpoint between E4M3 codes c-1 and c, and c and c+1: exact, also times 4 and 6; ends never cross
_LOWER = np.concatenate([[-1.0], 0.5 * (_E4M3[:-1] + _E4M3[1:])]).astype(np.float32)
_UPPER = np.concatenate([_LOWER[1:], [np.inf]]).astype(np.float32)


def global_scale(
    amax: Float[Array, "*A"], rule: str, target: float = 6 * _MAX_SCALE
) -> Float[Array, "*A"]:
    """The float32 global scale (decode convention) for a maximum magnitude; see the module text.

    `target` is the magnitude that the maximum is mapped to: T M.
    """
    require(rule in GLOBAL_RULES, "nvfp4.global_rule", rule, f"one of {list(GLOBAL_RULES)}")
    usable = jnp.isfinite(amax) & (amax >= jnp.float32(_TINY))
    if rule == "one":
        return jnp.ones_like(amax)
    # below 2**-100 the product would be subnormal, which backends flush: keep it normal
    scale = product(jnp.maximum(amax, jnp.float32(2.0**-100)), jnp.float32(1.0 / target))
    scale = jnp.where(usable, scale, jnp.float32(1))
    if rule == "pow2":
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
        whole = (bits & 0x7FFFFF) == 0
        exponent = (bits >> 23) + jnp.where(whole, 0, 1)
        return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return scale


def block_scales(
    amax: Float[Array, "*A N"],
    global_: Float[Array, "*#A 1"] | Float[Array, ""],
    top: int = 6,
) -> UInt8[Array, "*A N"]:
    """E4M3 bytes of the block scales: nearest to amax / (top g), exactly (see the module text)."""
    finite = jnp.isfinite(amax)
    amax = jnp.where(finite, amax, jnp.float32(0))
    guess = jnp.minimum(amax * (np.float32(1 / top) / global_), jnp.float32(_MAX_SCALE))
    # the byte is compared and corrected below, so the barrier (not the cast) fixes the value:
    # without it XLA:GPU may fold the cast away, and the guess must be an E4M3 code
    code = jax.lax.optimization_barrier(guess.astype(jnp.float8_e4m3fn))
    code = jax.lax.bitcast_convert_type(code, jnp.uint8)
    code = jnp.minimum(code, jnp.uint8(126)).astype(jnp.int32)
    odd = (code & 1) == 1
    upper = jnp.asarray(_UPPER * np.float32(top))[code] * global_
    lower = jnp.asarray(_LOWER * np.float32(top))[code] * global_
    up = (amax > upper) | ((amax == upper) & odd)
    down = (amax < lower) | ((amax == lower) & odd)
    code = code + up.astype(jnp.int32) - down.astype(jnp.int32)
    return jnp.where(finite, code.astype(jnp.uint8), jnp.uint8(_NAN_BYTE))


def scale_value(scale_bytes: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """float32 values of E4M3 bytes."""
    return jax.lax.bitcast_convert_type(scale_bytes, jnp.float8_e4m3fn).astype(jnp.float32)


def over_tile(per_block: Array, reduce: Callable[..., Array]) -> Array:
    """Reduces over 16 neighbouring rows (axis -2, short at the end) and repeats the result."""
    rows = per_block.shape[-2]
    extra = -rows % BLOCK
    padded = jnp.pad(per_block, [(0, 0)] * (per_block.ndim - 2) + [(0, extra), (0, 0)])
    tiles = padded.reshape(*padded.shape[:-2], -1, BLOCK, padded.shape[-1])
    whole = reduce(tiles, axis=-2).astype(per_block.dtype)
    return jnp.repeat(whole, BLOCK, axis=-2)[..., :rows, :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(Format):
    """NVFP4 with its options; the specification is the module's text."""

    name: ClassVar[str] = "nvfp4"
    element: ClassVar[Any] = e2m1
    block: ClassVar[int] = BLOCK
    span: ClassVar[int] = BLOCK
    scale_bytes: ClassVar[int] = 1
    scale_dtype: ClassVar[Any] = jnp.float8_e4m3fn
    global_rule: str = "amax"  # "amax" (amax/2688) | "pow2" (next power of two) | "one"
    convention: str = "exact"  # "exact" | "te" | "modelopt" | "vllm"
    block_shape: str = "1x16"  # "1x16" | "16x16"
    scale_rule: str = "max"  # "max" | "static_4" | "mse" | "mae" | "abs_max" (Four Over Six)

    def __post_init__(self) -> None:
        for field, choices in (
            ("global_rule", GLOBAL_RULES),
            ("convention", CONVENTIONS),
            ("block_shape", BLOCK_SHAPES),
            ("scale_rule", SCALE_RULES),
        ):
            value = getattr(self, field)
            require(value in choices, f"nvfp4: {field}", value, f"one of {list(choices)}")
        if self.convention != "exact":
            where, ours = f"nvfp4: convention {self.convention}", self.global_rule != "pow2"
            need = "global_rule amax or one, scale_rule max: what that library has"
            got = f"{self.global_rule}, {self.scale_rule}"
            require(ours and self.scale_rule == "max", where, got, need)

    @property
    def per_row(self) -> bool:
        """Not where tiles span rows."""
        return self.block_shape == "1x16"

    def global_scale(self, amax: Float[Array, "*A"]) -> Float[Array, "*A"] | None:
        """As the global rule says; None under "one". Encodes (~2688/amax) under te and vllm."""
        if self.global_rule == "one":
            return None
        if self.convention != "exact":
            return nvfp4_conventions.global_scale(amax, self.convention)
        target = {"max": 6 * 448.0, "static_4": 4 * 448.0}.get(self.scale_rule, 6 * 256.0)
        return global_scale(amax, self.global_rule, target)

    def decode_scale(self, global_: Float[Array, "*A"]) -> Float[Array, "*A"]:
        """The factor that values carry: 1 / global scale under te and vllm."""
        return nvfp4_conventions.decode_scale(global_, self.convention)

    def quantize_rows(
        self, x: Float[Array, "*A K"], global_: Float[Array, "*#A 1"] | None
    ) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A S"]]:
        """See the module's text.

        Raises: ValueError for 16x16 tiles of less than two axes or of several global scales.
        """
        amax = self.block_amax(x)
        if self.block_shape == "16x16":
            where, one = "nvfp4: block_shape 16x16", global_ is None or global_.shape[-2:] == (1, 1)
            require(x.ndim >= 2, where, f"{x.ndim} axis", "rows of two axes or more")
            got, fix = "a global scale for each row", "use one a tensor, or global_axes=[...]"
            require(one, where, got, "one global scale for all rows of a tile", fix)
            amax = over_tile(amax, largest)
        scales = self._scales(x, amax, global_)
        return self.round_rows(x, scales, global_), scales

    def round_rows(
        self,
        x: Float[Array, "*A K"],
        scales: UInt8[Array, "*A S"],
        global_: Float[Array, "*#A 1"] | None,
    ) -> UInt8[Array, "*A K"]:
        """As the convention divides or multiplies; see the modules' texts."""
        if self.convention == "exact":
            return super().round_rows(x, scales, global_)
        return nvfp4_conventions.round_rows(x, scales, global_, self.convention, self.spread)

    def steps(
        self, scales: UInt8[Array, "*A S"], global_: Float[Array, "*#A 1"] | None
    ) -> Float[Array, "*A N"]:
        """fl(s * g), or as the convention says."""
        if self.convention != "exact":
            return nvfp4_conventions.steps(scales, global_, self.convention)
        value = scale_value(scales)
        return value if global_ is None else product(value, global_)

    def _scales(self, x: Array, amax: Array, global_: Array | None) -> Array:
        if self.convention != "exact":
            return nvfp4_conventions.block_scales(amax, global_, self.convention)
        one = jnp.float32(1) if global_ is None else global_
        if self.scale_rule not in nvfp4_adaptive.RULES:
            return block_scales(amax, one, 4 if self.scale_rule == "static_4" else 6)
        scales, errors = [], []
        for top in (6, 4):
            candidate = block_scales(amax, one, top)
            values = self.dequantize_rows(
                self.round_rows(x, candidate, global_), candidate, global_
            )
            error = nvfp4_adaptive.block_error(x, values, amax, self.scale_rule)
            if self.block_shape == "16x16":
                reduce = jnp.max if self.scale_rule == "abs_max" else jnp.sum
                error = tuple(over_tile(part, reduce) for part in error)
            scales.append(candidate)
            errors.append(error)
        return jnp.where(nvfp4_adaptive.less(errors[1], errors[0]), scales[1], scales[0])
