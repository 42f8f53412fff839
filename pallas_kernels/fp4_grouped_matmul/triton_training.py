"""`grouped_matmul` and its two backward products as Pallas-Triton kernels.

y and dx come from one kernel: a program owns a tile of columns of the result and a tile of rows of
one group, and reads the group's matrix as it is (y) or transposed (dx). For dw a program owns a
tile of one group's matrix and runs over the group's rows; one without rows writes zeros.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.fp4_grouped_matmul import schedule
from pallas_kernels.fp4_grouped_matmul.triton import both, inside, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of one program."""

    columns: int  # of the result: M of the tensor cores (dw: rows of the matrix)
    rows: int  # of x: N of the tensor cores (dw: columns of the matrix)
    step: int  # of the summed axis
    warps: int
    stages: int  # loads in flight


def config(mean: int, dtype: jax.typing.DTypeLike) -> Config:
    """Tiles by the rows of a mean group; by registers and shared memory, timed on no device.

    float32 has no exact tensor cores: its products are fused multiply-adds, in small tiles.
    """
    if dtype == jnp.float32:
        return Config(columns=32, rows=16, step=16, warps=4, stages=2)
    rows = min(128, max(16, pl.next_power_of_2(mean)))
    if rows <= 32:
        return Config(columns=64, rows=rows, step=64, warps=4, stages=4)
    return Config(columns=128, rows=rows, step=64, warps=8, stages=3)


def config_dw(dtype: jax.typing.DTypeLike) -> Config:
    """The same for dw."""
    if dtype == jnp.float32:
        return Config(columns=32, rows=32, step=16, warps=4, stages=2)
    return Config(columns=128, rows=128, step=32, warps=8, stages=3)


def grouped(
    x_MK: Float[Array, "M K"],
    w_EOK: Float[Array, "E O K"],
    sizes_E: Int[Array, " E"],
    block: int,
    *,
    interpret: bool,
) -> Float[Array, "M O"]:
    """See `op.grouped_matmul`."""
    return _rows(x_MK, w_EOK, sizes_E, block, transposed=False, interpret=interpret)


def grouped_backward(
    dy_MO: Float[Array, "M O"],
    x_MK: Float[Array, "M K"],
    w_EOK: Float[Array, "E O K"],
    sizes_E: Int[Array, " E"],
    block: int,
    *,
    interpret: bool,
) -> tuple[Float[Array, "M K"], Float[Array, "E O K"]]:
    """dx and dw."""
    dx_MK = _rows(dy_MO, w_EOK, sizes_E, block, transposed=True, interpret=interpret)
    return dx_MK, _matrices(dy_MO, x_MK, sizes_E, interpret=interpret)


def _rows(x, w, sizes_E, block, *, transposed, interpret):
    """x[m] w[e]^T, or x[m] w[e] if `transposed`."""
    rows, groups = len(x), len(w)
    columns = w.shape[2 if transposed else 1]
    if rows == 0 or columns == 0 or groups == 0:
        return jnp.zeros((rows, columns), x.dtype)
    how = config(max(block, rows // groups), x.dtype)
    cut = schedule.cut(sizes_E, rows=rows, size=how.rows, block=block, rest=True)
    call = pl.pallas_call(
        functools.partial(_rows_kernel, how=how, transposed=transposed),
        grid=(pl.cdiv(columns, how.columns), len(cut.group_T)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        interpret=interpret,
        name="grouped_matmul_dx" if transposed else "grouped_matmul",
    )
    return call(cut.group_T, cut.start_T, cut.stop_T, x, w)


def _rows_kernel(group_ref, start_ref, stop_ref, x_ref, w_ref, y_ref, *, how, transposed):
    groups, columns, depth = w_ref.shape[0], y_ref.shape[1], x_ref.shape[1]
    first, tile = pl.program_id(0) * how.columns, pl.program_id(1)
    start, stop = start_ref[tile], stop_ref[tile]
    own = inside(first, how.columns, columns, exact=columns % how.columns == 0)
    rows = inside(start, how.rows, stop)

    @pl.when(start < stop)
    def _():
        group = group_ref[tile]
        expert = jnp.minimum(group, groups - 1)  # rows past the last group: no steps, so zeros

        def step(i, total):
            at = pl.ds(i * how.step, how.step)
            there = inside(i * how.step, how.step, depth, exact=depth % how.step == 0)
            mine = pl.ds(first, how.columns)
            if transposed:
                left = load(w_ref.at[expert, at, mine], there, own).T
            else:
                left = load(w_ref.at[expert, mine, at], own, there)
            x = load(x_ref.at[pl.ds(start, how.rows), at], rows, there)
            return total + _dot(left, x.T)

        steps = (group < groups).astype(jnp.int32) * pl.cdiv(depth, how.step)
        zeros = jnp.zeros((how.columns, how.rows), jnp.float32)
        total = jax.lax.fori_loop(0, steps, step, zeros)
        out = y_ref.at[pl.ds(start, how.rows), pl.ds(first, how.columns)]
        plt.store(out, total.T.astype(y_ref.dtype), mask=both(rows, own, out.shape))


def _matrices(dy, x, sizes_E, *, interpret):
    """dw[e] = sum over the rows of e of dy^T x."""
    groups, outputs, depth = len(sizes_E), dy.shape[1], x.shape[1]
    if 0 in (len(x), groups, outputs, depth):
        return jnp.zeros((groups, outputs, depth), x.dtype)
    how = config_dw(x.dtype)
    begin_E, end_E = schedule.ranges(sizes_E, len(x))
    call = pl.pallas_call(
        functools.partial(_matrices_kernel, how=how),
        grid=(pl.cdiv(depth, how.rows), pl.cdiv(outputs, how.columns), groups),
        out_shape=jax.ShapeDtypeStruct((groups, outputs, depth), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        interpret=interpret,
        name="grouped_matmul_dw",
    )
    return call(begin_E, end_E, dy, x)


def _matrices_kernel(begin_ref, end_ref, dy_ref, x_ref, dw_ref, *, how):
    outputs, depth = dw_ref.shape[1:]
    right, first, group = (pl.program_id(axis) for axis in range(3))
    right, first = right * how.rows, first * how.columns
    begin, end = begin_ref[group], end_ref[group]
    own = inside(first, how.columns, outputs, exact=outputs % how.columns == 0)
    there = inside(right, how.rows, depth, exact=depth % how.rows == 0)

    def step(i, total):
        at = pl.ds(begin + i * how.step, how.step)
        rows = inside(begin + i * how.step, how.step, end)
        dy = load(dy_ref.at[at, pl.ds(first, how.columns)], rows, own)
        x = load(x_ref.at[at, pl.ds(right, how.rows)], rows, there)
        return total + _dot(dy.T, x)

    zeros = jnp.zeros((how.columns, how.rows), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(end - begin, how.step), step, zeros)
    out = dw_ref.at[group, pl.ds(first, how.columns), pl.ds(right, how.rows)]
    plt.store(out, total.astype(dw_ref.dtype), mask=both(own, there, out.shape))


def _dot(a, b):
    precision = "highest" if a.dtype == jnp.float32 else None  # float32: not TF32
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
