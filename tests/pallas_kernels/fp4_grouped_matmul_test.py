"""Grouped matmuls: every implementation against numpy in float64, gradients included."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import packed
from pallas_kernels.common.debug import checked
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import bench, op, ref, schedule, triton_decode
from pallas_kernels.fp4_grouped_matmul.cases import CASES, routed
from pallas_kernels.fp4_matmul.op import fp4_matmul
from tests.pallas_kernels import fp4_oracle

SMALL = {case.name: case for case in CASES if case.small and not case.train}
TRAIN = {case.name: case for case in CASES if case.small and case.train}
IMPLS = ("xla", "triton_interpret")
pack = jax.jit(packed.pack, static_argnums=1, static_argnames="global_axes")


def normal(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def ranges(sizes):
    """(group, its rows)."""
    ends = np.cumsum(sizes)
    return [
        (e, slice(end - size, end)) for e, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def take(x, index):
    """Rows of x, or a group of w."""
    if not isinstance(x, Packed):
        return x[index]
    factor = None if x.factor is None else x.factor[index]
    return Packed(codes=x.codes[index], scales=x.scales[index], factor=factor, format=x.format)


@pytest.mark.parametrize("impl", ["ref", *IMPLS])
@pytest.mark.parametrize("name", SMALL)
def test_every_small_case_is_the_product_in_float64(name, impl):
    case = SMALL[name]
    x, w, sizes = bench.make(case, 1)
    f = ref.fp4_grouped_matmul
    if impl != "ref":
        f = functools.partial(op.fp4_grouped_matmul, impl=impl, block=case.block)
    got = np.asarray(jax.jit(functools.partial(f, out_dtype=jnp.float32))(x, w, sizes), np.float64)
    assert got.shape == (case.M, case.outputs)
    for group, rows in ranges(case.sizes):
        want, bound = fp4_oracle.product(take(x, rows), take(w, group))
        # float32 sums of K <= 544 products
        assert np.all(np.abs(got[rows] - want) <= 2e-6 * bound)
        assert np.all(np.any(got[rows] != 0, axis=1))
    assert np.all(got[sum(case.sizes) :] == 0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", TRAIN)
def test_every_training_case_has_the_products_and_gradients_of_float64(name, impl):
    case = TRAIN[name]
    args = bench.make(case, 1)
    run = bench.with_gradients(functools.partial(op.grouped_matmul, impl=impl, block=case.block))
    y, dx, dw = (np.asarray(a, np.float64) for a in jax.jit(run)(*args))
    x, w, _, dy = (np.asarray(a, np.float64) for a in args)
    once = float(jnp.finfo(case.out).eps)  # one rounding to the dtype, half of it
    for e, rows in ranges(case.sizes):
        for got, a, b in (
            (y[rows], x[rows], w[e].T),
            (dx[rows], dy[rows], w[e]),
            (dw[e], dy[rows].T, x[rows]),
        ):
            bound = np.abs(a) @ np.abs(b)
            assert np.all(np.abs(got - a @ b) <= 2e-6 * bound + 0.51 * once * np.abs(a @ b))
    rest = slice(sum(case.sizes), None)
    assert np.all(y[rest] == 0) and np.all(dx[rest] == 0)
    assert np.all(dw[np.asarray(case.sizes) == 0] == 0)


@pytest.mark.parametrize("impl", IMPLS)
def test_neighbours_that_are_nan_do_not_leak(impl):
    sizes = jnp.asarray([3, 0, 2], jnp.int32)
    x, w = normal((9, 16)).at[jnp.asarray([0, 5, 8])].set(jnp.nan), normal((3, 5, 16), 1)
    dy = normal((9, 5), 2).at[5:].set(jnp.nan)
    run = bench.with_gradients(functools.partial(op.grouped_matmul, impl=impl))
    y, dx, dw = jax.jit(run)(x, w, sizes, dy)
    assert np.array_equal(np.isnan(y).any(1), np.arange(9) == 0)
    assert not np.isnan(dx).any()
    assert np.array_equal(np.isnan(dw).any((1, 2)), [True, False, False])
    w4 = pack(w, "nvfp4", global_axes=(-2, -1))
    y = op.fp4_grouped_matmul(pack(x, "nvfp4"), w4, sizes, impl=impl)
    assert np.array_equal(np.isnan(np.asarray(y, np.float32)).any(1), np.arange(9) == 0)
    assert np.all(np.asarray(y, np.float32)[5:] == 0)


def test_a_promised_block_does_not_change_values():
    sizes, w = jnp.asarray([16, 0, 8], jnp.int32), normal((3, 5, 16), 1)
    x = normal((32, 16))
    plain = op.grouped_matmul(x, w, sizes, impl="xla")
    assert np.array_equal(op.grouped_matmul(x, w, sizes, impl="xla", block=8), plain)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("rest", [False, True])
def test_tiles_cover_each_row_once_within_their_bound(size, block, rest):
    random = np.random.default_rng(size + block)
    cut = jax.jit(functools.partial(schedule.cut, rows=160, size=size, block=block, rest=rest))
    for kind in range(12):
        groups = random.multinomial(
            int(random.integers(0, 160 // block + 1)), random.dirichlet([0.3] * 7)
        )
        sizes = groups * block if kind else np.zeros(7, int)
        tiles = cut(jnp.asarray(sizes, jnp.int32))
        owner = np.full(160, -1)
        for group, start, stop in zip(tiles.group_T, tiles.start_T, tiles.stop_T, strict=True):
            assert stop - start <= size and np.all(owner[start:stop] == -1)
            owner[start:stop] = group
        want = np.repeat(np.arange(7), sizes)
        assert np.array_equal(owner[: len(want)], want)
        assert np.all(owner[len(want) :] == (7 if rest else -1))
        count = -(-np.append(sizes, 160 - sum(sizes))[: 8 if rest else 7] // size)
        assert np.array_equal(tiles.count_E, count) and tiles.used == sum(count)
        assert np.array_equal(tiles.first_E, np.cumsum(count) - count)
        assert not tiles.whole or np.all(
            np.asarray(tiles.stop_T - tiles.start_T)[: sum(count)] == size
        )


def test_sizes_that_are_wrong_never_leave_the_rows():
    for sizes in ([300, 2, 5], [-4, 10, 200], [0, 2**30, 2**30]):
        tiles = schedule.cut(jnp.asarray(sizes, jnp.int32), rows=40, size=8, block=1)
        assert np.all((tiles.start_T >= 0) & (tiles.stop_T <= 40))


@pytest.mark.parametrize(
    ("sizes", "block", "says"),
    [
        ([3, -1, 2], 1, "got 1 that are negative or no multiple of block 1"),
        ([4, 0, 9], 4, "got 1 that are negative or no multiple of block 4"),
        ([20, 0, 8], 4, "got 28 rows in all or more, need at most the 24 of x"),
        ([2**30, 2**30, 2**31 - 4], 4, "got 75 rows in all or more"),  # would wrap to less than 0
    ],
)
def test_debug_mode_finds_wrong_group_sizes(sizes, block, says):
    x, w, sizes = normal((24, 16)), normal((3, 5, 16), 1), jnp.asarray(sizes, jnp.int32)
    w4 = pack(w, "nvfp4")
    for run, matrices in ((op.grouped_matmul, w), (op.fp4_grouped_matmul, w4)):
        run = functools.partial(run, impl="xla", block=block)
        checked(run)(x, matrices, jnp.asarray([4, 0, 20], jnp.int32))
        with pytest.raises(ValueError, match=f"{run.func.__name__}: group_sizes_E: {says}"):
            checked(run)(x, matrices, sizes)
        run(x, matrices, sizes)
    grad = jax.grad(lambda x: jnp.sum(op.grouped_matmul(x, w, sizes, impl="xla", block=block)))
    with pytest.raises(ValueError, match="group_sizes_E"):
        checked(grad)(x)


@pytest.mark.parametrize("impl", ["xla", "triton_interpret"])
def test_fp4_products_have_no_gradient_and_say_so(impl):
    """Through codes it would be zero in one implementation and not in another."""
    x, w, sizes = normal((6, 16)), pack(normal((3, 5, 16), 1), "nvfp4"), jnp.full(3, 2, jnp.int32)
    flat = pack(normal((5, 16), 1), "nvfp4")
    for run in (
        lambda x: op.fp4_grouped_matmul(x, w, sizes, impl=impl),
        lambda x: fp4_matmul(x, flat, impl=impl),
    ):
        with pytest.raises(NotImplementedError, match="codes have no gradient"):
            jax.grad(lambda x, run=run: jnp.sum(run(x).astype(jnp.float32)))(x)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.bool_, jnp.float32])
def test_sizes_of_another_dtype_are_refused_since_sums_of_them_are_wrong(monkeypatch, dtype):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    x, w = normal((4, 16)), normal((3, 5, 16), 1)
    with pytest.raises(
        TypeError, match=r"grouped_matmul: group_sizes_E: dtype: got .*, need int32"
    ):
        op.grouped_matmul(x, w, jnp.ones(3, dtype), impl="xla")


def test_operands_that_do_not_fit_are_named(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    x, w, sizes = normal((8, 16)), normal((3, 5, 16), 1), jnp.zeros(3, jnp.int32)
    run = functools.partial(op.grouped_matmul, impl="xla")
    with pytest.raises(TypeError, match="grouped_matmul: dtypes: got float32 and bfloat16"):
        run(x, w.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="grouped_matmul: K: got 16 and 4"):
        run(x, w[..., :4], sizes)
    with pytest.raises(ValueError, match=r"group_sizes_E: shape: got \(2,\), need \(3,\)"):
        run(x, w, sizes[:2])
    with pytest.raises(
        ValueError, match="grouped_matmul: block: got 3, need a divisor of the 8 rows"
    ):
        run(x, w, sizes, block=3)
    with pytest.raises(NotImplementedError, match="grouped_matmul: impl: got mosaic_gpu"):
        op.grouped_matmul(x, w, sizes, impl="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="fp4_grouped_matmul: impl triton: got cpu"):
        op.fp4_grouped_matmul(x, pack(w, "nvfp4"), sizes, impl="triton")
    with pytest.raises(ValueError, match=r"fp4_grouped_matmul: w: shape: got \(5, 16\)"):
        op.fp4_grouped_matmul(x, pack(w[0], "nvfp4"), sizes, impl="xla")


def test_plain_xla_never_holds_an_array_over_all_groups():
    """Neither decoded weights nor rows by groups, in what XLA compiles on CPU."""
    x, w, sizes = normal((37, 48)), normal((11, 20, 48), 1), jnp.ones(11, jnp.int32)
    w4 = pack(w, "nvfp4", global_axes=(-2, -1))
    parts, whole = jax.tree.flatten(w4)
    run = jax.jit(
        lambda x, parts, sizes: op.fp4_grouped_matmul(
            x, jax.tree.unflatten(whole, parts), sizes, impl="xla"
        )
    )
    program = run.lower(x, parts, sizes).compile().as_text()
    assert "[11,20,24]" in program  # the packed weights: shapes are found so
    assert not re.search(r"(f32|bf16)\[11,20,\d+\]|\[37,11\b|\[11,37\b", program)
    narrow, wide = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    run = jax.jit(functools.partial(op.grouped_matmul, impl="xla"))
    program = run.lower(narrow, wide, sizes).compile().as_text()
    # nor the bits of all weights as integers: only inside the fusion that takes one group of them
    assert not re.search(r"= (f32|u16|bf16)\[11,20,48\]\S* (fusion|copy|convert)\(", program)
    train = bench.with_gradients(functools.partial(op.grouped_matmul, impl="xla"))
    program = jax.jit(train).lower(narrow, wide, sizes, narrow[:, :20]).compile().as_text()
    assert "[11,20,48]" in program
    assert not re.search(r"f32\[11,20,\d+\]|\[37,11\b|\[11,37\b", program)


def test_routes_of_the_real_cases_are_eight_a_token():
    for tokens in (1, 16, 64):
        sizes = routed(tokens)
        assert sum(sizes) == 8 * tokens and max(sizes) <= tokens and len(sizes) == 128
    assert all(size % 64 == 0 for size in routed(2048, 64))


def test_benches_are_whole():
    for one in bench.BENCHES:
        got = jax.eval_shape(lambda one=one: one.run("xla")(*one.make(0)))
        assert one.case.startswith("no_row") or min(one.cost.read, one.cost.written) > 0
        if one.small:
            want = jax.eval_shape(lambda one=one: one.reference(*one.make(0)))
            assert jax.tree.map(jnp.shape, want) == jax.tree.map(jnp.shape, got)
        if one.baseline is not None:
            theirs = jax.eval_shape(lambda one=one: one.baseline(*one.baseline_make(0)))
            first, other = jax.tree.leaves(got)[0], jax.tree.leaves(theirs)[0]
            assert (first.shape, first.dtype) == (other.shape, other.dtype)


def test_cost_counts_the_groups_that_have_rows():
    cost = bench.cost(
        SMALL["empty_ends"]
    )  # 14 BF16 rows of 48; 2 of 6 groups of 17 x (24 + 3) bytes
    assert cost.read == 14 * 48 * 2 + 2 * 17 * 27
    assert (cost.written, cost.operations) == (14 * 17 * 4, 2 * 14 * 17 * 48)


def test_peers_agree():
    results = {name: f(*args) for name, (f, args) in bench.peers(8, 64, 4).items()}
    assert {"ours", "lax.ragged_dot", "dense einsum"} <= set(results)
    for result in results.values():
        assert np.allclose(result, results["ours"], rtol=0, atol=1e-3)


def execute(text, registers):
    """Runs straight-line PTX of 32-bit registers: what `triton_decode` uses, from PTX's manual."""

    def value(name):
        return registers[name] if name in registers else int(name, 16 if "x" in name else 10)

    def bf16(bits):
        return np.asarray([bits & 0xFFFF, bits >> 16], np.uint16).view(ml_dtypes.bfloat16)

    for line in text.strip("{}\n").split("\n"):
        name, _, rest = line.rstrip(";").partition(" ")
        if name == ".reg":
            continue
        target, *operands = rest.split(", ")
        a, b, *more = (value(operand) for operand in operands)
        if name == "and.b32":
            result = a & b
        elif name == "shr.u32":
            result = a >> b
        elif name == "shl.b32":
            result = a << b
        elif name == "prmt.b32":
            table = (b << 32) | a
            picks = [more[0] >> (4 * i) & 15 for i in range(4)]
            assert max(picks) < 8  # the fourth bit would replicate a sign
            result = sum((table >> (8 * pick) & 255) << (8 * i) for i, pick in enumerate(picks))
        elif name == "lop3.b32":
            assert more[1] == (0xF0 & 0xCC) | 0xAA
            result = (a & b) | more[0]
        else:
            assert name == "mul.rn.bf16x2"
            low, high = (bf16(a) * bf16(b)).view(np.uint16).tolist()
            result = low | high << 16
        registers[target] = result & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize("plane", [0, 1])
def test_the_ptx_that_decodes_gives_the_value_of_every_nibble(plane):
    random = np.random.default_rng(0)
    codes = random.permutation(np.tile(np.arange(256, dtype=np.uint8), 4)).reshape(-1, 4)
    scales = random.integers(1, 0x7F, codes.shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = scales.astype(ml_dtypes.bfloat16)
    text = triton_decode.ptx(plane)
    for four, by in zip(codes, scales, strict=True):
        words = by.view(np.uint16).astype(int)
        registers = {
            "$2": int.from_bytes(four.tobytes(), "little"),
            "$3": int(words[0] | words[1] << 16),
            "$4": int(words[2] | words[3] << 16),
        }
        done = execute(text, registers)
        raw = np.asarray([done["$0"], done["$1"]], np.uint32).view(ml_dtypes.bfloat16)
        nibble = (four >> (4 * plane)) & 15
        want = nibble.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * by.astype(np.float32)
        assert np.array_equal(raw.astype(np.float32), want)
