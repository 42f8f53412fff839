"""Decode attention over the packed cache against float64 sums over values written out by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import debug, packed
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_kv_attention_decode import bench, op, triton, xla
from pallas_kernels.fp4_kv_attention_decode.cases import ATTEND, WRITE, Case
from tests import slow
from trace_jax import formats
from trace_jax.guidance import codec
from trace_jax.guidance.record import Coding
from trace_jax.models import attention, kv_cache

IMPLS = ("xla", "triton_interpret")
SMALL = [case for case in ATTEND if case.small]
NAMED = {case.name: case for case in SMALL}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


_attend = jax.jit(op.attention_decode, static_argnames="impl")
_write = jax.jit(op.write, static_argnames=("impl", "record"))


def attend(impl, q, k, v, length, pages=None):
    return _attend(q, k, v, length, impl=impl, page_table_BN=pages)


def write(impl, record, *arrays, pages=None):
    return _write(*arrays, impl=impl, record=record, page_table_BN=pages)


def made(case, seed=0):
    return bench.make(case, seed)


pack = jax.jit(packed.pack, static_argnums=1)


def bytes_as(raw, dtype):
    return np.asarray(raw).view(dtype).astype(np.float32)


def values_by_hand(x: Packed, dtype) -> np.ndarray:
    """What attention sees of a cache: float32 products, rounded by ml_dtypes."""
    scales, factor = np.asarray(x.scales), 1 if x.factor is None else np.asarray(x.factor)
    if x.format.name == "nvfp4":
        scale = bytes_as(scales, ml_dtypes.float8_e4m3fn)
    else:
        scale = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    step = scale.astype(np.float32) * factor
    codes = np.asarray(x.codes)
    if x.format.name == "mxfp8":
        element = bytes_as(codes, ml_dtypes.float8_e4m3fn)
    else:
        element = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)]
    value = element * np.repeat(step, x.format.block, -1)
    return value.astype(np.float32).astype(dtype).astype(np.float64)


def attend_by_hand(q, k, v, length, pages=None):
    """(result, sum of weight |v|), float64: one sequence, head and slot at a time."""
    B, H, K = q.shape
    k_all, v_all = values_by_hand(k, q.dtype), values_by_hand(v, q.dtype)
    out, bound = np.zeros((B, H, K)), np.zeros((B, H, K))
    J, page = k.shape[2], k.shape[1]
    for b in range(B):
        places = [(b, c) for c in range(int(length[b]))]
        if pages is not None:
            places = [(int(pages[b, c // page]), c % page) for _, c in places]
        for h in range(H):
            if not places:
                continue
            rows = [(*place, h // (H // J)) for place in places]
            keys = np.stack([k_all[row][:K] for row in rows])
            values = np.stack([v_all[row][:K] for row in rows])
            score = keys @ np.asarray(q[b, h]).astype(np.float64) / np.sqrt(K)
            weight = np.exp(score - score.max())
            weight /= weight.sum()
            out[b, h], bound[b, h] = weight @ values, weight @ np.abs(values)
    return out, bound


SOMETIMES = ("one_slot", "group_of_1", "width_of_16", "no_factor", "mxfp4", "float16", "full")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", slow.all_but(NAMED, SOMETIMES))
def test_attention_decode_equals_sums_by_hand(name, impl):
    case = NAMED[name]
    arguments = made(case)
    got = attend(impl, *arguments)
    assert got.dtype == arguments[0].dtype
    want, bound = attend_by_hand(*arguments)
    # weights and result are rounded to the dtype (half an ulp each); float32: order of sums
    eps = 1e-5 if case.dtype == "float32" else float(jnp.finfo(case.dtype).eps)
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= eps * bound)
    assert np.all(np.asarray(got)[np.asarray(case.length) == 0] == 0)


@pytest.mark.parametrize("page", [None, 8])
def test_xla_attention_decode_in_blocks_equals_sums_by_hand(page, monkeypatch):
    monkeypatch.setattr(xla, "_CPU_VALUES", 3 * 2 * 64 * 16)  # 16 slots at a time: 2.5 blocks
    case = Case(name="", B=3, C=40, J=2, H=4, K=64, lengths=(40, 17, 0), page=page, dtype="float32")
    q, k, v, _, *pages = made(case, 1)
    run = jax.jit(bench.run(case, "xla"))
    for lengths in ((40, 17, 0), (16, 3, 1), (0, 0, 0), (33, 33, 40)):
        arguments = (q, k, v, jnp.array(lengths, jnp.int32), *pages)
        want, bound = attend_by_hand(*arguments)
        got = run(*arguments)
        assert np.all(np.abs(np.asarray(got, np.float64) - want) <= 1e-5 * bound)


@functools.partial(jax.jit, static_argnums=(1, 2))
def library_values(x: Packed, dtype, K):
    stored = codec.SiteRecord(bits=x.codes, scales=x.scales, global_scale=x.factor)
    return kv_cache.decode(stored, x.format, K, dtype)


def drawn_cache(shape, format, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.uniform(-spread, spread, (*shape[:-1], 1))
    return pack(jnp.asarray(rng.normal(size=shape) * sizes, jnp.float32), format)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "format", slow.only(["nvfp4", "nvfp4:global_rule=pow2", "mxfp4", "mxfp8"], ["nvfp4"])
)
def test_of_one_slot_the_result_is_its_value_as_the_library_decodes_it(format, dtype, impl):
    k, v = drawn_cache((3, 2, 2, 64), format), drawn_cache((3, 2, 2, 64), format, 1)
    q = jnp.ones((3, 4, 64), dtype)
    got = attend(impl, q, k, v, jnp.ones(3, jnp.int32))
    want = np.repeat(np.asarray(library_values(v, q.dtype, 64))[:, 0], 2, axis=1)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize(
    "format", slow.only(["nvfp4", "4over6", "mxfp4", "mxfp8", "hif4"], ["nvfp4", "hif4"])
)
def test_xla_attention_decode_is_the_library_s_attention(format):
    k, v = (drawn_cache((2, 50, 2, 64), format, seed, 1.0) for seed in (0, 1))
    q = jnp.asarray(np.random.default_rng(2).normal(size=(2, 8, 64)), jnp.float32)
    length = jnp.array([50, 11], jnp.int32)
    visible = jnp.asarray(np.arange(50)[None, :] < np.asarray(length)[:, None])
    seen = (library_values(x, q.dtype, 64) for x in (k, v))
    want = jax.jit(attention.attend)(q[:, None], *seen, visible[:, None])[:, 0]
    got = attend("xla", q, k, v, length)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("format", slow.all_but(["nvfp4", "mxfp4"], ["mxfp4"]))
def test_what_lies_beyond_the_length_does_not_matter(format, impl):
    case = Case(name="", B=3, C=70, J=2, H=4, K=64, lengths=(0, 33, 69), format=format)
    q, k, v, length = made(case)
    beyond = (jnp.arange(70)[None, :] >= length[:, None])[:, :, None, None]

    def spoilt(x):
        factor = None if x.factor is None else jnp.where(beyond, jnp.nan, x.factor)
        scales = jnp.where(beyond, jnp.uint8(0x7F if format == "nvfp4" else 0xFF), x.scales)
        return dataclasses.replace(x, scales=scales, factor=factor)

    want = attend(impl, q, k, v, length)
    got = attend(impl, q, spoilt(k), spoilt(v), length)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("impl", IMPLS)
def test_shuffled_pages_equal_a_contiguous_cache(impl):
    case = Case(name="", B=3, C=96, J=2, H=4, K=64, lengths=(0, 30, 96), page=8)
    q, k, v, length, pages = made(case)
    table = np.asarray(pages)

    def gathered(leaf):
        return jnp.asarray(np.asarray(leaf)[table].reshape(3, 96, *leaf.shape[2:]))

    want = attend(impl, q, *jax.tree.map(gathered, (k, v)), length)
    np.testing.assert_array_equal(attend(impl, q, k, v, length, pages), want)
    # a sequence has no pages where it has no slots
    unused = np.arange(12)[None, :] * 8 >= np.asarray(length)[:, None]
    for nonsense in (-7, 10**8):
        table = jnp.asarray(np.where(unused, nonsense, pages), jnp.int32)
        np.testing.assert_array_equal(attend(impl, q, k, v, length, table), want)


def test_xla_attention_decode_needs_less_memory_than_a_decoded_cache():
    case = Case(name="", B=8, C=2048, J=2, H=4, K=128)
    leaves, tree = jax.tree.flatten(made(case))
    run = jax.jit(lambda *leaves: bench.run(case, "xla")(*jax.tree.unflatten(tree, leaves)))
    memory = run.lower(*leaves).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2048 * 2 * 128 * 4 / 2  # half of K in float32


@pytest.mark.parametrize(("heads", "C"), [(64 * 4, 4096), (4, 32768), (4 * 4, 32768), (1, 100)])
def test_splits_fill_an_h200_unless_there_are_too_few_slots(heads, C):
    splits = triton._splits(heads, C)
    assert heads * splits >= 4 * 132 or splits == -(-C // 256)


def test_attention_decode_has_no_gradient():
    q, k, v, length = made(SMALL[2])
    for impl in IMPLS:
        run = functools.partial(op.attention_decode, k=k, v=v, length_B=length, impl=impl)
        with pytest.raises(NotImplementedError, match="codes have no gradient"):
            jax.grad(lambda q, run=run: jnp.sum(run(q)))(q)
    with pytest.raises(NotImplementedError, match="codes have no gradient"):
        x = jnp.ones((3, 2, 64), jnp.float32)
        cache = empty((3, 4, 2, 64), "nvfp4")
        slot = jnp.zeros(3, jnp.int32)
        jax.jvp(lambda x: op.write(cache, cache, x, x, slot, impl="xla", record=None), (x,), (x,))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [-1, 5])
def test_a_page_that_does_not_exist_is_not_written(page, impl):
    cache, x = empty((5, 4, 2, 64), "nvfp4"), jnp.ones((2, 2, 64), jnp.float32)
    table, slots = jnp.full((2, 3), page, jnp.int32), jnp.asarray([0, 9], jnp.int32)
    k, v, _ = op.write(cache, cache, x, x, slots, impl=impl, record=None, page_table_BN=table)
    for leaf, old in zip(jax.tree.leaves((k, v)), jax.tree.leaves((cache, cache)), strict=True):
        np.testing.assert_array_equal(leaf, old)


def empty(shape, format) -> Packed:
    return pack(jnp.zeros(shape, jnp.float32), format)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def hard_rows(B, J, K, dtype):
    """Normals of unlike size, with ties, zeros, one outlier, NaN, Inf and subnormals."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(B, J, K)) * 2.0 ** rng.integers(-8, 8, (B, J, 1))
    x[0, 0, :16] = 0
    x[0, 1] = np.resize([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5], K)
    x[1, 0, 3], x[1, 1] = 1e30, 0
    x[2, 0, 5], x[2, 1, 7], x[3, 0] = np.nan, np.inf, 1e-40
    x[3, 1] = 2.0**100 * rng.normal(size=K)
    return jnp.asarray(x, jnp.float32).astype(dtype)


