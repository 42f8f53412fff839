"""H-Scale: block scales that minimise the error weighted by the diagonal Hessian.

Of each block of 16 weights of a row, with c0 the E4M3 code that the format itself chose:
    candidates  c0 - 9 .. c0 + 6, those of 1..126 (and c0 itself): 16 in all
    w^(c)       the block rounded under scale c and decoded, exactly as the format does
    c           the candidate with the smallest sum_j h_j (w_j - w^_j(c))^2; of equal ones c0,
                then the smaller code
The global scale stays. A block with a NaN scale stays as it is.

Sums are float32, of errors in units of the global scale and h divided by its largest entry, so that
nothing under- or overflows. Candidates whose errors agree to float32 rounding may be chosen
differently by another compiler; this runs once, before serving, so nothing has to agree with it.
Source: H-Scale, arXiv 2608.28113 (no public code); ties are our choice, it does not state them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax import weight_sync
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.formats.nvfp4 import NVFP4

UP, DOWN = 6, 9  # E4M3 codes tried above and below the initial one
# the initial code first, then ascending: the first of equal errors is taken
OFFSETS = (0, *range(-DOWN, 0), *range(1, UP + 1))
_LARGEST_CODE = 126  # 448
_ROWS = 256  # of a matrix that are searched at a time, all candidates together


def pack_weight(
    w: Float[Array, "*A O K"], h: Float[Array, "*A K"], format: Format
) -> dict[str, Array]:
    """Like `weight_sync.pack_weight`, with scales by H-Scale."""
    return refine(w, h, _packed(w, format), format)


def refine(
    w: Float[Array, "*A O K"],
    h: Float[Array, "*A K"],
    packed: dict[str, Array],
    format: Format,
) -> dict[str, Array]:
    """Packed weights with scales by H-Scale.

    Args:   w: master weights; their BF16 values are quantised, as `packed` was. h: weights of
            squared errors, >= 0 and finite. packed: what `weight_sync.pack_weight` gave.
    Raises: ValueError for a format other than NVFP4 in 1x16 blocks.
    """
    fits = isinstance(format, NVFP4) and format.block_shape == "1x16"
    require(fits, "ptq: H-Scale of format", format, "nvfp4 in blocks of 1x16")
    return _refine(w, h, packed, format)


_packed = jax.jit(weight_sync.pack_weight, static_argnames=("format",))


@partial(jax.jit, static_argnames=("format",))
def _refine(w: Array, h: Array, packed: dict[str, Array], format: Format) -> dict[str, Array]:
    source = jax.lax.reduce_precision(w.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    source, weight = format.pad(source), format.pad(h.astype(jnp.float32))
    scales, global_ = packed["scales"], packed["global"]
    flat = [a.reshape(-1, *a.shape[w.ndim - 2 :]) for a in (source, weight, scales, global_)]

    def matrix(operands: tuple[Array, Array, Array, Array]) -> Array:
        source_OK, weight_K, scales_OS, global_11 = operands
        row = partial(best_scales, weight_K, global_11[0, 0], format)
        return jax.lax.map(lambda pair: row(*pair), (source_OK, scales_OS), batch_size=_ROWS)

    best = jax.lax.map(matrix, tuple(flat)).reshape(scales.shape)
    codes = format.round_rows(source, best, global_)
    return {"codes": format.pack_codes(codes), "scales": best, "global": global_}


def best_scales(
    weight_K: Float[Array, " K"],
    global_: Float[Array, ""],
    format: Format,
    source_K: Float[Array, " K"],
    initial_S: UInt8[Array, " S"],
) -> UInt8[Array, " S"]:
    """The chosen scale byte of each block of one row; see the module's text."""
    weight_K = weight_K / jnp.maximum(jnp.max(weight_K), jnp.float32(2.0**-100))
    unit = jnp.abs(format.decode_scale(global_))

    def candidate(offset: Array) -> tuple[Array, Array]:
        code = initial_S.astype(jnp.int32) + offset
        usable = ((code >= 1) & (code <= _LARGEST_CODE)) | (offset == 0)
        scales = jnp.where(usable, code, 1).astype(jnp.uint8)
        codes = format.round_rows(source_K, scales, global_[None])
        error = (source_K - format.dequantize_rows(codes, scales, global_[None])) / unit
        weighted = (weight_K * jnp.square(error)).reshape(len(scales), format.block)
        return jnp.where(usable, jnp.sum(weighted, axis=-1), jnp.inf), scales

    errors_CS, scales_CS = jax.vmap(candidate)(jnp.asarray(OFFSETS, jnp.int32))
    best_S = jnp.argmin(errors_CS, axis=0)  # a NaN counts as smallest: such a block stays
    return jnp.take_along_axis(scales_CS, best_S[None], axis=0)[0]
