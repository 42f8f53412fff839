"""The quantised array and the public `quantize`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax.checks import require
from trace_jax.formats import registry
from trace_jax.formats.base import Format, in_dtype, largest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QArray:
    """A block-quantised array. The following hold:

    * `codes` is uint8, of the shape of the source, 0..15 for 4-bit elements; minus zero never
      occurs;
    * `scales` has `scale_bytes` entries per block along `axis` (the last block may be partly
      padding), in the format's one-byte dtype, finite and >= 0 for finite input; a block that held
      NaN or Inf has a NaN scale and decodes to NaN;
    * `global_scale` is float32 as the format's convention keeps it (`Format.decode_scale` gives
      the factor of the values; by default it is that), of the source's rank with 1 where shared,
      or None for formats (and options) without one;
    * value = element(code) * step, step = `Format.steps`, in float32;
    * quantising the values again with the same global scale gives the same values, with the
      exceptions that docs/formats.md lists (HiF4; E4M3 scales at the lower end).
    """

    codes: UInt8[Array, "*A"]
    scales: Array
    global_scale: Float[Array, "*G"] | None
    format: Format = dataclasses.field(metadata={"static": True})
    # counted from the end, so that vmap and scan may add and take axes in front
    axis: int = dataclasses.field(metadata={"static": True})

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Array:
        """The values, rounded once from float32 to `dtype`."""
        codes, scales = self.format.pad(self._rows(self.codes)), self._rows(self.scales)
        global_ = None if self.global_scale is None else self._rows(self.global_scale)
        scale_bytes = jax.lax.bitcast_convert_type(scales, jnp.uint8)
        value = self.format.dequantize_rows(codes, scale_bytes, global_)
        value = value[..., : self.codes.shape[self.axis]]
        return in_dtype(jnp.moveaxis(value, -1, self.axis), dtype)

    def packed(self) -> UInt8[Array, "*P"]:
        """Two 4-bit codes a byte along `axis`, low nibble = even index; an odd width gets a 0."""
        return jnp.moveaxis(self.format.pack_codes(self._rows(self.codes)), -1, self.axis)

    def _rows(self, a: Array) -> Array:
        return jnp.moveaxis(a, self.axis, -1)


def quantize(
    x: Float[Array, "*A"],
    format: str | Format,
    axis: int = -1,
    *,
    global_axes: str | Sequence[int] = "tensor",
    **options: Any,
) -> QArray:
    """Quantises `x` block by block along `axis`, which may have any length.

    Math:    see the format's module.
    Args:    x: any float dtype; arithmetic is float32. format: a name ("nvfp4"), a name with
             options ("nvfp4:global_rule=one"), or a `Format`; further options by keyword.
             global_axes: axes that share one global scale: "tensor" (all), "row" (`axis` only: one
             per token), or a list of axes, which must contain `axis`.
    Returns: a `QArray`.
    Raises:  ValueError for an unknown format, option or axis.
    """
    return quantize_together([x], format, axis, global_axes=global_axes, **options)[0]


def quantize_together(
    arrays: Sequence[Float[Array, "..."]],
    format: str | Format,
    axis: int = -1,
    *,
    global_axes: str | Sequence[int] = "tensor",
    **options: Any,
) -> list[QArray]:
    """Quantises arrays that are to have the same global scales, such as gate and up of an expert.

    Engines fuse gate and up into one matrix with one global scale, so theirs must not differ: this
    gives the codes and scales that the fused matrix would have.

    Math:    the global scale of the largest magnitude of all arrays together.
    Args:    arrays: of one rank, and of equal sizes along axes that are not shared; the rest as in
             `quantize`.
    Returns: one `QArray` each.
    Raises:  as `quantize`, and if the shapes do not fit.
    """
    chosen = registry.get(format, **options)
    ndim = arrays[0].ndim
    axis = _axis("axis", axis, ndim)
    shared = _shared_axes(global_axes, axis, ndim)
    arrays = [x.astype(jnp.float32) for x in arrays]
    each = [largest(x, axis=shared, keepdims=True) for x in arrays]
    shapes = [a.shape for a in each]
    need = "one shape: the arrays may differ along shared axes only"
    require(len(set(shapes)) == 1, "quantize_together: shapes of global scales", shapes, need)
    global_ = chosen.global_scale(largest(jnp.stack(each), axis=0))
    return [_quantize(x, chosen, axis, global_) for x in arrays]


def _quantize(x: Array, chosen: Format, axis: int, global_: Array | None) -> QArray:
    global_rows = None if global_ is None else jnp.moveaxis(global_, axis, -1)
    codes, scale_bytes = chosen.quantize_rows(chosen.pad(jnp.moveaxis(x, axis, -1)), global_rows)
    scales = jax.lax.bitcast_convert_type(scale_bytes, chosen.scale_dtype)
    return QArray(
        codes=jnp.moveaxis(codes[..., : x.shape[axis]], -1, axis),
        scales=jnp.moveaxis(scales, -1, axis),
        global_scale=global_,
        format=chosen,
        axis=axis - x.ndim,
    )


def _shared_axes(global_axes: str | Sequence[int], axis: int, ndim: int) -> tuple[int, ...]:
    if isinstance(global_axes, str):
        choices = {"tensor": tuple(range(ndim)), "row": (axis,)}
        need = f"one of {list(choices)}"
        require(global_axes in choices, "quantize: global_axes", global_axes, need)
        return choices[global_axes]
    shared = tuple(_axis("global_axes", a, ndim) for a in global_axes)
    require(axis in shared, "quantize: global_axes", global_axes, f"axes containing axis {axis}")
    return shared


def _axis(name: str, axis: int, ndim: int) -> int:
    require(-ndim <= axis < ndim, f"quantize: {name}", axis, f"an axis of an array of rank {ndim}")
    return axis % ndim
