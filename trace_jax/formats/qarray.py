"""The quantised array and the public `quantize`."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax.checks import require
from trace_jax.formats import e2m1, nvfp4

FORMATS = ("nvfp4",)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QArray:
    """A block-quantised array. The following hold:

    * `codes` is uint8, 0..15, of the shape of the source; code 8 (minus zero) never occurs;
    * `scales` is float8_e4m3fn with the source's shape but `axis` divided by the block length,
      finite and >= 0 for finite input; a block that held NaN or Inf has a NaN scale and decodes to
      NaN;
    * `global_scale` is float32 in the decode convention, of the source's rank, 1 where shared;
    * value = e2m1(code) * fl(scale * global_scale), in float32;
    * quantising the values again with the same global scale gives the same codes and scales
      wherever the block's largest code is 6, which holds unless the scale is subnormal.
    """

    codes: UInt8[Array, "*A"]
    scales: Float[Array, "*S"]
    global_scale: Float[Array, "*G"]
    format: str = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Array:
        """The values, rounded once from float32 to `dtype`."""
        codes, scales = self._rows(self.codes), self._rows(self.scales)
        scale_bytes = jax.lax.bitcast_convert_type(scales, jnp.uint8)
        value = nvfp4.dequantize_rows(codes, scale_bytes, self._rows(self.global_scale))
        return jnp.moveaxis(value, -1, self.axis).astype(dtype)

    def packed(self) -> UInt8[Array, "*P"]:
        """Two codes a byte along `axis`, low nibble = even index."""
        return jnp.moveaxis(e2m1.pack(self._rows(self.codes)), -1, self.axis)

    def _rows(self, a: Array) -> Array:
        return jnp.moveaxis(a, self.axis, -1)


def quantize(
    x: Float[Array, "*A"],
    format: str,
    axis: int = -1,
    *,
    global_rule: str = "amax",
    global_axes: str | Sequence[int] = "tensor",
) -> QArray:
    """Quantises `x` block by block along `axis`.

    Math:    see `formats/nvfp4.py`.
    Args:    x: any float dtype; arithmetic is float32. format: "nvfp4".
             global_rule: "amax" (amax/2688), "pow2" (next power of two), or "one".
             global_axes: axes that share one global scale: "tensor" (all), "row" (`axis` only: one
             per token), or a list of axes, which must contain `axis`.
    Returns: a `QArray`.
    Raises:  ValueError for an unknown format, rule or axis, or a length that is no multiple of the
             block.
    """
    require(format in FORMATS, "quantize: format", format, f"one of {list(FORMATS)}")
    axis = _axis("axis", axis, x.ndim)
    if isinstance(global_axes, str):
        choices = {"tensor": tuple(range(x.ndim)), "row": (axis,)}
        require(
            global_axes in choices, "quantize: global_axes", global_axes, f"one of {list(choices)}"
        )
        shared = choices[global_axes]
    else:
        shared = tuple(_axis("global_axes", a, x.ndim) for a in global_axes)
        require(
            axis in shared, "quantize: global_axes", global_axes, f"axes containing axis {axis}"
        )
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=shared, keepdims=True)
    global_ = nvfp4.global_scale(amax, global_rule)
    rows, global_rows = jnp.moveaxis(x, axis, -1), jnp.moveaxis(global_, axis, -1)
    codes, scale_bytes = nvfp4.quantize_rows(rows, global_rows)
    return QArray(
        codes=jnp.moveaxis(codes, -1, axis),
        scales=jnp.moveaxis(jax.lax.bitcast_convert_type(scale_bytes, jnp.float8_e4m3fn), -1, axis),
        global_scale=global_,
        format=format,
        axis=axis,
    )


def _axis(name: str, axis: int, ndim: int) -> int:
    require(-ndim <= axis < ndim, f"quantize: {name}", axis, f"an axis of an array of rank {ndim}")
    return axis % ndim
