"""Packs rounding outcomes into a `SiteRecord`, unpacks them, and counts what a record costs.

"codes" keeps the code of each value, "mantissa" only its lowest bit: in the order of their values
the codes of every format alternate in that bit, so of two neighbours exactly one carries the
recorded one. Source: TRACE (arXiv 2610.07767), compact guidance.

Beyond the paper, a `Coding` may keep only the low bits of each scale byte (`scale_code.py`; exact,
or the row is counted as failed) and two bytes or fewer of a global scale, which is exact if the row
was BF16: its largest magnitude is then a BF16 number and the scale a function of it; of a power of
two the exponent suffices. A scale for which two bytes do not suffice becomes NaN, so it is loud.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8, UInt16

from trace_jax.checks import message, require
from trace_jax.formats import Format, e2m1
from trace_jax.formats.base import parity
from trace_jax.guidance import scale_code
from trace_jax.guidance.record import Coding, SiteRecord

# NaN byte of the scale dtypes whose bytes grow with their values; nothing else can lose high bits
_ORDERED = {"float8_e4m3fn": 0x7F, "float8_e8m0fnu": 0xFF}
_BF16_NAN, _NO_EXPONENT = 0x7FC0, 255


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a record says about each value."""

    values: UInt8[Array, "*A K"]  # codes, or their lowest bits
    scales: UInt8[Array, "*A S"]  # scale bytes
    global_scale: Float[Array, "*A 1"] | None  # float32
    steps: Float[Array, "*A N"]  # float32, one per span of values
    failed: Bool[Array, "*A"]  # rows whose scales could not be decoded for certain


def encode(
    codes: UInt8[Array, "*A K"],
    scales: UInt8[Array, "*A S"],
    global_scale: Float[Array, "*A 1"] | None,
    *,
    format: Format,
    coding: Coding,
) -> SiteRecord:
    """Packs codes, scale bytes and an optional float32 global scale. K: whole blocks.

    Raises: ValueError if the format's scale bytes cannot be kept by their low bits.
    """
    mantissa = coding.kind == "mantissa"
    bits = e2m1.pack_bits(parity(codes)) if mantissa else format.pack_codes(codes)
    return _record(bits, codes.shape[-1], scales, global_scale, format, coding)


def encode_packed(
    packed: UInt8[Array, "*A P"],
    scales: UInt8[Array, "*A S"],
    global_scale: Float[Array, "*A 1"] | None,
    *,
    format: Format,
    coding: Coding,
) -> SiteRecord:
    """`encode` for codes that `Format.pack_codes` has packed."""
    length = packed.shape[-1] * 8 // format.element.BITS
    if coding.kind == "mantissa":
        packed = e2m1.pack_bits(parity(format.unpack_codes(packed)))
    return _record(packed, length, scales, global_scale, format, coding)


def _record(
    bits: Array,
    length: int,
    scales: Array,
    global_scale: Array | None,
    format: Format,
    coding: Coding,
) -> SiteRecord:
    """Scale bytes and global scale as the coding keeps them, beside bits of `length` values."""
    kept = scale_bits(length, format=format, coding=coding)
    if kept < 8:
        scales = scale_code.encode(scales, kept, _nan_byte(format))
    if global_scale is not None and coding.global_bits == 16:
        packed = _short_global(global_scale, format)
        return SiteRecord(bits=bits, scales=scales, global_scale=packed)
    return SiteRecord(bits=bits, scales=scales, global_scale=global_scale)


def decode(
    record: SiteRecord,
    x: Float[Array, "*A K"] | None = None,
    *,
    format: Format,
    coding: Coding,
) -> Outcome:
    """Inverse of `encode`.

    Args:   x: the trainer's own float32 rows (whole blocks), to whose scales, under the recorded
            global scale, the recorded low bits are matched; not needed where bytes are whole.
    Raises: ValueError if x is needed and missing.
    """
    mantissa = coding.kind == "mantissa"
    values = e2m1.unpack_bits(record.bits) if mantissa else format.unpack_codes(record.bits)
    global_ = record.global_scale
    if global_ is not None and coding.global_bits == 16:
        global_ = _long_global(global_, format)
    scales, failed = record.scales, jnp.zeros(values.shape[:-1], bool)
    kept = scale_bits(values.shape[-1], format=format, coding=coding)
    if kept < 8:
        need = "the trainer's own rows: the record has only the low bits of scales"
        if x is None:
            raise ValueError(message("guidance codec.decode: x", None, need))
        _, own = format.quantize_rows(x, global_)
        scales, failed = scale_code.decode(scales, own, kept, _nan_byte(format))
    steps = format.steps(scales, global_)
    if global_ is not None:  # what two bytes could not hold is NaN, and was not decoded
        failed = failed | jnp.isnan(global_[..., 0])
    return Outcome(values=values, scales=scales, global_scale=global_, steps=steps, failed=failed)


