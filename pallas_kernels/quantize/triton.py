"""Quantises rows on Hopper and Blackwell GPUs: a row in the registers of a program, read once.

A program has one row, padded to a power of two by masked loads: the row's largest magnitude, the
block scales and the codes all come from the same registers, 16 values a thread. Tiles are of one
row since Triton lays out tiles with an axis of length 1 badly (whole rows in one thread).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantize import rounding
from trace_jax.formats import Format

_A_THREAD = 16
_MAX_WARPS = 16


def quantize(x_MK, global_M1, *, format: Format, interpret: bool):
    """(codes, scale bytes, row's global scales or None) of BF16 or float32 rows; M, K > 0."""
    M, K = x_MK.shape
    padded = format.padded(K)
    made = format.has_global and global_M1 is None
    outputs = [
        jax.ShapeDtypeStruct((M, padded // 2), jnp.uint8),
        jax.ShapeDtypeStruct((M, padded // format.block), jnp.uint8),
    ]
    outputs += [jax.ShapeDtypeStruct((M, 1), jnp.float32)] * made
    inputs = [x_MK] if global_M1 is None else [x_MK, global_M1]
    width, warps = tile(padded)
    codes, scales, *global_ = pl.pallas_call(
        functools.partial(_kernel, width=width, format=format, made=made),
        grid=(M,),
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"quantize_{format.name}",
    )(*inputs)
    return codes, scales, global_[0] if made else global_M1


def tile(padded: int) -> tuple[int, int]:
    """(width, warps) of a program, for rows of whole blocks."""
    width = pl.next_power_of_2(padded)
    return width, min(max(1, width // (32 * _A_THREAD)), _MAX_WARPS)


def load(ref, row, width: int):
    """The first `width` entries of a row; 0 where it ends."""
    mask = _inside(ref, width)
    return plt.load(ref.at[row, _entries(ref, width)], mask=mask, other=None if mask is None else 0)


def store(ref, row, value) -> None:
    """Inverse of `load`."""
    width = value.shape[0]
    plt.store(ref.at[row, _entries(ref, width)], value, mask=_inside(ref, width))


def _entries(ref, width: int):
    """A slice may not reach past the end, from jax 0.11 on; single entries may, where masked."""
    return pl.ds(0, width) if ref.shape[1] == width else jax.lax.iota(jnp.int32, width)


def _inside(ref, width: int):
    whole = ref.shape[1] == width
    return None if whole else jax.lax.iota(jnp.int32, width) < ref.shape[1]


BLOCK = rounding.Block(
    largest=lambda v: jnp.max(v, axis=-1, keepdims=True),
    total=lambda v: jnp.sum(v, axis=-1, keepdims=True),
)


def joined(code):
    """Two neighbouring codes a byte, the first in the low nibble.

    As a sum over pairs, which takes any layout of the tile; splitting them would force one in which
    a thread has two values of each of eight blocks.
    """
    pairs = code.reshape(code.shape[0] // 2, 2)
    shift = 4 * jax.lax.broadcasted_iota(jnp.int32, pairs.shape, 1)
    return jnp.sum(jax.lax.shift_left(pairs, shift), axis=1)


def _kernel(x_ref, *refs, width, format, made):
    codes_ref, scales_ref = refs[-2 - made], refs[-1 - made]
    row = pl.program_id(0)
    blocks = (width // format.block, format.block)
    values = jax.lax.bitcast_convert_type(load(x_ref, row, width).astype(jnp.float32), jnp.int32)
    g = jnp.float32(1)
    if made:
        g = rounding.row_global(jnp.max(values & rounding.MAGNITUDE), format)
        refs[-1][row, 0] = g
    elif format.has_global:
        g = refs[0][row, 0]
    signed = values.reshape(blocks)
    bits = signed & rounding.MAGNITUDE
    amax = BLOCK.largest(bits)  # (blocks, 1)
    byte = rounding.scale_bytes(bits, amax, g, format, BLOCK)
    store(scales_ref, row, byte.reshape(blocks[0]).astype(jnp.uint8))
    code = rounding.signed(rounding.nearest(bits, rounding.step_of(byte, g, format)), signed)
    store(codes_ref, row, joined(code.reshape(width)).astype(jnp.uint8))
