"""Fake quantisation at the sites of TRACE: plain, or guided by what the rollout did.

The forward value is exactly the dequantised value in the compute dtype; the backward is
straight-through. Source: TRACE (arXiv 2610.07767), rollout-guided QAT.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

from pallas_kernels.fake_quant.op import fake_quant
from pallas_kernels.fake_quant.straight_through import masked_straight_through, straight_through
from pallas_kernels.fake_quant.types import OF_BLOCKS, OF_VALUES, Recorded
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.formats.base import in_dtype, largest, parity
from trace_jax.guidance import codec, health
from trace_jax.guidance.record import Coding, SiteRecord
from trace_jax.types import Mean

STE = ("plain", "clipped")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteStats:
    """Undivided counts of one site over valid tokens."""

    coded: Mean  # values with a code other than zero: none means nothing was really quantised
    nonfinite: Mean  # spans with NaN or Inf in the input
    agreement: Mean | None = None  # codes (or mantissa bits) equal to the rollout's
    flips: Mean | None = None  # codes that plain rounding on the rollout's step would have changed
    scale_equal: Mean | None = None  # scale bytes that this side alone would have chosen equally
    undecoded: Mean | None = None  # rows whose scales the record's low bits could not restore
    zero_scales: Mean | None = None  # blocks of the record, see `guidance.health`
    nan_scales: Mean | None = None
    saturated_blocks: Mean | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """The static facts of one site; hashable."""

    format: Format
    kind: str = "codes"  # of the guidance: "codes" | "mantissa"
    ste: str = "plain"  # "plain": the gradient passes; "clipped": not where the value saturated
    scale_bits: int = 8  # of the guidance, see `guidance.record.Coding`
    global_bits: int = 32
    impl: str = "xla"  # what rounds: see `pallas_kernels.fake_quant`; all give the same bits

    def __post_init__(self) -> None:
        require(self.ste in STE, "qat: ste", self.ste, f"one of {list(STE)}")

    @property
    def coding(self) -> Coding:
        """How records of this site are packed."""
        return Coding(kind=self.kind, scale_bits=self.scale_bits, global_bits=self.global_bits)


def guided_codes(
    x: Float[Array, "*A K"],
    recorded: UInt8[Array, "*A K"],
    step: Float[Array, "*A K"],
    site: Site,
) -> UInt8[Array, "*A K"]:
    """Rounds x to the bracket member that guidance points at (BRACKET, RECONSTRUCT).

    Math:    [lo, hi] = bracket of x / step; "codes": argmin over {lo, hi} of |q - q_roll|, which is
             q_roll clipped to the bracket since the recorded value is itself a codeword;
             "mantissa": the member with the recorded mantissa bit.
    Returns: uint8 codes.
    """
    element = site.format.element
    low, high = element.bracket(x, step)
    if site.kind == "codes":
        chosen = jnp.clip(element.index(recorded), low, high)
    else:
        chosen = jnp.where((low & 1).astype(jnp.uint8) == recorded, low, high)
    return element.from_index(chosen)


def quantize_site(
    x: Float[Array, "*A K"],
    record: SiteRecord | None,
    valid: Bool[Array, "*A"],
    site: Site,
    *,
    guided: bool,
) -> tuple[Float[Array, "*A K"], SiteStats]:
    """Fake-quantises `x` along its last axis, each row with its own global scale.

    Args:    x: compute dtype; K of any length (rows are padded to whole blocks inside).
             record: the rollout's outcomes, or None where nothing was recorded.
             valid: False where a token is padding and has no record (it rounds plainly).
             guided: follow the record; otherwise it is only compared with.
    Returns: the value in the dtype of x, and the counts.
    """
    if site.impl != "xla":
        return _by_kernel(x, record, valid, site, guided)
    format, width = site.format, x.shape[-1]
    exact = format.pad(jax.lax.stop_gradient(x).astype(jnp.float32))
    codes, own_scales, own_global = own_rounding(exact, format)
    step = format.spread(format.steps(own_scales, own_global))
    finite = jnp.isfinite(step)
    compared: dict[str, Mean] = {}
    if record is not None:
        outcome = codec.decode(record, exact, format=format, coding=site.coding)
        recorded, recorded_step = outcome.values, format.spread(outcome.steps)
        plain = format.round_rows(exact, outcome.scales, outcome.global_scale)
        if guided:
            followed = guided_codes(exact, recorded, recorded_step, site)
            here = valid[..., None]
            codes = jnp.where(here, followed, codes)
            # a span that is not finite here stays NaN: guidance must not hide it
            step = jnp.where(here & finite, recorded_step, step)
        kept = (lambda c: c) if site.kind == "codes" else parity
        compared["agreement"] = _count((kept(codes) == recorded)[..., :width], valid)
        compared["flips"] = _count((kept(plain) != recorded)[..., :width], valid)
        compared["scale_equal"] = _count(own_scales == outcome.scales, valid)
        compared["undecoded"] = _count(outcome.failed[..., None], valid)
        compared |= health.scale_counts(outcome.scales, valid, format)
    with jax.named_scope("value"):  # from here `aot/survival.py` looks back
        value = in_dtype((format.element.decode(codes) * step)[..., :width], x.dtype)
    value = jax.lax.stop_gradient(value)
    stats = SiteStats(
        coded=_count((codes != 0)[..., :width], valid),
        nonfinite=_count(~finite[..., :width], valid),
        **compared,
    )
    if site.ste == "plain":
        return straight_through(x, value), stats
    largest = jnp.float32(format.element.MAX) * step
    return masked_straight_through(x, value, (jnp.abs(exact) <= largest)[..., :width]), stats


def _by_kernel(
    x: Array, record: SiteRecord | None, valid: Array, site: Site, guided: bool
) -> tuple[Array, SiteStats]:
    """`quantize_site` in one kernel, which reads the packed record.

    Scales of which a record keeps only some bits are decoded before.
    """
    recorded, undecoded = None, None
    if record is not None:
        scales, global_ = record.scales, record.global_scale
        if (site.scale_bits, site.global_bits) != (8, 32):
            exact = site.format.pad(jax.lax.stop_gradient(x).astype(jnp.float32))
            outcome = codec.decode(record, exact, format=site.format, coding=site.coding)
            scales, global_ = outcome.scales, outcome.global_scale
            undecoded = (outcome.failed & valid).astype(jnp.int32)
        recorded = Recorded(bits=record.bits, scales=scales, global_scale=global_)
    how = {"format": site.format, "kind": site.kind, "ste": site.ste, "impl": site.impl}
    with jax.named_scope("value"):
        value, each = fake_quant(x, recorded, valid, guided=guided, **how)
    if undecoded is not None:
        each = dataclasses.replace(each, undecoded=undecoded)
    rows = jnp.sum(valid, dtype=jnp.float32)
    blocks = site.format.padded(x.shape[-1]) // site.format.block

    def mean(name: str, a_row: int) -> Mean:
        total = jnp.sum(getattr(each, name), dtype=jnp.float32)
        return Mean(total=total, count=rows * jnp.float32(a_row))

    of_row = dict.fromkeys(OF_VALUES, x.shape[-1]) | dict.fromkeys(OF_BLOCKS, blocks)
    # a block is saturated at the largest scale only if no global scale stretches the range
    of_row |= {"undecoded": 1, "saturated_blocks": blocks * (not site.format.has_global)}
    counted = {n: mean(n, a_row) for n, a_row in of_row.items() if getattr(each, n) is not None}
    return value, SiteStats(**counted)


def record_site(x: Float[Array, "*A K"], site: Site) -> SiteRecord:
    """What a rollout that quantises `x` plainly records of it."""
    codes, scales, global_ = own_rounding(site.format.pad(x.astype(jnp.float32)), site.format)
    return codec.encode(codes, scales, global_, format=site.format, coding=site.coding)


def own_rounding(
    x: Float[Array, "*A K"], format: Format
) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A S"], Float[Array, "*A 1"] | None]:
    """Plain rounding of each float32 row: (codes, scale bytes, global scale of each row)."""
    global_ = format.row_global(x)
    return *format.quantize_rows(x, global_), global_


def _count(flag: Bool[Array, "*A K"], valid: Bool[Array, "*A"]) -> Mean:
    total = jnp.sum(flag, where=valid[..., None], dtype=jnp.float32)
    count = jnp.sum(valid, dtype=jnp.float32) * jnp.float32(flag.shape[-1])
    return Mean(total=total, count=count)


def quantize_weight(
    w: Float[Array, "*A O K"],
    format: Format,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*A O K"]:
    """Fake-quantises weights along K; one global scale per matrix (its last two axes).

    The source precision is the BF16 cast of the master weight, as on the rollout's side.
    """
    codes, scales, global_ = weight_codes(jax.lax.stop_gradient(w), format)
    with jax.named_scope("value"):
        value = format.dequantize_rows(codes, scales, global_)[..., : w.shape[-1]]
        value = in_dtype(value, dtype)
    return straight_through(w.astype(dtype), jax.lax.stop_gradient(value))


def weight_codes(
    w: Float[Array, "*A O K"], format: Format
) -> tuple[UInt8[Array, "*A O Kp"], UInt8[Array, "*A O S"], Float[Array, "*A 1 1"] | None]:
    """(codes, scale bytes, global scale) of master weights: the one way to quantise them.

    The source is the value in BF16 whatever the master's dtype: trainer and sampler must not
    quantise two precisions. `reduce_precision` says so explicitly; XLA:GPU may drop a cast to BF16
    and back. Codes have whole blocks: Kp is K padded.
    """
    source = jax.lax.reduce_precision(w.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    global_ = format.global_scale(largest(source, axis=(-2, -1), keepdims=True))
    return *format.quantize_rows(format.pad(source), global_), global_
