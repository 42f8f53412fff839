"""What can go wrong with guidance, counted while a run goes on, and when to raise an alarm.

    quant/coded/<site>             0        nothing was quantised, although the run says so
    quant/nan_scales               > 0      a block held NaN or Inf
    quant/nonfinite_blocks/<site>  > 0      the same on the trainer's side
    quant/saturated_blocks         > 0.01   values are clipped at the largest scale
    guide/agreement, bit_agreement < 0.9    the trainer does not do what the rollout did
    guide/undecoded/<site>         > 0.001  rows whose scales the low bits could not restore
    update/grad_norm               0        nothing is learnt, although rewards differ
    update/skipped                 > 0      the gradient was not finite

Zero scales and code flips are normal and raise none.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt8

from trace_jax.checks import message
from trace_jax.formats import Format
from trace_jax.guidance.record import Guidance
from trace_jax.types import Mean

MIN_AGREEMENT = 0.9  # in-step runs have 0.999 and more
MAX_UNDECODED = 1e-3  # of rows
MAX_SATURATED = 0.01  # of blocks
# (largest finite, NaN) byte of a block's scale; 0 is zero, or the smallest where none is zero
_ENDS = {"float8_e4m3fn": (0x7E, 0x7F), "float8_e8m0fnu": (0xFE, 0xFF), "uint8": (0xFE, 0xFF)}


def scale_counts(
    scales: UInt8[Array, "*A S"], valid: Bool[Array, "*A"], format: Format
) -> dict[str, Mean]:
    """Blocks with a zero, NaN or saturated scale, of the valid rows; for the trainer's scan.

    Args:    scales: whole bytes, as `codec.decode` gives them.
    Returns: "zero_scales", "nan_scales", "saturated_blocks". A block is saturated at the largest
             scale if no global scale stretches the range: with one, the largest is normal.
    """
    largest, nan = _ENDS[jnp.dtype(format.scale_dtype).name]
    first = scales.reshape(*scales.shape[:-1], -1, format.scale_bytes)[..., 0]
    blocks = jnp.sum(valid, dtype=jnp.float32) * jnp.float32(first.shape[-1])

    def share(flag: Array, count: Array) -> Mean:
        total = jnp.sum(flag, where=valid[..., None], dtype=jnp.float32)
        return Mean(total=total, count=count)

    can_saturate = jnp.float32(not format.has_global)
    return {
        "zero_scales": share(first == 0, blocks),
        "nan_scales": share(first == nan, blocks),
        "saturated_blocks": share((first == largest) & (can_saturate > 0), blocks * can_saturate),
    }


def record_bytes(records: Sequence[Guidance]) -> int:
    """Bytes of the arrays of the records, as they travel."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(list(records)))


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """What is wrong in the metrics of one step, one message each; see the module's table.

    Returns: messages `key: got ..., need .... Fix: ...`; what stands before the first colon is the
             kind, for whoever wants to print each kind once.
    """
    found = []
    for key, value in metrics.items():
        parts = key.split("/")  # quant/coded/<site>: what is said of a key holds for its sites
        limit = _LIMITS.get("/".join(parts[:2]))
        if limit is None or limit[0](value):
            continue
        if key == "update/grad_norm" and not _rewards_differ(metrics):
            continue
        found.append(message(key, f"{value:.6g}", limit[1], limit[2]))
    return found


def _rewards_differ(metrics: Mapping[str, float]) -> bool:
    """False where no group of the step has anything to learn from: the gradient is rightly 0."""
    idle = metrics.get("reward/zero_variance_groups", 0) + metrics.get("reward/small_groups", 0)
    return idle < metrics.get("reward/groups", float("inf"))


_FINITE = "find the first layer whose activations are not finite"
_FORMAT = "a format with a global scale, or smaller values"
_RECORDS = "check that rollout and trainer share weights and quant section; lower the staleness"
_AGREES = (lambda v: v >= MIN_AGREEMENT, f"{MIN_AGREEMENT} or more", _RECORDS)
# key, or key without its site -> (is it well, need, fix); NaN is not, except of a gradient
_LIMITS = {
    "quant/coded": (
        lambda v: v > 0,
        "codes other than 0",
        "the site is not quantised: see quant.*",
    ),
    "quant/nan_scales": (lambda v: v == 0, "0", _FINITE),
    "quant/nonfinite_blocks": (lambda v: v == 0, "0", _FINITE),
    "quant/saturated_blocks": (lambda v: v <= MAX_SATURATED, f"at most {MAX_SATURATED}", _FORMAT),
    "guide/agreement": _AGREES,
    "guide/bit_agreement": _AGREES,
    "guide/undecoded": (
        lambda v: v <= MAX_UNDECODED,
        f"at most {MAX_UNDECODED} of the rows",
        "keep more bits of each scale (quant.guide_scale_bits), or whole bytes",
    ),
    "update/grad_norm": (
        lambda v: v != 0,
        "more than 0 where rewards differ",
        "is anything trained? An unsupported rounding can return zero gradients",
    ),
    "update/skipped": (lambda v: v == 0, "0", "see quant/nonfinite_blocks and the learning rate"),
}
