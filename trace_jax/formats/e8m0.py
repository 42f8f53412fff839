"""E8M0, the power-of-two block scale of the MX formats, and the class they share.

A byte b stands for 2^(b - 127); 0xFF is NaN. All rules read the bits of the block's largest
magnitude as integers: with its exponent field F and fraction M (a value of 2^(F-127) * 1.M), and
the element's largest value 1.m * 2^p,
    floor     F - p                   the OCP default; magnitudes beyond the element's end saturate
    ceil      F - p + [M > 0]         nothing saturates
    even      floor, after rounding the magnitude to the element's number of mantissa bits
    round_up  F - p + [M > m]         the least scale with MAX * scale >= magnitude ("RCEIL")
clamped at 0 from below. 2^-127 is subnormal in float32 and backends flush it, so here byte 0 means
a block of zeros: its step is 0 and its codes are 0. A block whose byte comes out as 0 (its largest
magnitude is below 2^(p - 126), 2^-124 for E2M1) flattens to zero. A block with NaN or Inf gets
0xFF and decodes to NaN. For all but "floor", values above 7/8 of float32's largest may decode to
Inf.
Source: OCP Microscaling v1.0, 6.3; the rules by their names in torchao.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax.checks import require
from trace_jax.formats.base import Format

RULES = ("floor", "ceil", "even", "round_up")
NAN_BYTE = 0xFF
_FRACTION = 0x7FFFFF


def scale_bytes(
    amax: Float[Array, "*A"], rule: str, *, maximum: float, mantissa_bits: int
) -> UInt8[Array, "*A"]:
    """The E8M0 byte for a block's largest magnitude; see the module's text.

    Args:    amax: float32 >= 0. rule: one of RULES. maximum: largest value of the element.
             mantissa_bits: of the element.
    """
    require(rule in RULES, "e8m0: rule", rule, f"one of {list(RULES)}")
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    fraction = bits & _FRACTION
    power = int(maximum).bit_length() - 1
    end = int((maximum / 2**power - 1) * 2**23)  # fraction bits of the maximum
    field = bits >> 23
    if rule == "ceil":
        field = field + (fraction > 0).astype(jnp.int32)
    elif rule == "even":
        field = (bits + (1 << (22 - mantissa_bits))) >> 23
    elif rule == "round_up":
        field = field + (fraction > end).astype(jnp.int32)
    byte = jnp.maximum(field - power, 0).astype(jnp.uint8)
    return jnp.where(jnp.isfinite(amax), byte, jnp.uint8(NAN_BYTE))


def scale_value(scales: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """float32 values of E8M0 bytes: 0 for byte 0, NaN for 0xFF."""
    bits = scales.astype(jnp.int32) << 23
    bits = jnp.where(scales == NAN_BYTE, 0x7FC00000, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MX(Format):
    """What MXFP4 and MXFP8 share: blocks of 32 with one E8M0 scale and no global scale."""

    block: ClassVar[int] = 32
    span: ClassVar[int] = 32
    scale_bytes: ClassVar[int] = 1
    scale_dtype: ClassVar[Any] = jnp.float8_e8m0fnu
    mantissa_bits: ClassVar[int]  # of the element
    rule: str = "floor"  # "floor" (OCP) | "ceil" | "even" | "round_up"

    def __post_init__(self) -> None:
        require(self.rule in RULES, f"{self.name}: rule", self.rule, f"one of {list(RULES)}")

    def global_scale(self, amax: Float[Array, "*A"]) -> Float[Array, "*A"] | None:
        """None: the MX formats have no global scale."""
        return None

    def quantize_rows(
        self, x: Float[Array, "*A K"], global_: Float[Array, "*#A 1"] | None
    ) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A S"]]:
        """See the module's text."""
        scales = scale_bytes(
            self.block_amax(x),
            self.rule,
            maximum=self.element.MAX,
            mantissa_bits=self.mantissa_bits,
        )
        return self.round_rows(x, scales, global_), scales

    def steps(
        self, scales: UInt8[Array, "*A S"], global_: Float[Array, "*#A 1"] | None
    ) -> Float[Array, "*A N"]:
        """The scale itself."""
        return scale_value(scales)