FORMATS = ["nvfp4", "nvfp4:global_rule=pow2", "nvfp4:global_rule=one", "4over6", "mxfp4"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "format", slow.only([*FORMATS, "mxfp4:rule=even"], ["nvfp4", "nvfp4:global_rule=one"])
)
def test_write_stores_what_the_library_would_and_nothing_else(format, impl):
    format = formats.get(format)
    k, v = hard_rows(4, 2, 50, "bfloat16"), hard_rows(4, 2, 50, "bfloat16")[::-1]
    slot = jnp.array([0, 3, 5, 2], jnp.int32)
    caches = [drawn_cache((4, 6, 2, 50), format, seed) for seed in (0, 1)]
    *got, record = write(impl, None, *caches, k, v, slot)
    assert record is None
    for cache, x, new in zip(caches, (k, v), got, strict=True):
        kept = jax.jit(kv_cache.encode, static_argnums=1)(x, format)
        want = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
        for old, row in zip(want, jax.tree.leaves(kept), strict=True):
            old[np.arange(4), slot] = row
        assert new.format == format
        same(new, want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("record", ["codes", "mantissa"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_write_records_what_the_codec_would(format, record, impl):
    format = formats.get(format)
    k, v = hard_rows(4, 2, 64, "float32"), hard_rows(4, 2, 64, "float32")[::-1]
    cache = empty((4, 3, 2, 64), format)
    _, _, got = write(impl, record, cache, cache, k, v, jnp.zeros(4, jnp.int32))

    @jax.jit
    def recorded(k, v):
        cached = {"k": kv_cache.encode(k, format), "v": kv_cache.encode(v, format)}
        return kv_cache.record(cached, format, Coding(kind=record))

    want = recorded(k, v)
    for mine, theirs in zip(got, (want["k"], want["v"]), strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", [case for case in WRITE if case.small], ids=lambda case: case.name)
def test_write_then_attend_sees_the_new_token(case, impl):
    cache_k, cache_v, k, v, slot, *pages = made(case, 3)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    pages = pages[0] if pages else None
    new_k, new_v, record = write(impl, case.record, cache_k, cache_v, k, v, slot, pages=pages)
    assert (record is None) == (case.record is None)
    # a query that is far along the new key reads the new value
    seen = library_values(pack(k, case.format), jnp.float32, case.K)
    q = seen * (1e4 / jnp.sum(seen * seen, axis=-1, keepdims=True))
    alone = jnp.where(slot == 0)[0]
    got = attend("xla", q, new_k, new_v, slot + 1, pages)
    want = np.asarray(library_values(pack(v, case.format), jnp.float32, case.K))
    np.testing.assert_array_equal(np.asarray(got)[alone], want[alone])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [None, 4])
def test_write_to_a_slot_that_does_not_exist_changes_nothing(page, impl):
    cache = drawn_cache((2, 8, 1, 32) if page is None else (4, page, 1, 32), "nvfp4")
    pages = None if page is None else jnp.array([[3, 0], [2, 1]], jnp.int32)
    x = jnp.ones((2, 1, 32), jnp.bfloat16)
    for slots in ((-1, 8), (-9, 100)):
        slot = jnp.array(slots, jnp.int32)
        new_k, new_v, _ = write(impl, None, cache, cache, x, x, slot, pages=pages)
        for got in (new_k, new_v):
            same(got, cache)


def fields(case=SMALL[2]):
    q, k, v, length, *pages = made(case)
    found = {"q_BHK": q, "k": k, "v": v, "length_B": length}
    return found | ({"page_table_BN": pages[0]} if pages else {})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda a: {"q_BHK": a["q_BHK"].astype(jnp.int32)}, TypeError, "q_BHK: dtype: got int32"),
        (lambda a: {"q_BHK": a["q_BHK"][:, :7]}, ValueError, "heads of q: got 7, need a multiple"),
        (lambda a: {"q_BHK": a["q_BHK"][..., :48]}, ValueError, "last axis of q_BHK: got 48"),
        (lambda a: {"q_BHK": a["q_BHK"][:2]}, ValueError, "sequences of the cache: got 6, need 2"),
        (lambda a: {"length_B": a["length_B"][:2]}, ValueError, "length_B: shape"),
        (lambda a: {"length_B": a["length_B"].astype(jnp.int16)}, TypeError, "length_B: dtype"),
        (lambda a: {"v": dataclasses.replace(a["v"], factor=None)}, ValueError, "factors"),
        (lambda a: {"v": jax.tree.map(lambda x: x[:, :3], a["v"])}, ValueError, "shape of v"),
        (lambda a: {"k": jax.tree.map(lambda x: x[0], a["k"])}, ValueError, "k: shape"),
        (
            lambda a: {"k": dataclasses.replace(a["k"], codes=a["k"].codes[..., :-1])},
            ValueError,
            "k.codes: shape",
        ),
        (
            lambda a: {"v": dataclasses.replace(a["v"], format=formats.get("4over6"))},
            ValueError,
            "format of v",
        ),
        (
            lambda a: {"page_table_BN": jnp.zeros((2, 3), jnp.int32)},
            ValueError,
            "sequences of the page_table_BN: got 2, need 6",
        ),
        (lambda a: {"impl": "fast"}, ValueError, "impl: got 'fast'"),
        (lambda a: {"impl": "mosaic_gpu"}, NotImplementedError, "no such kernel"),
        (lambda a: {"impl": "triton"}, NotImplementedError, "capability 9.0"),
    ],
)
def test_attention_decode_refuses_with_the_name_of_the_argument(change, error, match):
    arguments = fields()
    with pytest.raises(error, match=match):
        unchecked(op.attention_decode)(**({"impl": "xla"} | arguments | change(arguments)))


