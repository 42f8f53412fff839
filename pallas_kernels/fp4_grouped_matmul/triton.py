"""`fp4_grouped_matmul` as a Pallas-Triton kernel: FP4 decoded in registers, BF16 tensor cores.

A program owns `outputs` rows of one expert's matrix and one tile of up to `rows` rows of x. The
matrix is the left operand, so that its rows are the M = 64 of `wgmma` and a few tokens suffice for
N. Codes and scales travel packed; code * scale is exact in BF16. Nibbles are not interleaved: the
even and the odd columns of x multiply the low and the high nibbles.

x is decoded once, before the kernel: every one of the O / `outputs` programs would do it again.
A float32 x is the exact sum of three BF16 parts, each multiplied in turn.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import schedule, triton_decode
from pallas_kernels.fp4_matmul import decode
from trace_jax.formats import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of one program."""

    outputs: int  # rows of the matrix: M of the tensor cores, 64 or 128
    rows: int  # rows of x: their N, 16..128
    bytes: int  # bytes of codes a step: half their K
    warps: int
    stages: int  # loads in flight


def config(rows: int, groups: int, block: int, half: int) -> Config:
    """Tiles by shape, chosen by the registers and bytes in flight they need; timed on no device.

    Args: rows, groups: M and E. block: see `op`. half: bytes of codes in a row, K / 2.
    """
    mean = max(block, rows // groups)
    wide = min(128, max(16, pl.next_power_of_2(mean)))
    step = min(128 if wide <= 32 else 32, max(16, pl.next_power_of_2(half)))
    if wide <= 32:
        return Config(outputs=64, rows=wide, bytes=step, warps=4, stages=4)
    return Config(outputs=128, rows=wide, bytes=step, warps=8, stages=3)


def fp4_grouped(
    x: Packed | Float[Array, "M K"],
    w: Packed,
    group_sizes_E: Int[Array, " E"],
    *,
    block: int,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool,
) -> Float[Array, "M O"]:
    """See `op.fp4_grouped_matmul`."""
    (rows, _), (groups, outputs, _) = x.shape, w.shape
    half = w.codes.shape[2]
    if rows == 0 or outputs == 0 or half == 0:
        return jnp.zeros((rows, outputs), out_dtype)
    how = config(rows, groups, block, half)
    cut = schedule.cut(group_sizes_E, rows=rows, size=how.rows, block=block, rest=True)
    planes = _planes(x, w)
    x_factor = x.factor[:, 0] if isinstance(x, Packed) and x.factor is not None else None
    w_factor = None if w.factor is None else _of_groups(w.factor, groups)
    kernel = functools.partial(_kernel, how=how, format=w.format, interpret=interpret)
    call = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(outputs, how.outputs), len(cut.group_T)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        compiler_params=plt.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        interpret=interpret,
        name="fp4_grouped_matmul",
    )
    where = cut.group_T, cut.start_T, cut.stop_T
    return call(*where, planes, w.codes, w.scales, x_factor, w_factor)


def _of_groups(factor: Float[Array, "..."], groups: int) -> Float[Array, "..."]:
    """(E,) where a matrix shares its factor, else (E, O)."""
    factor_EO = jnp.broadcast_to(factor[..., 0], (groups, factor.shape[1]))
    return factor_EO[:, 0] if factor_EO.shape[1] == 1 else factor_EO


def _planes(x: Packed | Float[Array, "M K"], w: Packed) -> list[tuple[Array, Array]]:
    """Even and odd columns of x, (M, half), BF16, padded to the width of w; parts that sum to x."""
    wide = decode.value(x, jnp.float32)[:, : w.width]
    wide = jnp.pad(wide, [(0, 0), (0, w.width - wide.shape[1])])
    exact = isinstance(x, Packed) or x.dtype == jnp.bfloat16
    parts, left = [], wide
    for _ in range(1 if exact else 3):
        bits = jax.lax.bitcast_convert_type(left, jnp.int32)
        # by bits: XLA:GPU may drop a cast to BF16 and back. Each part takes 8 of the 24 bits.
        top = jax.lax.bitcast_convert_type(bits & -65536, jnp.float32)
        parts.append(top)
        left = jnp.where(jnp.isfinite(top), left - top, 0)
    narrow = [part.astype(jnp.bfloat16) for part in parts]
    return [(part[:, 0::2], part[:, 1::2]) for part in narrow]


