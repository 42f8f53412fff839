"""Fake quantisation at the sites of TRACE: plain, or guided by what the rollout did.

The forward value is exactly the dequantised value in the compute dtype; the backward is
straight-through. Source: TRACE (arXiv 2610.07767), rollout-guided QAT.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

from trace_jax.formats import e2m1, nvfp4
from trace_jax.guidance import codec
from trace_jax.guidance.record import SiteRecord
from trace_jax.types import Mean


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteStats:
    """Undivided counts of one site over valid tokens."""

    agreement: Mean  # codes (or mantissa bits) equal to the rollout's
    flips: Mean  # codes that plain rounding on the rollout's scale would have rounded differently
    scale_equal: Mean  # E4M3 scale bytes that the trainer alone would have chosen equally
    nonfinite: Mean  # blocks with NaN or Inf in the trainer's input


@jax.custom_vjp
def straight_through(x: Float[Array, "*A"], value: Float[Array, "*A"]) -> Float[Array, "*A"]:
    """`value` in the forward, bit for bit; the cotangent goes to `x` unchanged, none to `value`."""
    del x
    return value


straight_through.defvjp(
    lambda x, value: (value, jnp.zeros((0,), x.dtype)),
    lambda like, g: (g.astype(like.dtype), jnp.zeros_like(g)),
)


def own_rounding(
    x: Float[Array, "*A K"], rule: str
) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A N"], Float[Array, "*A N"]]:
    """Plain rounding of each row: (codes, scale bytes, steps), one global scale a row."""
    global_ = nvfp4.global_scale(jnp.max(jnp.abs(x), axis=-1, keepdims=True), rule)
    codes, scales = nvfp4.quantize_rows(x, global_)
    return codes, scales, nvfp4.block_step(scales, global_)


def guided_codes(
    x: Float[Array, "*A K"],
    recorded: UInt8[Array, "*A K"],
    step: Float[Array, "*A N"],
    kind: str,
) -> UInt8[Array, "*A K"]:
    """Rounds x to the bracket member that guidance points at (BRACKET, RECONSTRUCT).

    Math:    [lo, hi] = bracket of x / step; "codes": argmin over {lo, hi} of |q - q_roll|, which is
             q_roll clipped to the bracket since the recorded value is itself a codeword;
             "mantissa": the member with the recorded mantissa bit.
    Returns: uint8 codes.
    """
    low, high = e2m1.bracket(x, nvfp4.spread(step))
    if kind == "codes":
        chosen = jnp.clip(e2m1.index(recorded), low, high)
    else:
        chosen = jnp.where((low & 1).astype(jnp.uint8) == recorded, low, high)
    return e2m1.from_index(chosen)


def _count(flag: Bool[Array, "*A K"], valid: Bool[Array, "*A"]) -> Mean:
    total = jnp.sum(flag, where=valid[..., None], dtype=jnp.float32)
    count = jnp.sum(valid, dtype=jnp.float32) * jnp.float32(flag.shape[-1])
    return Mean(total=total, count=count)


def quantize_site(
    x: Float[Array, "*A K"],
    record: SiteRecord | None,
    valid: Bool[Array, "*A"],
    *,
    rule: str,
    kind: str,
    guided: bool,
) -> tuple[Float[Array, "*A K"], SiteStats | None]:
    """Fake-quantises `x` along its last axis, in NVFP4 with one global scale a row.

    Args:    x: compute dtype. record: the rollout's outcomes, or None where nothing was recorded.
             valid: False where a token is padding and has no record (it rounds plainly).
             rule: global-scale rule for plain rounding. kind: "codes" | "mantissa".
             guided: follow the record; otherwise it is only compared with.
    Returns: the value in the dtype of x, and the counts if there is a record.
    """
    exact = jax.lax.stop_gradient(x).astype(jnp.float32)
    codes, own_scales, step = own_rounding(exact, rule)
    stats = None
    if record is not None:
        recorded, recorded_step = codec.decode(record, kind)
        here = valid[..., None]
        finite = jnp.isfinite(step)
        on_record = e2m1.round_nearest(exact, nvfp4.spread(recorded_step))
        if guided:
            followed = guided_codes(exact, recorded, recorded_step, kind)
            codes = jnp.where(here, followed, codes)
            # a block that is not finite here stays NaN: guidance must not hide it
            step = jnp.where(here & finite, recorded_step, step)
        compared = codes if kind == "codes" else codes & 1
        plain = on_record if kind == "codes" else on_record & 1
        stats = SiteStats(
            agreement=_count(compared == recorded, valid),
            flips=_count(plain != recorded, valid),
            scale_equal=_count(own_scales == record.scales, valid),
            nonfinite=_count(~finite, valid),
        )
    value = (e2m1.decode(codes) * nvfp4.spread(step)).astype(x.dtype)
    return straight_through(x, jax.lax.stop_gradient(value)), stats


def quantize_weight(
    w: Float[Array, "*A O K"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*A O K"]:
    """Fake-quantises weights along K; one global scale per matrix (its last two axes).

    The source precision is the BF16 cast of the master weight, as on the rollout's side.
    """
    codes, scales, global_ = weight_codes(jax.lax.stop_gradient(w))
    value = nvfp4.dequantize_rows(codes, scales, global_).astype(dtype)
    return straight_through(w.astype(dtype), jax.lax.stop_gradient(value))


def weight_codes(
    w: Float[Array, "*A O K"],
) -> tuple[UInt8[Array, "*A O K"], UInt8[Array, "*A O N"], Float[Array, "*A 1 1"]]:
    """(codes, scale bytes, global scale (*A,1,1)) of master weights: the one way to quantise them.

    The source is the value in BF16 whatever the master's dtype: trainer and sampler must not
    quantise two precisions. `reduce_precision` says so explicitly; XLA:GPU may drop a cast to BF16
    and back.
    """
    source = jax.lax.reduce_precision(w.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    amax = jnp.max(jnp.abs(source), axis=(-2, -1), keepdims=True)
    global_ = nvfp4.global_scale(amax, "amax")
    codes, scales = nvfp4.quantize_rows(source, global_)
    return codes, scales, global_
