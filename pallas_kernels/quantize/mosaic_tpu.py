"""Quantises rows on TPUs: rows in vector memory, read once.

A last axis of 16 would leave seven eighths of a vector register empty, so values keep their lanes:
the largest of a block comes to all of its lanes by a butterfly of lane rotations, and every lane
computes the block's scale. The matrix unit then closes the gaps between lanes, exactly: a product
with a matrix of 0, 1 and 16 packs two codes a byte, one of 0 and 1 picks a scale a block (BF16
holds whole numbers up to 256, float32 their sums).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import rounding
from trace_jax.formats import Format

LANES = 128
ROWS = 32  # of a program: a whole register of bytes
CHUNK = 2048  # columns at a time: their scales fill the lanes


def quantize(x_MK, global_M1, *, format: Format, interpret: bool):
    """(codes, scale bytes, row's global scales or None) of BF16 or float32 rows; M, K > 0."""
    M, K = x_MK.shape
    width = pl.cdiv(K, 2 * LANES) * 2 * LANES
    x_MK = jnp.pad(x_MK, [(0, 0), (0, width - K)]) if width > K else x_MK
    made = format.has_global and global_M1 is None
    matrices = [joining(), picking(min(CHUNK, width), format.block)]
    inputs = [x_MK, *matrices] if global_M1 is None else [x_MK, *matrices, global_M1]
    outputs = [
        jax.ShapeDtypeStruct((M, width // 2), jnp.uint8),
        jax.ShapeDtypeStruct((M, width // format.block), jnp.uint8),
    ]
    outputs += [jax.ShapeDtypeStruct((M, 1), jnp.float32)] * made
    specs = [row_block(x_MK), *map(whole, matrices)]
    specs += [] if global_M1 is None else [row_block(global_M1)]
    codes, scales, *global_ = pl.pallas_call(
        functools.partial(_kernel, format=format, made=made),
        grid=(pl.cdiv(M, ROWS),),
        in_specs=specs,
        out_specs=[row_block(output) for output in outputs],
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=f"quantize_{format.name}",
    )(*inputs)
    padded = format.padded(K)
    codes, scales = codes[:, : padded // 2], scales[:, : padded // format.block]
    return codes, scales, global_[0] if made else global_M1


def row_block(array) -> pl.BlockSpec:
    """ROWS rows of a matrix a program, or all where there are fewer."""
    return pl.BlockSpec((min(ROWS, array.shape[0]), array.shape[1]), lambda i: (i, 0))


def whole(array) -> pl.BlockSpec:
    """The same matrix for all programs."""
    return pl.BlockSpec(array.shape, lambda i: (0, 0))


def joining():
    """(256, 128): two neighbouring codes to one byte, the first in the low nibble."""
    column = jax.lax.broadcasted_iota(jnp.int32, (2 * LANES, LANES), 0)
    byte = jax.lax.broadcasted_iota(jnp.int32, (2 * LANES, LANES), 1)
    weight = jnp.where(column % 2 == 0, jnp.float32(1), jnp.float32(16))
    return jnp.where(column // 2 == byte, weight, jnp.float32(0)).astype(jnp.bfloat16)


def picking(width: int, block: int):
    """(width, width / block): the first lane of each block."""
    column = jax.lax.broadcasted_iota(jnp.int32, (width, width // block), 0)
    scale = jax.lax.broadcasted_iota(jnp.int32, (width, width // block), 1)
    return (column == scale * block).astype(jnp.bfloat16)


def spreading(width: int, block: int):
    """(width / block, width): a scale to all lanes of its block."""
    scale = jax.lax.broadcasted_iota(jnp.int32, (width // block, width), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (width // block, width), 1)
    return (column // block == scale).astype(jnp.bfloat16)


def select(whole_numbers, matrix):
    """int32 whole numbers up to 256, selected and joined by a matrix, exactly."""
    operand = whole_numbers.astype(jnp.float32).astype(jnp.bfloat16)
    found = jnp.dot(operand, matrix, preferred_element_type=jnp.float32)
    return found.astype(jnp.int32)


def over_block(block: int) -> rounding.Block:
    """Reductions over `block` neighbouring lanes that leave the result in each of them."""

    def reduce(value, combine):
        lane = jax.lax.broadcasted_iota(jnp.int32, value.shape, 1)
        distance = 1
        while distance < block:
            before = pltpu.roll(value, distance, 1)
            after = pltpu.roll(value, value.shape[1] - distance, 1)
            value = combine(value, jnp.where((lane & distance) > 0, before, after))
            distance *= 2
        return value

    return rounding.Block(
        largest=lambda value: reduce(value, jnp.maximum),
        total=lambda value: reduce(value, jnp.add),
    )


def _kernel(x_ref, join_ref, pick_ref, *refs, format, made):
    codes_ref, scales_ref = refs[-2 - made], refs[-1 - made]
    g = jnp.ones((x_ref.shape[0], 1), jnp.float32)
    if made:
        bits = rounding.magnitude_bits(x_ref[...].astype(jnp.float32))
        g = rounding.row_global(jnp.max(bits, axis=1, keepdims=True), format)
        refs[-1][...] = g
    elif format.has_global:
        g = refs[0][...]
    block = over_block(format.block)
    for start in range(0, x_ref.shape[1], CHUNK):
        end = min(start + CHUNK, x_ref.shape[1])
        x = x_ref[:, start:end].astype(jnp.float32)
        signed = jax.lax.bitcast_convert_type(x, jnp.int32)
        bits = signed & rounding.MAGNITUDE
        byte = rounding.scale_bytes(bits, block.largest(bits), g, format, block)
        blocks = (end - start) // format.block
        picked = select(byte, pick_ref[: end - start, :blocks])
        first = start // format.block
        scales_ref[:, first : first + blocks] = picked.astype(jnp.uint8)
        code = rounding.signed(rounding.nearest(bits, rounding.step_of(byte, g, format)), signed)
        for column in range(0, end - start, 2 * LANES):
            packed = select(code[:, column : column + 2 * LANES], join_ref[...])
            first = (start + column) // 2
            codes_ref[:, first : first + LANES] = packed.astype(jnp.uint8)