def unchecked(f):
    """The function without jaxtyping's checks, which would be faster to refuse."""
    return getattr(f, "__wrapped__", f)


def test_triton_refuses_a_format_that_it_cannot_decode_or_round_to():
    hif4, mxfp8 = empty((2, 3, 1, 64), "hif4"), empty((2, 3, 1, 64), "mxfp8")
    x, slot = jnp.ones((2, 1, 64), jnp.float32), jnp.zeros(2, jnp.int32)
    with pytest.raises(NotImplementedError, match="cannot decode the cache in hif4"):
        op.attention_decode(x, hif4, hif4, slot, impl="triton_interpret")
    with pytest.raises(NotImplementedError, match="kernels round to nvfp4 and mxfp4"):
        op.write(mxfp8, mxfp8, x, x, slot, impl="triton_interpret", record=None)
    with pytest.raises(ValueError, match="record: got 'bits', need one of"):
        op.write(mxfp8, mxfp8, x, x, slot, impl="xla", record="bits")


PAGED = NAMED["paged"]


@pytest.mark.parametrize(
    ("case", "change", "match"),
    [
        (SMALL[2], {"length_B": [0, 1, 37, 64, 65, 131]}, "length_B: got 0 to 131, need 0 to 130"),
        (SMALL[2], {"length_B": [-1, 1, 37, 64, 65, 2]}, "length_B: got -1 to 65, need 0"),
        (PAGED, {"page_table_BN": np.full((4, 6), 24)}, "got page 24, need 0 to 23"),
        (PAGED, {"page_table_BN": np.full((4, 6), -1)}, "got page -1, need 0 to 23"),
        (PAGED, {"nan": "k"}, r"k.scales: got NaN in \d+ slots"),
        (SMALL[2], {"nan": "v"}, r"v.scales: got NaN in 297 slots"),
    ],
)
def test_debug_mode_names_bad_values_and_nothing_happens_without(case, change, match):
    arguments = fields(case)
    for name, value in change.items():
        if name == "nan":
            bad = dataclasses.replace(arguments[value], scales=arguments[value].scales | 0x7F)
            arguments[value] = bad
        else:
            arguments[name] = jnp.asarray(value, jnp.int32)
    assert _attend(**arguments, impl="xla").shape == arguments["q_BHK"].shape
    run = debug.checked(functools.partial(op.attention_decode, impl="xla"))
    with pytest.raises(ValueError, match=match):
        run(**arguments)
    run(**fields(case))


def test_debug_mode_names_slots_and_pages_that_cannot_be_written():
    cache, x = empty((4, 8, 1, 32), "nvfp4"), jnp.ones((2, 1, 32), jnp.float32)
    pages = jnp.array([[3, 0], [2, 9]], jnp.int32)
    run = debug.checked(functools.partial(op.write, impl="xla", record=None))
    run(cache, cache, x, x, jnp.array([15, 7], jnp.int32), page_table_BN=pages)
    with pytest.raises(ValueError, match="got 3 to 16, need 0 to 15"):
        run(cache, cache, x, x, jnp.array([3, 16], jnp.int32), page_table_BN=pages)
    with pytest.raises(ValueError, match="got page 9, need 0 to 3"):
        run(cache, cache, x, x, jnp.array([3, 8], jnp.int32), page_table_BN=pages)
