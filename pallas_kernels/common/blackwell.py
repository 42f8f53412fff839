"""What surrounds the block-scaled FP4 kernel of Blackwell GPUs: layouts, tiles, index maps, sizes.

Plain functions, so that a CPU can test all of it; `blackwell_mma.py` has the kernel.

The weights are the side of the MMA with its fixed 128 rows, the tokens the side of 32 to 256 rows.
So one token wastes no tensor work that the weights' stream would wait for, a tile has the rows of
one group, and accumulators lie with one output a lane: written out, lanes are neighbours of a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.common.packed import Packed

SIDE = 128  # weight rows of one CTA, and rows of a scale tile
DEPTH = 256  # K of a pipeline stage: 128 bytes of codes in each row
CHUNK = 32  # tokens that are stored at once
BAND = 8  # token tiles that share the weights they read, through the L2 cache
SHARED_MEMORY = 227 * 1024  # bytes a block may have
TENSOR_MEMORY = 512  # columns of 128 lanes of 4 bytes
_FORMATS = ("nvfp4", "mxfp4")
_STORED = ("bfloat16", "float16", "float32")


def tiles_of(n: int, size: int) -> int:
    """Tiles of `size` that cover n."""
    return -(-n // size)


# ------------------------------------------------------------------------------- operands


def refuses(x: Any, w: Packed) -> str | None:
    """Why the kernel cannot multiply these two, or None."""
    if not isinstance(x, Packed):
        return f"its tensor cores multiply packed operands, and x is {x.dtype}"
    if x.format.name != w.format.name or w.format.name not in _FORMATS:
        pair = f"{x.format.name} x {w.format.name}"
        return f"it multiplies nvfp4 x nvfp4 and mxfp4 x mxfp4, not {pair}"
    return None


def swizzle_scales(scales: UInt8[Array, "*A R S"]) -> UInt8[Array, "*A T G 32 16"]:
    """Scale bytes of rows in the order in which tensor memory takes them.

    Math:    out[r // 128, s // 4, r % 32, 4 * (r % 128 // 32) + s % 4] = scales[r, s].
    Returns: rows padded to whole 128 and scales to whole 16, with 0 (so that no copy of the kernel
             starts inside and ends outside); T = ceil(R / 128), G = 4 * ceil(S / 16).
    Source:  PTX ISA, tcgen05.mma, layouts of the scale factors.
    """
    *lead, rows, width = scales.shape
    high, deep = tiles_of(rows, SIDE), 4 * tiles_of(width, 16)
    extra = [(0, 0)] * len(lead) + [(0, high * SIDE - rows), (0, deep * 4 - width)]
    split = jnp.pad(scales, extra).reshape(*lead, high, 4, 32, deep, 4)
    n = len(lead)
    moved = split.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return moved.reshape(*lead, high, deep, 32, 16)


def unswizzle_scales(
    swizzled: UInt8[Array, "*A T G 32 16"], rows: int, width: int
) -> UInt8[Array, "*A R S"]:
    """Inverse of `swizzle_scales`, without its padding."""
    *lead, high, deep, _, _ = swizzled.shape
    n = len(lead)
    split = swizzled.reshape(*lead, high, deep, 32, 4, 4)
    moved = split.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return moved.reshape(*lead, high * SIDE, deep * 4)[..., :rows, :width]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """What the kernel reads. Rows of `w` are those of all groups, one below the other."""

    schedule: Int[Array, "3 T"]  # of each tile of tokens: group, first row, rows
    used: Int[Array, " 1"]  # tiles in use, the first ones
    w: UInt8[Array, "R P"]
    w_scales: UInt8[Array, "Y G 32 16"]
    w_factor: Float[Array, " F"]  # of a group after the last one too: 0
    x: UInt8[Array, "M P"]
    x_scales: UInt8[Array, "X G 32 16"]  # tile by tile
    x_factor: Float[Array, " N"]  # tile by tile
    block: int


def operands(
    x: Packed,
    w: Packed,
    w_scales: UInt8[Array, "E Y G 32 16"] | None,
    group_T: Int[Array, " T"],
    start_T: Int[Array, " T"],
    stop_T: Int[Array, " T"],
    used: Int[Array, ""],
    tiling: "Tiling",
) -> Operands:
    """Brings packed operands into the kernel's form.

    Codes stay where they are, unless K is an odd number of NVFP4 blocks. The scales of x are copied
    tile by tile, rows padded to 128 a tile, 1/8 of the codes' bytes (x4 in tiles of 32); those of w
    are rearranged here on each call (1/8 of its codes read and written) if `w_scales`, which is
    `swizzle_scales(w.scales)`, is not handed in.
    Args: w: (E, O, K). group_T: E for rows of no group; such tiles come out as 0.
    """
    experts, outputs, _ = w.shape
    if w_scales is None:
        w_scales = swizzle_scales(w.scales)
    w_factor = jnp.float32(1) if w.factor is None else w.factor[..., 0]
    padded = tiles_of(outputs, tiling.side) * tiling.side
    w_factor = jnp.broadcast_to(w_factor, (experts, outputs))
    w_factor = jnp.pad(w_factor, [(0, 1), (0, padded - outputs)])
    rows = x.shape[0]
    row_TN = start_T[:, None] + jnp.arange(tiling.tokens, dtype=jnp.int32)[None, :]
    live_TN = (row_TN < stop_T[:, None]) & (group_T < experts)[:, None]
    row_TN = jnp.minimum(row_TN, rows - 1)
    x_scales = jnp.where(live_TN[..., None], x.scales[row_TN], jnp.uint8(0))
    factor_M = jnp.float32(1) if x.factor is None else x.factor[:, 0]
    factor_M = jnp.broadcast_to(factor_M, (rows,))
    return Operands(
        schedule=jnp.stack([group_T, start_T, stop_T - start_T]).astype(jnp.int32),
        used=used.reshape(1).astype(jnp.int32),
        w=_aligned(w.codes.reshape(experts * outputs, -1)),
        w_scales=w_scales.reshape(-1, *w_scales.shape[2:]),
        w_factor=w_factor.reshape(-1),
        x=_aligned(x.codes),
        x_scales=(s := swizzle_scales(x_scales)).reshape(-1, *s.shape[2:]),
        x_factor=jnp.where(live_TN, factor_M[row_TN], jnp.float32(0)).reshape(-1),
        block=w.format.block,
    )


def _aligned(codes: UInt8[Array, "R P"]) -> UInt8[Array, "R Q"]:
    """Rows of a multiple of 16 bytes: what TMA can step over."""
    extra = -codes.shape[1] % 16
    return jnp.pad(codes, [(0, 0), (0, extra)]) if extra else codes


# ---------------------------------------------------------------------------------- tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the work is cut; sizes that fit both memories with a float32 result."""

    tokens: int  # rows of x in a tile: 32, 64, 128, or 256 of a pair
    pair: bool  # two CTAs share a tile: each loads half of the tokens and its own 128 outputs
    stages: int  # of the ring in shared memory
    slots: int  # accumulators: with two, a tile is stored while the next one is computed

    @property
    def side(self) -> int:
        """Outputs of a tile."""
        return SIDE * (2 if self.pair else 1)


_TILINGS = (
    Tiling(tokens=32, pair=False, stages=8, slots=2),
    Tiling(tokens=64, pair=False, stages=6, slots=2),
    Tiling(tokens=128, pair=False, stages=5, slots=2),
    Tiling(tokens=256, pair=True, stages=5, slots=1),  # tensor memory has no room for two slots
)


def tiling(rows: int, groups: int, outputs: int) -> Tiling:
    """The tiling for rows that fall into groups of unknown sizes.

    By their mean: tiles of 32 up to 24 rows a group, of 256 from 192 on. Pairs need 256 outputs.
    """
    mean = tiles_of(rows, groups)
    fits = [t for t in _TILINGS if outputs >= t.side]
    return next((t for t in fits if mean * 4 <= t.tokens * 3), (fits or _TILINGS)[-1])


def dense_schedule(rows: int, tokens: int) -> tuple[Array, Array, Array, Array]:
    """(group, start, stop, used) of the tiles of one group that has all rows."""
    start_T = jnp.arange(tiles_of(rows, tokens), dtype=jnp.int32) * tokens
    stop_T = jnp.minimum(start_T + tokens, rows)
    return jnp.zeros_like(start_T), start_T, stop_T, jnp.int32(len(start_T))


def work_item(
    at: Int[Array, ""], used: Int[Array, ""], o_tiles: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """(tile of tokens, tile of outputs) of one number in [0, used * o_tiles).

    In bands of `BAND` tiles of tokens, which take one tile of outputs after the other: what runs at
    a time reads few different rows of either side.
    """
    whole = jnp.int32(BAND * o_tiles)
    first = jax.lax.div(at, whole) * BAND
    high = jnp.minimum(used - first, BAND)
    inside = jax.lax.rem(at, whole)
    return first + jax.lax.rem(inside, high), jax.lax.div(inside, high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is static in one kernel, and where each tile reads and writes."""

    tiling: Tiling
    block: int  # values that share a scale: 16 (E4M3) or 32 (E8M0)
    outputs: int  # O
    bytes: int  # of codes in a row
    out_dtype: Any

    @property
    def o_tiles(self) -> int:
        """Tiles of outputs."""
        return tiles_of(self.outputs, self.tiling.side)

    @property
    def padded(self) -> int:
        """O in whole tiles: of the result in memory, and of the factors of a group."""
        return self.o_tiles * self.tiling.side

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return tiles_of(self.bytes, DEPTH // 2)

    @property
    def groups(self) -> int:
        """Groups of four scales along K in a stage."""
        return DEPTH // (4 * self.block)

    @property
    def x_tiles(self) -> int:
        """Scale tiles of 128 rows in a tile of tokens."""
        return tiles_of(self.tiling.tokens, SIDE)

    def depth(self, step: Any) -> tuple[Any, Any]:
        """First byte of codes and first group of scales of a step."""
        return step * (DEPTH // 2), step * self.groups

    def weights(self, expert: Any, o_tile: Any) -> tuple[Any, Any]:
        """First row of codes and first tile of scales of a tile of outputs.

        The last tile may reach into the next group or past the end (zeros): its outputs are cut.
        """
        row = expert * self.outputs + o_tile * self.tiling.side
        tile = expert * tiles_of(self.outputs, SIDE) + o_tile * (self.tiling.side // SIDE)
        return row, tile

    def output(self, o_tile: Any, member: Any) -> Any:
        """First output that a CTA of a pair stores."""
        return o_tile * self.tiling.side + member * SIDE

    def w_factor(self, expert: Any, o_tile: Any, member: Any) -> Any:
        """First of the 128 factors that belong to them."""
        return expert * self.padded + self.output(o_tile, member)

    def x_factor(self, tile: Any, first: int) -> Any:
        """First of the factors of a tile's tokens from `first` on."""
        return tile * self.tiling.tokens + first

    @property
    def shared_memory(self) -> int:
        """Bytes of a CTA's buffers, without barriers."""
        t = self.tiling
        own = t.tokens // (2 if t.pair else 1)
        codes = (SIDE + own) * DEPTH // 2
        scales = (1 + self.x_tiles) * self.groups * 512
        return t.stages * (codes + scales) + 2 * CHUNK * SIDE * jnp.dtype(self.out_dtype).itemsize

    @property
    def tensor_memory(self) -> int:
        """Columns."""
        t = self.tiling
        return t.tokens * t.slots + t.stages * (1 + self.x_tiles) * self.groups * 4


def stored(out_dtype: jax.typing.DTypeLike) -> Any:
    """The dtype that the kernel writes for a result in `out_dtype`; others are cast afterwards."""
    wanted = jnp.dtype(out_dtype)
    return wanted if wanted.name in _STORED else jnp.dtype(jnp.float32)


def epilogue(
    total: Float[Array, "O N"],
    w_factor: Float[Array, "O N"],
    x_factor: Float[Array, "O N"],
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "O N"]:
    """(factor_x * factor_w) * total, rounded once."""
    return ((x_factor * w_factor) * total).astype(dtype)


def pieces(
    live: Int[Array, ""], when: Callable[..., Any], copy: Callable[[Any, int], None]
) -> None:
    """Calls `copy(first row, number)` so that rows [0, live) of a chunk are stored.

    A copy's length is static, so the rows are cut by the bits of their number. `live` below 0 is 0,
    above `CHUNK` is `CHUNK`.
    """
    live = jnp.clip(live, 0, CHUNK)
    first: Any = 0
    size = CHUNK
    while size:
        has = live & size
        when(has != 0)(lambda first=first, size=size: copy(first, size))
        first = first + has
        size //= 2