def _kernel(
    group_ref,
    start_ref,
    stop_ref,
    planes,
    codes_ref,
    scales_ref,
    x_factor_ref,
    w_factor_ref,
    y_ref,
    *,
    how,
    format,
    interpret,
):
    groups, outputs, half = codes_ref.shape
    first, tile = pl.program_id(0) * how.outputs, pl.program_id(1)
    start, stop = start_ref[tile], stop_ref[tile]
    own = inside(first, how.outputs, outputs, exact=outputs % how.outputs == 0)
    rows = inside(start, how.rows, stop)

    @pl.when(start < stop)
    def _():
        group = group_ref[tile]
        expert = jnp.minimum(group, groups - 1)  # rows past the last group: no steps, so zeros

        def step(i, total):
            at = pl.ds(i * how.bytes, how.bytes)
            there = inside(i * how.bytes, how.bytes, half, exact=half % how.bytes == 0)
            codes = load(codes_ref.at[expert, pl.ds(first, how.outputs), at], own, there)
            scales = _scales(scales_ref, expert, first, i, own, how, format, interpret)
            values = triton_decode.planes(codes, scales, interpret=interpret)
            for plane, left in enumerate(values):
                for x_refs in planes:
                    x = load(x_refs[plane].at[pl.ds(start, how.rows), at], rows, there)
                    total += jnp.dot(left, x.T, preferred_element_type=jnp.float32)
            return total

        steps = (group < groups).astype(jnp.int32) * pl.cdiv(half, how.bytes)
        zeros = jnp.zeros((how.outputs, how.rows), jnp.float32)
        total = jax.lax.fori_loop(0, steps, step, zeros)
        factor = _factor(x_factor_ref, w_factor_ref, expert, first, start, own, rows, how)
        if factor is not None:
            total = jnp.where(group < groups, factor * total, 0)  # 0 even if a factor is NaN
        out = y_ref.at[pl.ds(start, how.rows), pl.ds(first, how.outputs)]
        plt.store(out, total.T.astype(y_ref.dtype), mask=both(rows, own, out.shape))


def _scales(ref, expert, first, i, own, how, format: Format, interpret: bool):
    """The scale of each byte of codes of step i, BF16."""
    spread = format.block // 2
    wide, count = ref.shape[2], how.bytes // spread
    there = inside(i * count, count, wide, exact=wide % count == 0)
    byte = load(ref.at[expert, pl.ds(first, how.outputs), pl.ds(i * count, count)], own, there)
    scale = triton_decode.scales(byte, format, interpret=interpret)
    shape = (how.outputs, count, spread)
    return jnp.broadcast_to(scale[:, :, None], shape).reshape(how.outputs, how.bytes)


def _factor(x_ref, w_ref, expert, first, start, own, rows, how):
    """factor_x * factor_w of a tile, what broadcasts to (outputs, rows); None for none."""
    x_factor = w_factor = None
    if x_ref is not None:
        shared = x_ref.shape[0] == 1
        x_factor = x_ref[0] if shared else _vector(x_ref.at[pl.ds(start, how.rows)], rows)[None, :]
    if w_ref is not None and len(w_ref.shape) == 1:
        w_factor = w_ref[expert]
    elif w_ref is not None:
        w_factor = _vector(w_ref.at[expert, pl.ds(first, how.outputs)], own)[:, None]
    if x_factor is None or w_factor is None:
        return w_factor if x_factor is None else x_factor
    return x_factor * w_factor


def _vector(ref, mask):
    return ref[...] if mask is None else plt.load(ref, mask=mask, other=0.0)


def inside(start, size, stop, *, exact: bool = False):
    """Which of `size` indices from `start` are below `stop`; None if it is known that all are."""
    return None if exact else start + jnp.arange(size, dtype=jnp.int32) < stop


def both(rows, columns, shape):
    """The mask of a tile from those of its rows and columns; None if there is neither."""
    if rows is None and columns is None:
        return None
    rows = jnp.ones(shape[0], bool) if rows is None else rows
    columns = jnp.ones(shape[1], bool) if columns is None else columns
    return rows[:, None] & columns[None, :]


def load(ref, rows, columns):
    """A tile, 0 where a mask says that it has no more rows or columns."""
    mask = both(rows, columns, ref.shape)
    return ref[...] if mask is None else plt.load(ref, mask=mask, other=0)
