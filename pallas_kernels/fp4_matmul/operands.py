"""The operands of FP4 matmuls, dense or grouped: what is checked of them and how they are read."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import blackwell, debug, packed
from pallas_kernels.common.packed import Packed
from trace_jax.checks import require

WEIGHTS = ("nvfp4", "mxfp4")  # that kernels decode
Operand = Packed | Float[Array, "M K"]


def check(where: str, x: Operand, w: Packed, weight_rank: int, out_dtype: jax.typing.DTypeLike):
    """Checks both operands and their widths at trace time; raises ValueError or TypeError."""
    fix = "pallas_kernels.common.packed.pack, or an op of pallas_kernels.quantize"
    got = type(w).__name__
    require(isinstance(w, Packed), f"{where}: w", got, "Packed", fix, TypeError)
    packed.check(where, "w", w)
    need = "(O, K)" if weight_rank == 2 else "(E, O, K)"
    require(len(w.shape) == weight_rank, f"{where}: w: shape", w.shape, need)
    if isinstance(x, Packed):
        packed.check(where, "x", x)
    else:
        fits = x.dtype in (jnp.bfloat16, jnp.float32)
        need = "bfloat16, float32 or Packed"
        require(fits, f"{where}: x: dtype", x.dtype, need, error=TypeError)
    require(len(x.shape) == 2, f"{where}: x: shape", x.shape, "(M, K)")
    narrow = min(x.shape[1], w.width)
    padded = x.format.padded(narrow) if isinstance(x, Packed) else narrow
    require(
        x.shape[1] == padded and w.width == w.format.padded(narrow),
        f"{where}: K",
        f"{x.shape[1]} of x and {w.width} of w",
        "one K for both, each padded to its own blocks at most",
    )
    floats = jnp.issubdtype(out_dtype, jnp.floating)
    require(floats, f"{where}: out_dtype", out_dtype, "a float dtype", error=TypeError)


def check_values(where: str, **operands: Operand) -> None:
    """In debug mode: no scale byte is NaN."""
    for name, x in operands.items():
        if isinstance(x, Packed):
            bad = jnp.sum(jnp.isnan(x.format.steps(x.scales, None)), dtype=jnp.int32)
            debug.check(
                bad == 0,
                f"{where}: {name}.scales: got {{bad}} NaN, need none. Fix: what was quantised held "
                "NaN or Inf.",
                bad=bad,
            )


def has(x: Operand, w: Packed) -> Mapping[str, str | None]:
    """Which implementations can multiply these, for `impls.choose`."""
    triton = packed.undecoded("x", x)
    if w.format.name not in WEIGHTS:
        triton = f"it decodes weights in {' or '.join(WEIGHTS)}, not {w.format.name}"
    return {"xla": None, "triton": triton, "mosaic_gpu": blackwell.refuses(x, w)}


def holds(x: Operand, w: Packed) -> jax.typing.DTypeLike:
    """The narrowest of BF16 and float32 that holds both operands exactly."""
    wide = [
        a.format.name not in packed.DECODED if isinstance(a, Packed) else a.dtype != jnp.bfloat16
        for a in (x, w)
    ]
    return jnp.float32 if any(wide) else jnp.bfloat16


def width(x: Operand, w: Packed) -> int:
    """K without the padding that only one side has."""
    return min(x.shape[1], w.width)


def scaled(
    total: Float[Array, "M O"],
    x_factor: Float[Array, "#M 1"] | None,
    w_factor: Float[Array, "1 #O"] | None,
) -> Float[Array, "M O"]:
    """(factor_x * factor_w) * total."""
    if x_factor is None:
        return total if w_factor is None else w_factor * total
    return (x_factor if w_factor is None else x_factor * w_factor) * total
