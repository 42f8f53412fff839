"""Quantises rows on Hopper and Blackwell GPUs: whole rows in registers, read once.

A program holds a few rows (or one wide one), padded to a power of two by masked loads: the row's
largest magnitude, the block scales and the codes all come from the same registers. Each thread has
16 neighbouring values, a whole NVFP4 block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantize import rounding
from trace_jax.formats import Format

_VALUES = 2048  # of a program, where rows are shorter
_A_THREAD = 16
_MAX_WARPS = 16


def quantize(x_MK, global_M1, *, format: Format, interpret: bool):
    """(codes, scale bytes, row's global scales or None) of BF16 or float32 rows; M, K > 0."""
    M, K = x_MK.shape
    padded = format.padded(K)
    rows, width, warps = tile(M, padded)
    made = format.has_global and global_M1 is None
    outputs = [
        jax.ShapeDtypeStruct((M, padded // 2), jnp.uint8),
        jax.ShapeDtypeStruct((M, padded // format.block), jnp.uint8),
    ]
    outputs += [jax.ShapeDtypeStruct((M, 1), jnp.float32)] * made
    inputs = [x_MK] if global_M1 is None else [x_MK, global_M1]
    kernel = functools.partial(_kernel, rows=rows, width=width, format=format, made=made)
    codes, scales, *global_ = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, rows),),
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"quantize_{format.name}",
    )(*inputs)
    return codes, scales, global_[0] if made else global_M1


def tile(M: int, padded: int) -> tuple[int, int, int]:
    """(rows, width, warps) of a program, for M rows of whole blocks."""
    width = pl.next_power_of_2(padded)
    rows = min(max(1, _VALUES // width), pl.next_power_of_2(M))
    return rows, width, min(max(1, rows * width // (32 * _A_THREAD)), _MAX_WARPS)


def load(ref, start, rows: int, width: int, other=0):
    """Rows `start` on of a matrix, (rows, width); `other` where the matrix ends."""
    mask = inside(ref, start, rows, width)
    return plt.load(ref.at[pl.ds(start, rows), pl.ds(0, width)], mask=mask, other=other)


def store(ref, start, value) -> None:
    """Inverse of `load`."""
    rows, width = value.shape
    mask = inside(ref, start, rows, width)
    plt.store(ref.at[pl.ds(start, rows), pl.ds(0, width)], value, mask=mask)


def inside(ref, start, rows: int, width: int):
    """Where a tile lies inside of a matrix."""
    row = start + jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    return (row < ref.shape[0]) & (column < ref.shape[1])


BLOCK = rounding.Block(
    largest=lambda v: jnp.max(v, axis=-1, keepdims=True),
    total=lambda v: jnp.sum(v, axis=-1, keepdims=True),
)


def halves(x):
    """Even and odd entries along the last axis."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = jax.lax.split(pairs, (1, 1), axis=pairs.ndim - 1)
    return even.reshape(pairs.shape[:-1]), odd.reshape(pairs.shape[:-1])


def _kernel(x_ref, *refs, rows, width, format, made):
    codes_ref, scales_ref = refs[-2 - made], refs[-1 - made]
    start = pl.program_id(0) * rows
    x = load(x_ref, start, rows, width).astype(jnp.float32)
    blocks = (rows, width // format.block, format.block)
    signed = jax.lax.bitcast_convert_type(x, jnp.int32).reshape(blocks)
    bits = signed & rounding.MAGNITUDE
    amax = BLOCK.largest(bits)  # (rows, blocks, 1)
    g = jnp.ones((1, 1, 1), jnp.float32)
    if made:
        g = rounding.row_global(jnp.max(amax, axis=1, keepdims=True), format)
        store(refs[-1], start, g.reshape(rows, 1))
    elif format.has_global:
        g = load(refs[0], start, rows, 1, 1.0).reshape(rows, 1, 1)
    byte = rounding.scale_bytes(bits, amax, g, format, BLOCK)
    store(scales_ref, start, byte.reshape(rows, blocks[1]).astype(jnp.uint8))
    code = rounding.signed(rounding.nearest(bits, rounding.step_of(byte, g, format)), signed)
    low, high = halves(code.reshape(rows, width))
    store(codes_ref, start, (low | (high << 4)).astype(jnp.uint8))
