"""HiF4: S1P2 codes in blocks of 64 under three levels of scale, 4.5 bits a value.

A block has 4 scale bytes: E6M2 (exponent - (-48) in six bits, two mantissa bits; 0xFF is NaN, no
zero), one bit e8 for each 8 values (lowest bit first) and one bit e16 for each 4 values (two
bytes). With V16, V8, Vm the largest magnitudes of each 4, 8 and 64 values:
    SF   = bf16(fl(Vm * bf16(1/7)))
    S    = SF clamped to [2^-48, 49152], significand rounded to 2 bits, ties to even
    R    = bf16(1/S), from a table of the four mantissas
    e8   = [fl(V8 R) >= 4];  e16 = [fl(V16 R) 2^-e8 >= 2];  d = e8 + e16
    code = min(7, floor(4 fl(|x| R) 2^-d + 1/2)): half away from zero
    value = S 2^d code/4, exact in float32
Every decision is an integer operation on bits, or one float32 product compared with a constant.
The reference takes bf16 input, for which all these products are exact; wider input is taken as it
is. A zero block gets S = 2^-48 and codes 0; a block with NaN or Inf gets 0xFF and decodes to NaN;
magnitudes beyond 7 * 49152 saturate, blocks below 2^-51 flatten to zero (there is no global scale).

R is a rounded reciprocal, so `round_rows` need not give the code nearest to x / step; it is always
one of the two around it, which is what guidance needs. Quantising the values again can change
them (R S != 1; and S follows the largest *code*): see docs/formats.md.
Source: HiFloat4, arXiv 2602.11287.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from trace_jax.formats import e2m1, s1p2
from trace_jax.formats.base import Format, largest

NAN_BYTE = 0xFF
_SEVENTH = float(np.float32(146.0 / 1024.0))  # bf16(1/7)
_BIAS = (127 - 48) << 2  # float32's exponent field and two mantissa bits of 2^-48
_LEAST = _BIAS << 21  # bits of 2^-48
_GREATEST = (_BIAS + 254) << 21  # bits of 49152
_RECIPROCAL = np.array([0, 77, 43, 18], np.int32)  # 7-bit mantissas of bf16(1/1.m)


def super_scale(amax: Float[Array, "*A"]) -> UInt8[Array, "*A"]:
    """The E6M2 byte for the largest magnitude of 64 values; 0xFF if it is not finite."""
    bits = jax.lax.bitcast_convert_type(amax * jnp.float32(_SEVENTH), jnp.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF  # to bf16, ties to even
    bits = jnp.clip(bits, _LEAST, _GREATEST)
    bits = bits + ((1 << 20) - 1) + ((bits >> 21) & 1)  # two mantissa bits, ties to even
    byte = ((bits >> 21) - _BIAS).astype(jnp.uint8)
    return jnp.where(jnp.isfinite(amax), byte, jnp.uint8(NAN_BYTE))


def super_value(scales: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """float32 values of E6M2 bytes."""
    bits = (scales.astype(jnp.int32) + _BIAS) << 21
    bits = jnp.where(scales == NAN_BYTE, 0x7FC00000, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def reciprocal(scales: UInt8[Array, "*A"]) -> Float[Array, "*A"]:
    """bf16(1/S) of E6M2 bytes, as float32."""
    exponent, mantissa = (scales >> 2).astype(jnp.int32) - 48, (scales & 3).astype(jnp.int32)
    field = 127 - exponent - (mantissa > 0).astype(jnp.int32)
    bits = (field << 23) | (jnp.asarray(_RECIPROCAL)[mantissa] << 16)
    bits = jnp.where(scales == NAN_BYTE, 0x7FC00000, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiF4(Format):
    """HiF4; no options. The specification is the module's text."""

    name: ClassVar[str] = "hif4"
    element: ClassVar[Any] = s1p2
    block: ClassVar[int] = 64
    span: ClassVar[int] = 4
    scale_bytes: ClassVar[int] = 4
    scale_dtype: ClassVar[Any] = jnp.uint8

    def global_scale(self, amax: Float[Array, "*A"]) -> Float[Array, "*A"] | None:
        """None: HiF4 has no global scale."""
        return None

    def quantize_rows(
        self, x: Float[Array, "*A K"], global_: Float[Array, "*#A 1"] | None
    ) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A S"]]:
        """See the module's text."""
        v16 = largest(x.reshape(*x.shape[:-1], x.shape[-1] // 64, 16, 4), axis=-1)
        v8 = largest(v16.reshape(*v16.shape[:-1], 8, 2), axis=-1)
        top = super_scale(largest(v8, axis=-1))
        inverse = reciprocal(top)[..., None]
        e8 = v8 * inverse >= 4
        least = jnp.where(jnp.repeat(e8, 2, axis=-1), jnp.float32(4), jnp.float32(2))
        e16 = v16 * inverse >= least
        bits = jnp.concatenate([e8, e16], axis=-1).astype(jnp.uint8)  # 24 a block
        scales = jnp.concatenate([top[..., None], e2m1.pack_bits(bits)], axis=-1)
        scales = scales.reshape(*x.shape[:-1], x.shape[-1] // 16)
        return self.round_rows(x, scales, global_), scales

    def steps(
        self, scales: UInt8[Array, "*A S"], global_: Float[Array, "*#A 1"] | None
    ) -> Float[Array, "*A N"]:
        """S 2^d of each 4 values."""
        top, doublings = _unpack(scales)
        step = super_value(top)[..., None] * _power_of_two(doublings)
        return step.reshape(*scales.shape[:-1], scales.shape[-1] * 4)

    def round_rows(
        self,
        x: Float[Array, "*A K"],
        scales: UInt8[Array, "*A S"],
        global_: Float[Array, "*#A 1"] | None,
    ) -> UInt8[Array, "*A K"]:
        """The codes by the rounded reciprocal; see the module's text."""
        top, doublings = _unpack(scales)
        inverse = reciprocal(top)[..., None] * _power_of_two(-doublings)
        scaled = x * self.spread(inverse.reshape(*scales.shape[:-1], scales.shape[-1] * 4))
        return s1p2.round_nearest(scaled, jnp.ones_like(scaled))


def _unpack(scales: UInt8[Array, "*A S"]) -> tuple[UInt8[Array, "*A N"], Int[Array, "*A N 16"]]:
    """(E6M2 byte, d of each of its 16 groups) of each block."""
    fields = scales.reshape(*scales.shape[:-1], scales.shape[-1] // 4, 4)
    bits = e2m1.unpack_bits(fields[..., 1:])
    doublings = jnp.repeat(bits[..., :8], 2, axis=-1) + bits[..., 8:]
    return fields[..., 0], doublings.astype(jnp.int32)


def _power_of_two(exponent: Int[Array, "*A"]) -> Float[Array, "*A"]:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
