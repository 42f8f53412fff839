"""The specification of fake_quant: `trace_jax.formats` and the bracket. Also what "xla" runs."""

import jax.numpy as jnp

from pallas_kernels.fake_quant.types import Recorded
from trace_jax.formats import Format, e2m1
from trace_jax.formats.base import in_dtype, parity

_ENDS = {"float8_e4m3fn": (0x7E, 0x7F)}  # (largest finite, NaN) scale byte; others: E8M0


def fake_quant(x, recorded: Recorded | None, valid, *, format: Format, kind: str, guided: bool):
    """(value, counts by name (*A, 1), own scale bytes, own global scales) of rows.

    Each row has its own global scale. With a record: its bracket member is taken where `guided`,
    else it is only compared with.
    """
    width, valid = x.shape[-1], valid[..., None]
    exact = format.pad(x.astype(jnp.float32))
    own_global = format.row_global(exact)
    codes, own = format.quantize_rows(exact, own_global)
    step = format.spread(format.steps(own, own_global))
    finite = jnp.isfinite(step)
    flags = {}
    if recorded is not None:
        mantissa = kind == "mantissa"
        bits = recorded.bits
        bits = e2m1.unpack_bits(bits) if mantissa else format.unpack_codes(bits)
        kept = parity if mantissa else (lambda codes: codes)
        recorded_step = format.spread(format.steps(recorded.scales, recorded.global_scale))
        plain = format.round_rows(exact, recorded.scales, recorded.global_scale)
        if guided:
            codes = jnp.where(valid, _follow(exact, bits, recorded_step, format, kind), codes)
            # a block that is not finite here stays NaN: guidance must not hide it
            step = jnp.where(valid & finite, recorded_step, step)
        flags["agreement"] = (kept(codes) == bits)[..., :width]
        flags["flips"] = (kept(plain) != bits)[..., :width]
        flags["scale_equal"] = own == recorded.scales
        largest, nan = _ENDS.get(jnp.dtype(format.scale_dtype).name, (0xFE, 0xFF))
        flags["zero_scales"] = recorded.scales == 0
        flags["nan_scales"] = recorded.scales == nan
        flags["saturated_blocks"] = (recorded.scales == largest) & (not format.has_global)
    value = in_dtype((format.element.decode(codes) * step)[..., :width], x.dtype)
    flags["coded"], flags["nonfinite"] = (codes != 0)[..., :width], ~finite[..., :width]
    counts = {
        name: jnp.sum(flag & valid, axis=-1, keepdims=True, dtype=jnp.int32)
        for name, flag in flags.items()
    }
    return value, counts, own, own_global


def _follow(x, recorded, step, format: Format, kind: str):
    low, high = format.element.bracket(x, step)
    if kind == "codes":
        return format.element.from_index(jnp.clip(format.element.index(recorded), low, high))
    lower = (low & 1).astype(jnp.uint8) == recorded
    return format.element.from_index(jnp.where(lower, low, high))