def scale_bits(length: int, *, format: Format, coding: Coding) -> int:
    """Bits kept of each scale byte of rows of `length` values.

    Where a row has so few blocks that low bits and check are no smaller, bytes stay whole: 8.
    Raises: ValueError if the format's scale bytes are not magnitudes in order.
    """
    if coding.scale_bits == 8:
        return 8
    _nan_byte(format)
    blocks = format.padded(length) // format.block
    smaller = scale_code.coded_bytes(blocks, coding.scale_bits) < blocks
    return coding.scale_bits if smaller else 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteCount:
    """How many vectors of one site a token has in all recorded layers, and their length."""

    layers: int
    rows: int  # vectors a layer, each with scales of its own
    length: int  # values of a vector
    format: Format


def token_bytes(sites: Mapping[str, SiteCount], *, coding: Coding) -> int:
    """Guidance bytes of one token over all sites and layers (trace.md, bytes per token)."""
    return sum(
        s.layers * site_bytes(s.rows * s.length, format=s.format, coding=coding, rows=s.rows)
        for s in sites.values()
    )


def site_bytes(
    values: int,
    *,
    format: Format,
    coding: Coding,
    rows: int = 1,
) -> int:
    """Bytes of one token at one site and layer: bits, scales, and a global scale per row.

    Args: values: of all rows together. rows: vectors with scales of their own.
    """
    length = format.padded(values // rows)
    bits = length * (1 if coding.kind == "mantissa" else format.element.BITS) // 8
    kept = scale_bits(length, format=format, coding=coding)
    scales = length // format.block * format.scale_bytes
    scales = scales if kept == 8 else scale_code.coded_bytes(scales, kept)
    global_ = 4 if coding.global_bits == 32 else 1 if _is_power_of_two(format) else 2
    return rows * (bits + scales + global_ * format.has_global)


def scales_width(bits_width: int, *, format: Format, coding: Coding) -> int:
    """Bytes along the last axis of a record's `scales`, from those of its `bits`.

    Raises: ValueError if these are no whole number of blocks.
    """
    length = bits_width * (8 if coding.kind == "mantissa" else 8 // format.element.BITS)
    need = f"whole blocks of {format.block} values of {format.name}"
    require(length % format.block == 0, "guidance record: width of bits", bits_width, need)
    scales = length // format.block * format.scale_bytes
    kept = scale_bits(length, format=format, coding=coding)
    return scales if kept == 8 else scale_code.coded_bytes(scales, kept)


def _nan_byte(format: Format) -> int:
    name = jnp.dtype(format.scale_dtype).name
    require(
        name in _ORDERED and format.scale_bytes == 1,
        "guidance scale_bits: format",
        f"{format.name} ({format.scale_bytes} bytes of {name} a block)",
        f"one scale byte a block, of {sorted(_ORDERED)}",
        "scale_bits=8 keeps whole bytes",
    )
    return _ORDERED[name]


def _is_power_of_two(format: Format) -> bool:
    """Whether every global scale of the format is one, as its rule says."""
    return getattr(format, "global_rule", None) == "pow2"


def _short_global(g: Float[Array, "*A 1"], format: Format) -> Array:
    """A global scale in one or two bytes, NaN where that is not exact."""
    if _is_power_of_two(format):
        field = jax.lax.bitcast_convert_type(g, jnp.int32)
        exact = ((field & 0x7FFFFF) == 0) & (field > 0)
        return jnp.where(exact, field >> 23, _NO_EXPONENT).astype(jnp.uint8)
    unit = format.global_scale(jnp.ones((), jnp.float32))
    assert unit is not None
    bits = jnp.full(g.shape, _BF16_NAN, jnp.uint16)
    # a scale is proportional to the largest magnitude, or to its inverse; a zero row is apart
    for guess in (g / unit, unit / g, jnp.zeros_like(g)):
        amax = jax.lax.reduce_precision(guess, exponent_bits=8, mantissa_bits=7)
        tried = (jax.lax.bitcast_convert_type(amax, jnp.int32) >> 16).astype(jnp.uint16)
        bits = jnp.where(_long_global(tried, format) == g, tried, bits)
    return bits


def _long_global(
    short: UInt8[Array, "*A 1"] | UInt16[Array, "*A 1"], format: Format
) -> Float[Array, "*A 1"]:
    """The float32 global scale: 2^e, or the format's rule for a BF16 magnitude."""
    field = short.astype(jnp.int32)
    if _is_power_of_two(format):  # exponent 255 with a fraction is NaN
        bits = jnp.where(field == _NO_EXPONENT, _BF16_NAN << 16, field << 23)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    amax = jax.lax.bitcast_convert_type(field << 16, jnp.float32)
    g = format.global_scale(amax)
    assert g is not None
    return jnp.where(jnp.isnan(amax), jnp.float32(jnp.nan), g)
