"""Fake quantisation of training: `fake_quant`, plain or guided by a rollout's packed record."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.common import impls
from pallas_kernels.fake_quant import ref
from pallas_kernels.fake_quant.straight_through import masked_straight_through, straight_through
from pallas_kernels.fake_quant.types import KINDS, PER_BYTE, STE, Counts, Recorded
from pallas_kernels.quantize import rounding
from trace_jax import formats
from trace_jax.checks import require
from trace_jax.formats import Format

DTYPES = ("bfloat16", "float32")

__all__ = ["Counts", "Recorded", "fake_quant"]


def fake_quant(
    x: Float[Array, "*A K"],
    recorded: Recorded | None,
    valid: Bool[Array, "*A"],
    *,
    format: str | Format,
    kind: str = "codes",
    ste: str = "plain",
    guided: bool,
    scale_bits: int = 8,
    global_bits: int = 32,
    impl: str,
) -> tuple[Float[Array, "*A K"], Counts]:
    """Rounds rows to a block format and back, each with its own global scale.

    Math:    plainly as `trace_jax.formats`; guided, on the recorded scales to that codeword next to
             x / step which the record points at (BRACKET): "codes", the nearer to the recorded
             code; "mantissa", the one with the recorded lowest bit. Exactly the same everywhere.
    Args:    x: BF16 or float32; K of any length. recorded: the rollout's outcomes, or None. valid:
             False where a row is padding and has no record (it rounds plainly). guided: follow the
             record, else only compare with it. kind, scale_bits, global_bits: how it is packed.
             ste: "plain", the gradient passes; "clipped", not where |x| is above 6 steps.
    Returns: the value in the dtype of x, and the counts of each row.
    Raises:  TypeError or ValueError for what does not fit; NotImplementedError, with the reason,
             for what an implementation cannot do.
    Source:  TRACE (arXiv 2610.07767), rollout-guided QAT.
    """
    chosen = formats.get(format)
    _check(x, valid, kind, ste)
    reason = rounding.unsupported(chosen) or _undecodable(recorded, scale_bits, global_bits)
    has = {"xla": _undecodable(recorded, scale_bits, global_bits), "mosaic_tpu": reason}
    has["triton"] = reason or rounding.too_wide(x.shape[-1])
    impl = impls.choose("fake_quant", impl, has)
    if recorded is not None:
        _check_recorded(x, recorded, chosen, kind)
    clipped = ste == "clipped"
    exact = jax.lax.stop_gradient(x)
    if impl == "xla" or x.size == 0:
        found = ref.fake_quant(exact, recorded, valid, format=chosen, kind=kind, guided=guided)
    else:
        if impl.startswith("triton"):
            from pallas_kernels.fake_quant import triton as kernels
        else:
            from pallas_kernels.fake_quant import mosaic_tpu as kernels
        rows, record = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), (exact, recorded))
        found = kernels.fake_quant(
            rows,
            record,
            valid.reshape(-1),
            format=chosen,
            kind=kind,
            guided=guided,
            scales=clipped,
            interpret=impls.interpreted(impl),
        )
        found = jax.tree.map(lambda a: a.reshape(*x.shape[:-1], a.shape[-1]), found)
    value, each, own, own_global = found
    counts = {name: count[..., 0] for name, count in each.items()}
    if recorded is not None:
        counts["undecoded"] = _undecoded(recorded, valid)
    if not clipped:
        return straight_through(x, value), Counts(**counts)
    step = chosen.steps(own, own_global)
    if recorded is not None and guided:
        followed = chosen.steps(recorded.scales, recorded.global_scale)
        step = jnp.where(valid[..., None] & jnp.isfinite(step), followed, step)
    largest = chosen.spread(jnp.float32(chosen.element.MAX) * step)[..., : x.shape[-1]]
    passes = jnp.abs(exact.astype(jnp.float32)) <= largest
    return masked_straight_through(x, value, passes), Counts(**counts)


def _undecoded(recorded: Recorded, valid: jax.Array) -> jax.Array:
    if recorded.global_scale is None:
        return jnp.zeros(valid.shape, jnp.int32)
    return (jnp.isnan(recorded.global_scale[..., 0]) & valid).astype(jnp.int32)


def _undecodable(recorded: Recorded | None, scale_bits: int, global_bits: int) -> str | None:
    if recorded is None or (scale_bits, global_bits) == (8, 32):
        return None
    return (
        f"records with scale_bits={scale_bits}, global_bits={global_bits} must be decoded first "
        "(`trace_jax.guidance.codec`): this op reads whole scale bytes and float32 global scales"
    )


def _check(x: jax.Array, valid: jax.Array, kind: str, ste: str) -> None:
    need = f"one of {list(DTYPES)}"
    require(x.dtype.name in DTYPES, "fake_quant: x: dtype", x.dtype.name, need, error=TypeError)
    require(x.ndim >= 1, "fake_quant: x: rank", x.ndim, "1 or more")
    require(valid.dtype == jnp.bool_, "fake_quant: valid: dtype", valid.dtype, "bool")
    require(valid.shape == x.shape[:-1], "fake_quant: valid: shape", valid.shape, x.shape[:-1])
    require(kind in KINDS, "fake_quant: kind", repr(kind), f"one of {list(KINDS)}")
    require(ste in STE, "fake_quant: ste", repr(ste), f"one of {list(STE)}")


def _check_recorded(x: jax.Array, recorded: Recorded, format: Format, kind: str) -> None:
    padded = format.padded(x.shape[-1])
    a_byte = PER_BYTE[kind] if kind == "mantissa" else 8 // format.element.BITS
    widths = {"bits": padded // a_byte, "scales": padded // format.block * format.scale_bytes}
    for name, width in widths.items():
        where, array = f"fake_quant: recorded.{name}", getattr(recorded, name)
        require(array.dtype == jnp.uint8, f"{where}: dtype", array.dtype, "uint8", error=TypeError)
        need = (*x.shape[:-1], width)
        require(array.shape == need, f"{where}: shape", array.shape, need)
    where, g = "fake_quant: recorded.global_scale", recorded.global_scale
    if g is None or not format.has_global:
        got, need = ("None", "an array") if g is None else ("an array", "None")
        require((g is None) != format.has_global, where, got, f"{need}, as {format} asks for")
        return
    require(g.dtype == jnp.float32, f"{where}: dtype", g.dtype, "float32", error=TypeError)
    require(g.shape == (*x.shape[:-1], 1), f"{where}: shape", g.shape, (*x.shape[:-1], 1))
