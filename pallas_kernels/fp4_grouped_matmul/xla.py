"""Grouped matmuls in plain XLA: a loop over the groups that have rows, and over their tiles.

Tiles are cut where groups end (`schedule`), so the loops follow the rows that there are, and no row
is moved. Weights are decoded, or widened, once for each group that has rows. `lax.ragged_dot` would
be dense over the groups on CPU and in XLA:GPU's default lowering.

Operands are multiplied in float32 on CPU: XLA:CPU has no fast BF16 matmul inside a loop (measured
10x slower). That changes no result: products of BF16 accumulate in float32 and are rounded once,
either way.
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
    width = operands.width(x, w)
    x_factor = x.factor if isinstance(x, Packed) else None

    def loop(x, w, tiles, wide):
        x_MK = decode.value(x, wide)[:, :width]

        def group(e, y_MO):
            w_OK = decode.of_group(w, e, wide)[:, :width]
            w_factor = None if w.factor is None else w.factor[e if len(w.factor) > 1 else 0].T

            def tile(t, y_MO):
                total = _dot(_rows(x_MK, tiles, t), w_OK.T)
                factor = x_factor
                if factor is not None and len(factor) > 1:
                    factor = _rows(factor, tiles, t)
                y_bO = operands.scaled(total, factor, w_factor).astype(out_dtype)
                return _write(y_MO, y_bO, tiles, t)

            return _over_tiles(tiles, e, tile, y_MO)

        y_MO = jnp.zeros((x.shape[0], w.shape[1]), out_dtype)
        return _floats(_over_groups(tiles, group, _bits(y_MO)), out_dtype)

    args = x, w, _tiles(x.shape[0], group_sizes_E, block)
    return _where_it_runs(loop, *args, narrow=operands.holds(x, w))


def grouped(
    x_MK: Float[Array, "M K"], w_EOK: Float[Array, "E O K"], sizes_E: Int[Array, " E"], block: int
) -> Float[Array, "M O"]:
    """See `op.grouped_matmul`."""

    def loop(x_MK, w_EOK, tiles, wide):
        wide_MK = x_MK.astype(wide)

        def group(e, y_MO):
            w_OK = _matrix(w_EOK, e).astype(wide)

            def tile(t, y_MO):
                y_bO = _dot(_rows(wide_MK, tiles, t), w_OK.T)
                return _write(y_MO, y_bO.astype(x_MK.dtype), tiles, t)

            return _over_tiles(tiles, e, tile, y_MO)

        y_MO = jnp.zeros((len(x_MK), w_EOK.shape[1]), x_MK.dtype)
        return _floats(_over_groups(tiles, group, _bits(y_MO)), x_MK.dtype)

    args = x_MK, w_EOK, _tiles(len(x_MK), sizes_E, block)
    return _where_it_runs(loop, *args, narrow=x_MK.dtype)


def grouped_backward(
    dy_MO: Float[Array, "M O"],
    x_MK: Float[Array, "M K"],
    w_EOK: Float[Array, "E O K"],
    sizes_E: Int[Array, " E"],
    block: int,
) -> tuple[Float[Array, "M K"], Float[Array, "E O K"]]:
    """dx and dw."""

    def loop(dy_MO, x_MK, w_EOK, tiles, wide):
        dtype = x_MK.dtype
        wide_MO, wide_MK = dy_MO.astype(wide), x_MK.astype(wide)

        def group(e, carry):
            w_OK = _matrix(w_EOK, e).astype(wide)

            def tile(t, carry):
                dx_MK, total_OK = carry
                dy, x = _own(wide_MO, tiles, t), _own(wide_MK, tiles, t)
                dx_bK = _dot(dy, w_OK).astype(dtype)
                return _write(dx_MK, dx_bK, tiles, t), total_OK + _dot(dy.T, x)

            dx_MK, dw_EOK = carry
            inner = dx_MK, jnp.zeros(w_OK.shape, jnp.float32)
            dx_MK, total_OK = _over_tiles(tiles, e, tile, inner)
            return dx_MK, dw_EOK.at[e].set(_bits(total_OK.astype(dtype)))

        zeros = _bits(jnp.zeros_like(x_MK)), _bits(jnp.zeros_like(w_EOK))
        dx_MK, dw_EOK = _over_groups(tiles, group, zeros)
        return _floats(dx_MK, dtype), _floats(dw_EOK, dtype)

    args = dy_MO, x_MK, w_EOK, _tiles(len(x_MK), sizes_E, block)
    return _where_it_runs(loop, *args, narrow=x_MK.dtype)


def _tiles(rows: int, sizes_E: Array, block: int) -> Tiles:
    size = schedule.loop_rows(rows, len(sizes_E), block)
    return schedule.cut(sizes_E, rows=rows, size=size, block=block)


def _where_it_runs(loop: Callable[..., Any], *args: Any, narrow: Any) -> Any:
    """loop(*args, dtype of the products)."""
    return jax.lax.platform_dependent(
        *args,
        cpu=lambda *args: loop(*args, jnp.float32),
        default=lambda *args: loop(*args, narrow),
    )


def _over_groups(tiles: Tiles, body: Callable[..., Any], carry: Any) -> Any:
    """body(group, carry) for each group that has rows."""
    if len(tiles.group_T) == 0:
        return carry
    order_E = jnp.argsort(tiles.count_E == 0, stable=True)
    used = jnp.sum(tiles.count_E > 0)
    return jax.lax.fori_loop(0, used, lambda i, carry: body(order_E[i], carry), carry)


def _over_tiles(tiles: Tiles, e: Array, body: Callable[..., Any], carry: Any) -> Any:
    """body(tile, carry) for each tile of a group."""
    first = tiles.first_E[e]
    return jax.lax.fori_loop(first, first + tiles.count_E[e], body, carry)


def _dot(a: Array, b: Array) -> Array:
    precision = "highest" if a.dtype == jnp.float32 else None  # not TF32, not one BF16 pass
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)


def _bits(a: Array) -> Array:
    """16-bit floats as integers: to slice or update BF16 arrays, XLA:CPU widens all of them."""
    return jax.lax.bitcast_convert_type(a, jnp.uint16) if a.dtype.itemsize == 2 else a


def _floats(a: Array, dtype: Any) -> Array:
    """Inverse of `_bits`."""
    return jax.lax.bitcast_convert_type(a, dtype)


def _matrix(w_EOK: Array, e: Array) -> Array:
    """w[e]. The barrier keeps XLA from making the integers of all groups before the loop."""
    held_EOK, e = jax.lax.optimization_barrier((w_EOK, e))
    return _floats(_bits(held_EOK)[e], w_EOK.dtype)


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
    rows_bO = _bits(rows_bO)
    first = _first(tiles, t, len(y_MO))
    if not tiles.whole:
        before = jax.lax.dynamic_slice_in_dim(y_MO, first, tiles.size)
        rows_bO = jnp.where(_mine(tiles, t, len(y_MO)), rows_bO, before)
    return jax.lax.dynamic_update_slice_in_dim(y_MO, rows_bO, first, 0)
