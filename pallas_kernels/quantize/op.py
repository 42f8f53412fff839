"""Quantisation of rows to packed FP4: `quantize`; by name `nvfp4_quantize`, `mxfp4_quantize`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import debug, impls
from pallas_kernels.common.packed import Packed
from pallas_kernels.quantize import ref, rounding
from trace_jax import formats
from trace_jax.checks import message, require
from trace_jax.formats import Format

DTYPES = ("bfloat16", "float32")


def nvfp4_quantize(
    x: Float[Array, "*A K"],
    *,
    format: str | Format = "nvfp4",
    impl: str,
    factor_from: str | Float[Array, "*G"] = "row",
) -> Packed:
    """`quantize` to NVFP4, with options of the format such as "nvfp4:scale_rule=mse"."""
    return quantize(x, _named(format, "nvfp4"), impl=impl, factor_from=factor_from)


def mxfp4_quantize(x: Float[Array, "*A K"], *, format: str | Format = "mxfp4", impl: str) -> Packed:
    """`quantize` to MXFP4, with options of the format such as "mxfp4:rule=even"."""
    return quantize(x, _named(format, "mxfp4"), impl=impl)


def quantize(
    x: Float[Array, "*A K"],
    format: str | Format,
    *,
    impl: str,
    factor_from: str | Float[Array, "*G"] = "row",
) -> Packed:
    """Quantises rows along their last axis to packed codes and scale bytes.

    Math:    that of `trace_jax.formats`, bit for bit, whatever the implementation.
    Args:    x: BF16 or float32; K of any length (rows are padded with zeros to whole blocks).
             format: NVFP4 or MXFP4 with its options; other formats, other libraries' conventions
             and 16x16 tiles by "xla" only.
             factor_from: "row", each row has its own global scale if the format has one; or given
             float32 global scales as `Format.global_scale` makes them, broadcastable to (*A, 1).
    Returns: `Packed`; its factor has the shape (*A, 1), or that of the given scales.
    Raises:  TypeError or ValueError for a dtype, format or shape that does not fit;
             NotImplementedError, with the reason, for what an implementation cannot do.
    """
    chosen = formats.get(format)
    _check(x)
    given = None if isinstance(factor_from, str) else factor_from
    if given is None:
        require(factor_from == "row", "quantize: factor_from", repr(factor_from), "'row' or scales")
    else:
        _check_given(x, given, chosen)
    reason = rounding.unsupported(chosen)
    has = {"xla": None, "mosaic_tpu": reason, "triton": reason or rounding.too_wide(x.shape[-1])}
    impl = impls.choose("quantize", impl, has)
    if impl == "xla" or x.size == 0:
        return ref.quantize(x, given, format=chosen)
    if impl.startswith("triton"):
        from pallas_kernels.quantize import triton as kernels
    else:
        from pallas_kernels.quantize import mosaic_tpu as kernels
    rows = x.reshape(-1, x.shape[-1])
    per_row = None
    if given is not None:
        per_row = jnp.broadcast_to(given, (*x.shape[:-1], 1)).reshape(-1, 1)
    how = {"format": chosen, "interpret": impls.interpreted(impl)}
    codes, scales, global_ = kernels.quantize(rows, per_row, **how)
    factor = given
    if given is None and global_ is not None:
        factor = global_.reshape(*x.shape[:-1], 1)
    return Packed(
        codes=codes.reshape(*x.shape[:-1], codes.shape[-1]),
        scales=scales.reshape(*x.shape[:-1], scales.shape[-1]),
        factor=factor,
        format=chosen,
    )


def _named(format: str | Format, name: str) -> Format:
    chosen = formats.get(format)
    require(chosen.name == name, f"{name}_quantize: format", chosen.name, name)
    return chosen


def _check(x: jax.Array) -> None:
    need = f"one of {list(DTYPES)}"
    require(x.dtype.name in DTYPES, "quantize: x: dtype", x.dtype.name, need, error=TypeError)
    require(x.ndim >= 1, "quantize: x: rank", x.ndim, "1 or more")


def _check_given(x: jax.Array, given: jax.Array, format: Format) -> None:
    where = "quantize: factor_from"
    if not format.has_global:
        raise ValueError(message(where, "scales", f"'row': {format} has no global scale"))
    got = given.dtype
    require(got == jnp.float32, f"{where}: dtype", got, "float32", error=TypeError)
    full = (*x.shape[:-1], 1)
    fits = given.ndim == len(full) and all(
        a in (1, b) for a, b in zip(given.shape, full, strict=True)
    )
    require(fits, f"{where}: shape", given.shape, f"{full}, or 1 where shared")
    debug.check(
        jnp.all((given >= jnp.float32(2.0**-112)) & (given <= jnp.float32(2.0**118))),
        f"{where}: got global scales from {{low}} to {{high}}, need 2^-112 to 2^118. "
        "Fix: make them with `Format.global_scale`",
        low=jnp.min(given, initial=jnp.inf),
        high=jnp.max(given, initial=0),
    )
