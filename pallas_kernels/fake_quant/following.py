"""Rounding to the bracket member that a record points at, on tiles inside kernels.

As in `quantize.rounding`, elementwise on the int32 bits of magnitudes. One search finds the largest
codeword below a value; the codeword above it and the nearest one are it or its neighbour, which one
exact comparison each decides.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.common import tiles
from pallas_kernels.quantize import rounding
from trace_jax.formats import Format

_VALUES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ENDS = {"nvfp4": (0x7E, 0x7F), "mxfp4": (0xFE, 0xFF)}  # largest finite and NaN scale byte


@dataclasses.dataclass(frozen=True)
class Record:
    """A record on a tile, in int32 and float32."""

    values: Any  # the recorded code or bit of each value
    byte: Any  # scale bytes of blocks
    g: Any  # global scales of rows


def outcome(signed, own, own_g, record: Record | None, valid, *, format: Format, kind, guided):
    """What fake quantisation makes of values, given as the int32 bits of float32.

    Args:    own, own_g: the scale bytes and global scale that the values alone ask for.
             valid: rows that have a record. The rest as in `op.fake_quant`.
    Returns: float32 values, and flags of values and of blocks by the names of `types.Counts`.
    """
    bits = signed & rounding.MAGNITUDE
    bits = jnp.where(bits > rounding.INF, 0, bits)  # NaN compares with nothing
    step = rounding.step_of(own, own_g, format)
    finite = rounding.magnitude_bits(step) < rounding.INF
    if record is None:
        code = rounding.signed(rounding.nearest(bits, step), signed)
        return tiles.e2m1_value(code) * step, {"coded": code != 0, "nonfinite": ~finite}
    recorded_step = rounding.step_of(record.byte, record.g, format)
    if guided:
        # rows without a record are rounded plainly on their own step, by the same search
        used = jnp.where(valid, recorded_step, step)
        low, high, plain = _bracket(bits, signed, used)
        code = jnp.where(valid, _member(low, high, record.values, kind), plain)
        step = jnp.where(valid & finite, recorded_step, step)
    else:
        code = rounding.signed(rounding.nearest(bits, step), signed)
        plain = rounding.signed(rounding.nearest(bits, recorded_step), signed)
    kept = 15 if kind == "codes" else 1
    largest, nan = _ENDS[format.name]
    flags = {
        "coded": code != 0,
        "nonfinite": ~finite,
        "agreement": (code & kept) == record.values,
        "flips": (plain & kept) != record.values,
        "scale_equal": own == record.byte,
        "zero_scales": record.byte == 0,
        "nan_scales": record.byte == nan,
        "saturated_blocks": record.byte == (-1 if format.has_global else largest),
    }
    return tiles.e2m1_value(code) * step, flags


def _bracket(bits, signed, step):
    """(low, high) as indices -7..7, and the nearest code 0..15, of values under a step."""
    active = (step > 0) & (bits > rounding.BELOW_NORMAL)
    reached = [rounding.magnitude_bits(step * jnp.float32(value)) - 1 for value in _VALUES]
    floor = jnp.where(active, rounding.passed(bits, reached), 0)
    below = floor < 7
    beyond = active & below & (bits > rounding.magnitude_bits(tiles.e2m1_value(floor) * step))
    ceil = jnp.where(beyond, floor + 1, floor)
    middle = rounding.magnitude_bits(_above(floor) * step)
    tie = (bits == middle) & ((floor & 1) == 1)
    nearest = jnp.where(active & below & ((bits > middle) | tie), floor + 1, floor)
    negative = signed < 0
    low, high = jnp.where(negative, -ceil, floor), jnp.where(negative, -floor, ceil)
    return low, high, rounding.signed(nearest, signed)


def _above(code):
    """The midpoint between magnitude codes c and c+1: the piecewise linear function at c + 1/2."""
    half = code.astype(jnp.float32) + 0.5
    return jnp.maximum(jnp.maximum(half * 0.5, half - 2.0), half + half - 8.0)


def _member(low, high, recorded, kind: str):
    """The code 0..15 of the bracket's member that the record points at."""
    if kind == "codes":
        wanted = jnp.where(recorded >= 8, 8 - recorded, recorded)
        index = jnp.minimum(jnp.maximum(wanted, low), high)
    else:
        index = jnp.where((low & 1) == recorded, low, high)
    return jnp.where(index < 0, 8 - index, index)
