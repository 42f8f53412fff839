"""Blackwell's FP4 kernel on the CPU: all of it but the MMA, tile by tile.

No interpreter has the block-scaled MMA, so `emulate` stands in for the kernel: it takes the same
operands, the same tiles, index maps, epilogue and stores, and multiplies in float64. How it finds a
scale in the 32 x 16 bytes of a scale tile is PTX's formula, written out here.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import blackwell, blackwell_mma, device
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import mosaic_gpu as grouped_kernel
from pallas_kernels.fp4_grouped_matmul import op as grouped_op
from pallas_kernels.fp4_matmul import mosaic_gpu as dense_kernel
from pallas_kernels.fp4_matmul import op as dense_op
from trace_jax import formats

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array(MAGNITUDES + [-m for m in MAGNITUDES])
SCALE = {16: ml_dtypes.float8_e4m3fn, 32: ml_dtypes.float8_e8m0fnu}
# float64 sums against float64 sums; the last rounding is to the result's dtype
EXACT, BF16 = 2.0**-23, 2.0**-8


# ------------------------------------------------------------------------------ stand-in


def elements(codes):
    """Values of packed E2M1 codes, low nibble first."""
    codes = np.asarray(codes)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1)
    return E2M1[pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])]


def scale_values(scales, block):
    return np.asarray(scales).view(SCALE[block]).astype(np.float64)


def window(array, starts, sizes):
    """What TMA brings: zeros where the window leaves the array."""
    out = np.zeros(sizes, array.dtype)
    inside = [
        slice(max(0, min(n, start)), max(0, min(n, start + size)))
        for n, start, size in zip(array.shape, starts, sizes, strict=False)
    ]
    shape = tuple(s.stop - s.start for s in inside)
    out[tuple(slice(0, n) for n in shape)] = array[tuple(inside)]
    return out


def in_tensor_memory(scales, rows, width):
    """[row, k // block] of scale tiles (T, G, 32, 16), by PTX's formula."""
    r, s = np.meshgrid(np.arange(rows), np.arange(width), indexing="ij")
    return scales[r // 128, s // 4, r % 32, 4 * (r % 128 // 32) + s % 4]


def emulate(operands, tiling, *, outputs, out_dtype):
    """What `blackwell_mma.run` does, one tile after the other."""
    of = blackwell.Problem(
        tiling=tiling,
        block=operands.block,
        outputs=outputs,
        bytes=operands.w.shape[1],
        out_dtype=blackwell.stored(out_dtype),
    )
    out = np.zeros((operands.x.shape[0], of.padded), of.out_dtype)
    writes = np.zeros(out.shape, np.int32)
    used = operands.used[0]
    for at in range(int(used) * of.o_tiles):
        tile, o_tile = (int(i) for i in blackwell.work_item(jnp.int32(at), used, of.o_tiles))
        place = (tile, o_tile, *(int(i) for i in operands.schedule[:, tile]))
        for member in range(2 if tiling.pair else 1):
            _store(of, place, member, _multiply(of, place, member, operands), operands, out, writes)
    np.testing.assert_array_equal(writes, 1)  # nothing is left out, nothing is written twice
    return jnp.asarray(out[:, :outputs]).astype(out_dtype)


def _multiply(of, place, member, operands):
    tile, o_tile, expert, row, _ = place
    w_row, w_tile = of.weights(expert, o_tile)
    w, x = np.asarray(operands.w), np.asarray(operands.x)
    ws, xs = (scale_values(s, of.block) for s in (operands.w_scales, operands.x_scales))
    total, tokens, count = np.zeros((128, of.tiling.tokens)), of.tiling.tokens, 256 // of.block
    for k in range(of.steps):
        first, group = of.depth(k)
        a = elements(window(w, (w_row + 128 * member, first), (128, 128)))
        b = elements(window(x, (row, first), (tokens, 128)))
        a_tiles = window(ws, (w_tile + member, group), (1, of.groups, 32, 16))
        b_tiles = window(xs, (tile * of.x_tiles, group), (of.x_tiles, of.groups, 32, 16))
        a = a * np.repeat(in_tensor_memory(a_tiles, 128, count), of.block, axis=1)
        b = b * np.repeat(in_tensor_memory(b_tiles, tokens, count), of.block, axis=1)
        total += a @ b.T
    return total


def _store(of, place, member, total, operands, out, writes):
    tile, o_tile, expert, row, rows = place
    at, column = of.w_factor(expert, o_tile, member), of.output(o_tile, member)
    w_factor = operands.w_factor[at : at + 128]
    assert w_factor.shape == (128,)  # plain loads: nothing guards the end of the array
    for first in range(0, of.tiling.tokens, blackwell.CHUNK):
        at = of.x_factor(tile, first)
        x_factor = operands.x_factor[at : at + blackwell.CHUNK]
        part = jnp.asarray(total[:, first : first + blackwell.CHUNK], jnp.float32)
        spread = functools.partial(jnp.broadcast_to, shape=part.shape)
        y = blackwell.epilogue(
            part, spread(w_factor[:, None]), spread(x_factor[None]), of.out_dtype
        )
        smem = np.asarray(y).T

        def copy(start, size, smem=smem, first=first):
            start = int(start)
            to = (
                slice(row + first + start, row + first + start + size),
                slice(column, column + 128),
            )
            out[to] = smem[start : start + size]
            writes[to] += 1

        blackwell.pieces(jnp.int32(rows - first), lambda c: lambda f: bool(c) and f(), copy)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(blackwell_mma, "run", emulate)


def operand(rng, shape, name, *, factor):
    """Random codes and scales; scales of all magnitudes within a few binades, zeros among them."""
    format = formats.get(name)
    *lead, width = shape
    scales = (*lead, width // format.block)
    packed = (*lead, width * format.element.BITS // 8)
    if name == "nvfp4":
        values = rng.integers(0x28, 0x48, scales)
        values = np.where(rng.random(scales) < 0.1, 0, values)
    else:
        values = rng.integers(120, 134, scales)
    return Packed(
        codes=jnp.asarray(rng.integers(0, 256, packed), jnp.uint8),
        scales=jnp.asarray(values, jnp.uint8),
        factor=None if factor is None else jnp.asarray(rng.uniform(0.5, 2, factor), jnp.float32),
        format=format,
    )


def float64(x):
    """(values without factor, factor)."""
    block = x.format.block
    scales = np.repeat(scale_values(x.scales, block), block, axis=-1)
    factor = np.float64(1) if x.factor is None else np.asarray(x.factor, np.float64)
    return elements(x.codes) * scales, factor


def assert_near(got, want, size, tolerance):
    """Within `tolerance` of the sum of magnitudes."""
    error = np.abs(np.asarray(got, np.float64) - want)
    np.testing.assert_array_less(error, tolerance * size + 1e-30)


# -------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(("rows", "width"), [(128, 16), (256, 32), (1, 4), (130, 17), (3, 1)])
def test_swizzle_puts_every_scale_where_tensor_memory_wants_it(rows, width):
    scales = np.arange(rows * width).reshape(rows, width) % 251 + 1
    got = np.asarray(blackwell.swizzle_scales(jnp.asarray(scales, jnp.uint8)))
    want = np.zeros((-(-rows // 128), 4 * -(-width // 16), 32, 16), np.uint8)
    for r in range(rows):
        for s in range(width):
            want[r // 128, s // 4, r % 32, 4 * (r % 128 // 32) + s % 4] = scales[r, s]
    np.testing.assert_array_equal(got, want)
    back = blackwell.unswizzle_scales(jnp.asarray(got), rows, width)
    np.testing.assert_array_equal(back, scales)


def test_swizzle_keeps_leading_axes_apart():
    scales = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 2, 40, 20)), jnp.uint8)
    got = blackwell.swizzle_scales(scales)
    for e in range(3):
        for i in range(2):
            np.testing.assert_array_equal(got[e, i], blackwell.swizzle_scales(scales[e, i]))
    np.testing.assert_array_equal(blackwell.unswizzle_scales(got, 40, 20), scales)


# ------------------------------------------------------------------------------ schedule


@functools.partial(jax.jit, static_argnames="o_tiles")
def work_items(used, o_tiles):
    at = jnp.arange(23 * 12, dtype=jnp.int32)
    return jax.vmap(lambda at: blackwell.work_item(at, used, o_tiles))(at)


@pytest.mark.parametrize("o_tiles", [1, 3, 12])
def test_work_items_are_every_tile_once_and_neighbours_share_weights(o_tiles):
    for used in (1, 2, 7, 8, 9, 16, 23):
        tile, o_tile = work_items(jnp.int32(used), o_tiles)
        pairs = list(zip(tile.tolist(), o_tile.tolist(), strict=True))[: used * o_tiles]
        assert sorted(pairs) == [(t, o) for t in range(used) for o in range(o_tiles)]
        assert {o for _, o in pairs[: min(used, blackwell.BAND)]} == {0}


def test_pieces_store_the_live_rows_once_for_every_number_of_them():
    for live in range(-2, blackwell.CHUNK + 3):
        stored = []

        def copy(start, size, stored=stored):
            stored += range(int(start), int(start) + size)

        blackwell.pieces(jnp.int32(live), lambda c: lambda f: bool(c) and f(), copy)
        assert stored == list(range(min(max(live, 0), blackwell.CHUNK)))


@pytest.mark.parametrize("tiling", blackwell._TILINGS, ids=lambda t: f"{t.tokens} tokens")
@pytest.mark.parametrize("block", [16, 32])
def test_tilings_fit_both_memories(tiling, block):
    of = blackwell.Problem(
        tiling=tiling, block=block, outputs=1536, bytes=1024, out_dtype=jnp.float32
    )
    barriers = 8 * 4 * tiling.stages
    assert of.shared_memory + barriers <= blackwell.SHARED_MEMORY
    assert of.tensor_memory <= blackwell.TENSOR_MEMORY


@pytest.mark.parametrize(
    ("rows", "groups", "outputs", "tokens"),
    [
        (1, 1, 2048, 32),
        (1024, 128, 1536, 32),  # decode: 8 rows an expert
        (32768, 128, 1536, 256),  # prefill: 256
        (4096, 128, 1536, 64),
        (8192, 1, 2048, 256),
        (8192, 1, 128, 128),  # a pair needs 256 outputs
        (96, 1, 2048, 128),
    ],
)
def test_tiles_follow_the_mean_rows_of_a_group(rows, groups, outputs, tokens):
    assert blackwell.tiling(rows, groups, outputs).tokens == tokens


# ------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("rows", "width", "outputs", "name"),
    [
        (1, 256, 128, "nvfp4"),
        (5, 48, 130, "nvfp4"),  # K in the middle of 32 values, O in that of a tile
        (33, 544, 64, "mxfp4"),
        (40, 1280, 96, "mxfp4"),
        (129, 256, 200, "nvfp4"),
        (210, 288, 300, "mxfp4"),  # a pair, its second tile half empty
        (300, 512, 512, "nvfp4"),
    ],
)
def test_dense_tiles_give_the_product(rows, width, outputs, name):
    rng = np.random.default_rng(rows)
    fine = name == "nvfp4"
    x = operand(rng, (rows, width), name, factor=(rows, 1) if fine else None)
    w = operand(rng, (outputs, width), name, factor=(outputs, 1) if fine else (1, 1))
    got = dense_kernel.matmul(x, w, out_dtype=jnp.float32)
    (a, fa), (b, fb) = float64(x), float64(w)
    factor = fa * fb.T
    assert_near(got, factor * (a @ b.T), factor * (np.abs(a) @ np.abs(b).T), 4 * EXACT)
    ahead = blackwell.swizzle_scales(w.scales)
    again = dense_kernel.matmul(x, w, out_dtype=jnp.bfloat16, w_scales=ahead)
    np.testing.assert_array_equal(again, got.astype(jnp.bfloat16))


SIZES = {
    "one row": (101, [0, 0, 1, 0, 0, 0]),
    "empty experts": (101, [0, 20, 0, 0, 81, 0]),
    "short of M": (101, [3, 0, 30, 0, 0, 7]),
    "nothing": (101, [0, 0, 0, 0, 0, 0]),
    "one takes all": (101, [0, 101, 0, 0, 0, 0]),
    "many tiles": (101, [33, 1, 34, 0, 32, 1]),
    "tiles of 64": (90, [65, 24]),
    "pairs": (500, [257, 200]),
}


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("case", SIZES)
def test_grouped_tiles_give_the_product_of_each_group(case, name):
    rows, sizes = SIZES[case]
    outputs, width = (300, 256) if case == "pairs" else (130, 288)
    rng = np.random.default_rng(len(case))
    x = operand(rng, (rows, width), name, factor=(rows, 1))
    experts = (len(sizes), 1, 1) if name == "nvfp4" else (len(sizes), outputs, 1)
    w = operand(rng, (len(sizes), outputs, width), name, factor=experts)
    # rows of no group may hold anything
    past = np.arange(rows)[:, None] >= sum(sizes)
    scales = jnp.where(past, jnp.uint8(0x7F if name == "nvfp4" else 0xFF), x.scales)
    x = Packed(codes=x.codes, scales=scales, factor=x.factor, format=x.format)
    run = functools.partial(grouped_kernel.grouped, x, w, jnp.asarray(sizes, jnp.int32), block=1)
    got = np.asarray(run(out_dtype=jnp.float32))
    (a, fa), (b, fb), first = float64(x), float64(w), 0
    for e, size in enumerate(sizes):
        own = slice(first, first + size)
        factor = fa[own] * np.broadcast_to(fb[e], (outputs, 1)).T
        size_of = factor * (np.abs(a[own]) @ np.abs(b[e]).T)
        assert_near(got[own], factor * (a[own] @ b[e].T), size_of, 4 * EXACT)
        first += size
    np.testing.assert_array_equal(got[first:], 0)
    ahead = blackwell.swizzle_scales(w.scales)
    again = run(out_dtype=jnp.bfloat16, w_scales=ahead)
    np.testing.assert_array_equal(again, got.astype(ml_dtypes.bfloat16))


def test_a_nan_scale_stays_in_its_row():
    rng = np.random.default_rng(1)
    x = operand(rng, (40, 256), "nvfp4", factor=None)
    w = operand(rng, (2, 128, 256), "nvfp4", factor=None)
    bad = Packed(codes=x.codes, scales=x.scales.at[10].set(0x7F), factor=None, format=x.format)
    sizes = jnp.asarray([10, 30], jnp.int32)
    got = grouped_kernel.grouped(bad, w, sizes, block=1, out_dtype=jnp.float32)
    np.testing.assert_array_equal(np.isnan(got).all(axis=1), np.arange(40) == 10)
    assert np.isnan(got).sum() == 128


def test_a_result_of_another_dtype_is_cast_from_float32():
    rng = np.random.default_rng(2)
    x, w = (operand(rng, (n, 256), "mxfp4", factor=None) for n in (3, 128))
    wide = dense_kernel.matmul(x, w, out_dtype=jnp.float32)
    small = dense_kernel.matmul(x, w, out_dtype=jnp.float8_e5m2)
    np.testing.assert_array_equal(small, wide.astype(jnp.float8_e5m2))


def test_no_rows_are_no_work():
    rng = np.random.default_rng(3)
    x = operand(rng, (0, 256), "nvfp4", factor=None)
    w = operand(rng, (2, 128, 256), "nvfp4", factor=None)
    none = jnp.zeros(2, jnp.int32)
    got = grouped_kernel.grouped(x, w, none, block=1, out_dtype=jnp.bfloat16)
    assert got.shape == (0, 128) and got.dtype == jnp.bfloat16
    one = Packed(codes=w.codes[0], scales=w.scales[0], factor=None, format=w.format)
    assert dense_kernel.matmul(x, one, out_dtype=jnp.bfloat16).shape == (0, 128)


# --------------------------------------------------------------------------------- refusal


@pytest.mark.parametrize(
    ("x", "w", "why"),
    [
        ("bf16", "nvfp4", "its tensor cores multiply packed operands, and x is bfloat16"),
        ("mxfp4", "nvfp4", "nvfp4 x nvfp4 and mxfp4 x mxfp4, not mxfp4 x nvfp4"),
        ("mxfp8", "mxfp8", "not mxfp8 x mxfp8"),
        ("mxfp8", "mxfp4", "not mxfp8 x mxfp4"),
    ],
)
def test_other_operands_are_refused_with_the_reason(x, w, why):
    rng = np.random.default_rng(4)

    def make(name, shape):
        if name == "bf16":
            return jnp.zeros(shape, jnp.bfloat16)
        return operand(rng, shape, name, factor=None)

    with device.described("cuda", (10, 0)), pytest.raises(NotImplementedError, match=why):
        dense_op.fp4_matmul(make(x, (2, 64)), make(w, (8, 64)), impl="mosaic_gpu")
    sizes = jnp.asarray([2], jnp.int32)
    with device.described("cuda", (10, 0)), pytest.raises(NotImplementedError, match=why):
        grouped_op.fp4_grouped_matmul(
            make(x, (2, 64)), make(w, (1, 8, 64)), sizes, impl="mosaic_gpu"
        )


def test_hopper_is_refused_before_its_compiler_can_die():
    rng = np.random.default_rng(5)
    x, w = (operand(rng, (n, 256), "nvfp4", factor=None) for n in (3, 128))
    says = r"got cuda of compute capability 9.0, need an NVIDIA GPU of compute capability 10.0"
    with device.described("cuda", (9, 0)), pytest.raises(NotImplementedError, match=says):
        dense_op.fp4_matmul(x, w, impl="mosaic_gpu")
    with device.described("cuda", (10, 0)):
        assert dense_op.fp4_matmul(x, w, impl="mosaic_gpu").shape == (3, 128)
