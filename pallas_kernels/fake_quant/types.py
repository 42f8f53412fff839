"""What a rollout recorded of rows, and what is counted when training follows it."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int, UInt8

KINDS = ("codes", "mantissa")
STE = ("plain", "clipped")
PER_BYTE = {"codes": 2, "mantissa": 8}  # values whose record shares a byte, the first one lowest
OF_VALUES = ("coded", "nonfinite", "agreement", "flips")
OF_BLOCKS = ("scale_equal", "zero_scales", "nan_scales", "saturated_blocks")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """The rollout's outcomes of rows of whole blocks, Kp = K padded."""

    bits: UInt8[Array, "*A P"]  # "codes": two a byte; "mantissa": the lowest bit of eight codes
    scales: UInt8[Array, "*A S"]  # whole bytes, S = Kp / block
    global_scale: Float[Array, "*A 1"] | None  # float32; None: the format has none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Of each row; 0 where it is not valid. None where nothing was recorded."""

    coded: Int[Array, "*A"]  # values with a code other than zero
    nonfinite: Int[Array, "*A"]  # values in blocks with NaN or Inf
    agreement: Int[Array, "*A"] | None = None  # codes (or bits) equal to the rollout's
    flips: Int[Array, "*A"] | None = None  # that plain rounding on its step would have changed
    scale_equal: Int[Array, "*A"] | None = None  # blocks with the scale of the rollout
    undecoded: Int[Array, "*A"] | None = None  # 1: the recorded global scale is NaN
    zero_scales: Int[Array, "*A"] | None = None  # blocks of the record
    nan_scales: Int[Array, "*A"] | None = None
    saturated_blocks: Int[Array, "*A"] | None = None  # 0 where a global scale stretches the range


def of_interest(recorded: bool) -> tuple[str, ...]:
    """The fields of `Counts` that kernels count."""
    return (*OF_VALUES, *OF_BLOCKS) if recorded else OF_VALUES[:2]
