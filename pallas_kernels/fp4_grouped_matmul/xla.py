"""Grouped matmuls in plain XLA: a loop over tiles of rows, each of one group.

Tiles are cut where groups end (`schedule`), so the loop follows the rows that there are, and no row
is moved. FP4 weights are decoded once for each group that has rows. `lax.ragged_dot` would be
dense over the groups on CPU and in XLA:GPU's default lowering.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import schedule
from pallas_kernels.fp4_grouped_matmul.schedule import Tiles
from pallas_kernels.fp4_matmul import decode, operands


def fp4_grouped(
    x: Packed | Float[Array, "M K"],
    w: Packed,
    group_sizes_E: Int[Array, " E"],
    *,
    block: int,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "M O"]:
    """See `op.fp4_grouped_matmul`."""
    narrow = operands.holds(x, w)
    args = (x, w, _tiles(x.shape[0], group_sizes_E, block))
    total_MO = jax.lax.platform_dependent(
        *args,
        cpu=lambda *args: _fp4_loop(*args, jnp.float32),
        default=lambda *args: _fp4_loop(*args, narrow),
    )
    return total_MO.astype(out_dtype)


def _fp4_loop(x: Any, w: Packed, tiles: Tiles, dtype: Any) -> Float[Array, "M O"]:
    """float32, over the groups that have rows and their tiles."""
    width = operands.width(x, w)
    x_MK = operands.value(x, dtype)[:, :width]
    x_factor = x.factor if isinstance(x, Packed) else None
    order_E = jnp.argsort(tiles.count_E == 0, stable=True)  # groups with rows come first

    def group(i, y_MO):
        e = order_E[i]
        w_OK = decode.of_group(w, e, dtype)[:, :width]
        w_factor = None if w.factor is None else _at(w.factor, e).T

        def tile(t, y_MO):
            total = _dot(_rows(x_MK, tiles, t), w_OK.T, jnp.float32)
            factor = x_factor if x_factor is None or len(x_factor) == 1 else _rows(x_factor, tiles, t)
            return _write(y_MO, operands.scaled(total, factor, w_factor), tiles, t)

        return jax.lax.fori_loop(tiles.first_E[e], tiles.first_E[e] + tiles.count_E[e], tile, y_MO)

    y_MO = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, jnp.sum(tiles.count_E > 0), group, y_MO)


def grouped(x_MK: Array, w_EOK: Array, sizes_E: Array, block: int) -> Float[Array, "M O"]:
    """See `op.grouped_matmul`."""

    def loop(x_MK, w_EOK, tiles):
        def body(t, y_MO):
            w_OK = w_EOK[tiles.group_T[t]]
            return _write(y_MO, _dot(_rows(x_MK, tiles, t), w_OK.T, x_MK.dtype), tiles, t)

        return jax.lax.fori_loop(0, tiles.used, body, jnp.zeros((len(x_MK), w_EOK.shape[1]), x_MK.dtype))

    return _on_cpu_in_float32(loop, x_MK, w_EOK, _tiles(len(x_MK), sizes_E, block))


def grouped_backward(
    dy_MO: Array, x_MK: Array, w_EOK: Array, sizes_E: Array, block: int
) -> tuple[Float[Array, "M K"], Float[Array, "E O K"]]:
    """dx and dw."""

    def loop(dy_MO, x_MK, w_EOK, tiles):
        def body(t, carry):
            dx_MK, dw_EOK = carry
            e = tiles.group_T[t]
            dy, x = _own(dy_MO, tiles, t), _own(x_MK, tiles, t)
            dx_MK = _write(dx_MK, _dot(dy, w_EOK[e], x.dtype), tiles, t)
            return dx_MK, dw_EOK.at[e].add(_dot(dy.T, x, jnp.float32))

        zeros = jnp.zeros_like(x_MK), jnp.zeros(w_EOK.shape, jnp.float32)
        return jax.lax.fori_loop(0, tiles.used, body, zeros)

    return _on_cpu_in_float32(loop, dy_MO, x_MK, w_EOK, _tiles(len(x_MK), sizes_E, block))


def _tiles(rows: int, sizes_E: Array, block: int) -> Tiles:
    size = schedule.loop_rows(rows, len(sizes_E), block)
    return schedule.cut(sizes_E, rows=rows, size=size, block=block)


def _on_cpu_in_float32(loop: Callable[..., Any], *operands: Any) -> Any:
    """Runs a loop of matmuls in the operands' dtype, on CPU in float32.

    XLA:CPU has no fast BF16 matmul inside a loop (measured 10x slower than float32), so there the
    operands are widened before and the results narrowed after it. That changes no result: products
    of BF16 accumulate in float32 and are rounded once, either way.
    """
    dtype = operands[0].dtype

    def widened(*operands: Any) -> Any:
        *arrays, tiles = operands
        return jax.tree.map(
            lambda a: a.astype(dtype), loop(*(a.astype(jnp.float32) for a in arrays), tiles)
        )

    def plain(*operands: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(dtype), loop(*operands))

    return jax.lax.platform_dependent(*operands, cpu=widened, default=plain)


def _dot(a: Array, b: Array, dtype: Any) -> Array:
    precision = "highest" if a.dtype == jnp.float32 else None  # not TF32, not one BF16 pass
    total = jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)
    return total.astype(dtype)


def _at(a: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(a, i if len(a) > 1 else 0, keepdims=False)


def _first(tiles: Tiles, t: Array, rows: int) -> Array:
    """Where the slice of a tile starts: earlier than the tile if that is short and at the end."""
    start = tiles.start_T[t]
    return start if tiles.whole else jnp.minimum(start, rows - tiles.size)


def _rows(a_MK: Array, tiles: Tiles, t: Array) -> Array:
    first = _first(tiles, t, len(a_MK))
    return jax.lax.dynamic_slice_in_dim(a_MK, first, tiles.size)


def _mine(tiles: Tiles, t: Array, rows: int) -> Array:
    row = _first(tiles, t, rows) + jnp.arange(tiles.size, dtype=jnp.int32)
    return ((row >= tiles.start_T[t]) & (row < tiles.stop_T[t]))[:, None]


def _own(a_MK: Array, tiles: Tiles, t: Array) -> Array:
    """Rows of a tile; those that a short one's slice has from its neighbours, NaN or not, are 0."""
    rows_bK = _rows(a_MK, tiles, t)
    return rows_bK if tiles.whole else jnp.where(_mine(tiles, t, len(a_MK)), rows_bK, 0)


def _write(y_MO: Array, rows_bO: Array, tiles: Tiles, t: Array) -> Array:
    first = _first(tiles, t, len(y_MO))
    if not tiles.whole:
        before = jax.lax.dynamic_slice_in_dim(y_MO, first, tiles.size)
        rows_bO = jnp.where(_mine(tiles, t, len(y_MO)), rows_bO, before)
    return jax.lax.dynamic_update_slice_in_dim(y_MO, rows_bO, first, 0)
