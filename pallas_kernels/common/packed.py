"""Block-scaled rows as kernels read them: packed codes, scale bytes, global factors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax import formats
from trace_jax.checks import require
from trace_jax.formats import Format

DECODED = ("nvfp4", "mxfp4", "mxfp8")  # what kernels can decode; plain XLA decodes all formats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows quantised along their last axis, K long, K a whole number of blocks.

    value[..., k] = element(code[k]) * scale[k // block] * factor, where code * scale is exact in
    float32 (and in BF16: at most 6 significant bits for NVFP4, 2 for MXFP4, 4 for MXFP8).
    """

    codes: UInt8[Array, "*A P"]  # two E2M1 codes a byte, low nibble = even k; E4M3 as it is
    scales: UInt8[Array, "*A S"]  # E4M3 (NVFP4) or E8M0 (MX) bytes, S = K / block
    factor: Float[Array, "*G"] | None  # float32 decode factor, broadcastable to (*A, 1); None: 1
    format: Format = dataclasses.field(metadata={"static": True})

    @property
    def width(self) -> int:
        """K."""
        return self.scales.shape[-1] // self.format.scale_bytes * self.format.block

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return (*self.scales.shape[:-1], self.width)

    def operand(self) -> Float[Array, "*A K"]:
        """code * scale, exact in float32, without the factor: what the tensor cores multiply."""
        codes = self.format.unpack_codes(self.codes)
        return self.format.dequantize_rows(codes, self.scales, None)


def pack(
    x: Float[Array, "*A K"], format: str | Format, *, global_axes: tuple[int, ...] = (-1,)
) -> Packed:
    """Quantises rows by the library's specification (`trace_jax.formats`) and packs them.

    Args: global_axes: axes that share one factor: (-1,) a row (a token), (-2, -1) a matrix.
    """
    q = formats.quantize(x, format, global_axes=global_axes)
    scales = jax.lax.bitcast_convert_type(q.scales, jnp.uint8)
    factor = None if q.global_scale is None else q.format.decode_scale(q.global_scale)
    codes = q.format.pack_codes(q.format.pad(q.codes))
    return Packed(codes=codes, scales=scales, factor=factor, format=q.format)


def undecoded(name: str, x: Any) -> str | None:
    """Why a kernel cannot decode `x`, as `impls.choose` takes it; None: it can, or it is plain."""
    if not isinstance(x, Packed) or x.format.name in DECODED:
        return None
    return f"it cannot decode {name} in {x.format.name}, only {', '.join(DECODED)}"


def check(where: str, name: str, x: Any) -> None:
    """That a `Packed` is whole. Raises: ValueError or TypeError naming the part."""
    for part in ("codes", "scales"):
        got = getattr(x, part).dtype
        require(got == jnp.uint8, f"{where}: {name}.{part}: dtype", got, "uint8", error=TypeError)
    a_byte = 2 if x.format.element.BITS == 4 else 1
    need = (*x.scales.shape[:-1], x.width // a_byte)
    fix = f"{x.format.name} has {x.format.block} values a block, {a_byte} a byte"
    require(x.codes.shape == need, f"{where}: {name}.codes: shape", x.codes.shape, need, fix)
    if x.factor is None:
        return
    got = x.factor.dtype
    need = "float32"
    require(got == jnp.float32, f"{where}: {name}.factor: dtype", got, need, error=TypeError)
    full = (*x.scales.shape[:-1], 1)
    fits = x.factor.ndim == len(full) and all(
        a in (1, b) for a, b in zip(x.factor.shape, full, strict=True)
    )
    require(fits, f"{where}: {name}.factor: shape", x.factor.shape, f"{full}, or 1 where shared")
