"""Cuts sorted rows into tiles of one group each, on device, with a bound on their number.

A group of s rows gives ceil(s / size) tiles, the last of them short. Over M rows and E groups that
is at most M // size + min(E, M) tiles, whatever the split, so the arrays have a static length and
no (M, E) array is needed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles in the order of their rows. Those not in use have no rows and come last."""

    group_T: Int[Array, " T"]
    start_T: Int[Array, " T"]  # first row
    stop_T: Int[Array, " T"]  # past the last row; at most `size` more than `start_T`
    used: Int[Array, ""]  # tiles in use
    first_E: Int[Array, " E"]  # first tile of each group
    count_E: Int[Array, " E"]  # tiles of each group
    size: int = dataclasses.field(metadata={"static": True})  # rows of a whole tile
    whole: bool = dataclasses.field(metadata={"static": True})  # no tile is short


def ranges(group_sizes_E: Int[Array, " E"], rows: int) -> tuple[Int[Array, " E"], Int[Array, " E"]]:
    """First row of each group and the one past its last; inside the `rows`, whatever the sizes.

    What is wrong with sizes is found in debug mode.
    """
    end_E = jnp.minimum(jnp.cumsum(jnp.clip(group_sizes_E, 0, rows)), rows).astype(jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), end_E[:-1]]), end_E


def cut(
    group_sizes_E: Int[Array, " E"], *, rows: int, size: int, block: int, rest: bool = False
) -> Tiles:
    """Cuts `rows` rows into tiles of `size`.

    Args: block: each group's size is a multiple of it. rest: the rows past the last group are
          group E, so that someone writes their zeros; else no tile has them.
    """
    begin_E, end_E = ranges(group_sizes_E, rows)
    if rest:
        begin_E = jnp.concatenate([begin_E, end_E[-1:]])
        end_E = jnp.concatenate([end_E, jnp.full(1, rows, jnp.int32)])
    count_E = -(-(end_E - begin_E) // size)
    last_E = jnp.cumsum(count_E)
    groups = len(end_E)
    most = rows // size + (0 if block % size == 0 else min(groups, rows // block))
    tile_T = jnp.arange(most, dtype=jnp.int32)
    # compared with all at once: the default's loop would take a GPU as long as a small product
    group_T = jnp.minimum(
        jnp.searchsorted(last_E, tile_T, side="right", method="compare_all"), groups - 1
    )
    used_T = tile_T < last_E[-1]
    start_T = begin_E[group_T] + (tile_T - (last_E - count_E)[group_T]) * size
    stop_T = jnp.minimum(start_T + size, end_E[group_T])
    return Tiles(
        group_T=group_T.astype(jnp.int32),
        start_T=jnp.where(used_T, start_T, 0).astype(jnp.int32),
        stop_T=jnp.where(used_T, stop_T, 0).astype(jnp.int32),
        used=last_E[-1].astype(jnp.int32),
        first_E=(last_E - count_E).astype(jnp.int32),
        count_E=count_E.astype(jnp.int32),
        size=size,
        whole=block % size == 0,
    )


def loop_rows(rows: int, groups: int, block: int) -> int:
    """Rows of a tile in a loop over tiles: a block of the layout, or those of a mean group."""
    if block >= 8:
        return block
    mean = 1 << max(rows // groups, 1).bit_length() - 1
    return min(64, max(8, mean), max(rows, 1))
