"""Random operands of benches: drawn packed, so that no real size has to be quantised first."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.packed import Packed
from trace_jax import formats


def packed(key: jax.Array, lead: tuple[int, ...], width: int, format: str, shared: int) -> Packed:
    """Random codes and scales of about 1 and factors of about 1/2.

    Args: shared: how many of the last axes of `lead` share a factor.
    """
    chosen = formats.get(format)
    padded = chosen.padded(width)
    k_codes, k_scales, k_factor = jax.random.split(key, 3)
    byte = 2 if chosen.element.BITS == 4 else 1
    codes = jax.random.bits(k_codes, (*lead, padded // byte), jnp.uint8)
    codes = codes if byte == 2 else codes & 0xBF  # E4M3 below 2, never NaN
    spread = jax.random.bits(k_scales, (*lead, padded // chosen.block), jnp.uint8) & 7
    # E4M3 of 1 to 1.9, or powers of two from 1/4 to 2
    scales = 0x38 + spread if chosen.name == "nvfp4" else 125 + (spread & 3)
    factor = None
    if chosen.has_global:
        owners = (*lead[: len(lead) - shared], *(1,) * shared, 1)
        factor = jax.random.uniform(k_factor, owners, jnp.float32, 0.4, 0.6)
    return zeroed(Packed(codes=codes, scales=scales, factor=factor, format=chosen), width)


def zeroed(x: Packed, width: int) -> Packed:
    """Zeros past `width`, as padding has."""
    byte = 2 if x.format.element.BITS == 4 else 1
    codes = jnp.where(jnp.arange(x.codes.shape[-1]) * byte < width, x.codes, jnp.uint8(0))
    return Packed(codes=codes, scales=x.scales, factor=x.factor, format=x.format)


def rows(key: jax.Array, count: int, width: int, kind: str) -> Packed | Float[Array, "M K"]:
    """x: of a format with a factor a row, or plain of a dtype."""
    if kind in ("bfloat16", "float32"):
        return jax.random.normal(key, (count, width), jnp.dtype(kind))
    return packed(key, (count,), width, kind, 0)


def nbytes(lead: int, width: int, kind: str) -> int:
    """Of `lead` rows, without factors."""
    if kind in ("bfloat16", "float32"):
        return lead * width * jnp.dtype(kind).itemsize
    chosen = formats.get(kind)
    padded = chosen.padded(width)
    return lead * (padded * chosen.element.BITS // 8 + padded // chosen.block * chosen.scale_bytes)


def units(w: str, x: str) -> str:
    """Which units do the products at best: those of the wider operand."""
    if w == x:
        return "fp4"
    return {"mxfp8": "fp8", "bfloat16": "bf16", "float32": "f32"}.get(x, "bf16")


def impls(w: str, x: str) -> tuple[str, ...]:
    """That can run such operands."""
    return ("xla", "triton", "mosaic_gpu") if w == x else ("xla", "triton")
