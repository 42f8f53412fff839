"""Fake quantisation: kernels against `qat.sites`, and all against a bracket searched in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import device
from pallas_kernels.fake_quant import bench, op
from pallas_kernels.fake_quant.cases import CASES
from pallas_kernels.fake_quant.types import Counts, Recorded
from tests.pallas_kernels import quantize_oracle as oracle
from trace_jax import formats
from trace_jax.qat import sites

SMALL = {case.name: case for case in CASES if case.small}
IMPLS = ("xla", "triton_interpret", "mosaic_tpu_interpret")
VALUES = np.concatenate([oracle.E2M1, -oracle.E2M1])  # of the codes 0..15


def inputs(case, seed=3):
    """x, what a rollout recorded of slightly other values (all rows hard), valid, a cotangent."""
    rng = np.random.default_rng(seed)
    x = oracle.hard_rows(case.M, case.K, case.dtype, seed)
    with np.errstate(over="ignore"):
        other = (x.astype(np.float32) * (1 + 0.2 * rng.standard_normal(x.shape))).astype(x.dtype)
    other[-1:] = x[-1:]
    other = np.where(np.isfinite(other), other, x.dtype.type(1))  # NaN on one side only
    other[4:5, 7] = np.nan
    site = site_of(case)
    record = None
    if case.kind is not None:
        made = jax.jit(functools.partial(sites.record_site, site=site))(jnp.asarray(other))
        record = Recorded(bits=made.bits, scales=made.scales, global_scale=made.global_scale)
    valid = jnp.asarray(rng.random(case.M) < 0.8)
    g = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return jnp.asarray(x), record, valid, g


def site_of(case):
    return sites.Site(format=formats.get(case.format), kind=case.kind or "codes", ste=case.ste)


@functools.cache
def results(name, impl):
    """(value, gradient, counts by name) of a case."""
    case = SMALL[name]

    @jax.jit
    def run(x, record, valid, g):
        if impl == "sites":
            if record is not None:
                record = sites.SiteRecord(
                    bits=record.bits, scales=record.scales, global_scale=record.global_scale
                )
            f = functools.partial(sites.quantize_site, site=site_of(case), guided=case.guided)
        else:
            options = {"format": case.format, "kind": case.kind or "codes", "ste": case.ste}
            f = functools.partial(op.fake_quant, guided=case.guided, impl=impl, **options)
        value, back, counts = jax.vjp(lambda x: f(x, record, valid), x, has_aux=True)
        return value, back(g)[0], counts

    value, gradient, counts = run(*inputs(case))
    named = {}
    for field in dataclasses.fields(Counts):
        count = getattr(counts, field.name)
        if count is not None:
            named[field.name] = int(np.sum(count) if impl != "sites" else count.total)
    return np.asarray(value), np.asarray(gradient), named


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", [name for name, case in SMALL.items() if case.M])
def test_every_small_case_is_what_qat_computes(name, impl):
    got, want = results(name, impl), results(name, "sites")
    assert got[0].dtype == want[0].dtype
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(mine.astype(np.float32), theirs.astype(np.float32))
    assert got[2] == want[2]


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_give_no_values_and_no_counts(impl):
    value, gradient, counts = results("no_rows", impl)
    assert value.shape == gradient.shape == (0, 64)
    assert len(counts) == 9 and set(counts.values()) == {0}


def member(x, recorded, step, kind):
    """The codeword next to x / step that a record points at, by searching all in float32."""
    words = np.unique(VALUES[:, None] * step)  # 15, in order
    x = np.clip(x, words[0], words[-1])
    low, high = words[words <= x].max(), words[words >= x].min()
    code = {word: int(np.flatnonzero(VALUES * step == word)[0]) for word in (low, high)}
    if kind == "codes":
        wanted = VALUES[recorded] * step
        return min((low, high), key=lambda word: abs(float(word) - float(wanted)))
    return low if code[low] & 1 == recorded else high


@pytest.mark.parametrize("kind", ["codes", "mantissa"])
def test_guided_values_are_the_recorded_member_of_the_bracket_in_numpy(kind):
    """Any codes, any scales: what no rollout of the same values would record, too."""
    rng = np.random.default_rng(5)
    M, K, format = 40, 32, formats.get("nvfp4")
    x = rng.standard_normal((M, K)).astype(np.float32)
    scales = rng.integers(1, 127, (M, K // 16)).astype(np.uint8)
    g = np.exp2(rng.uniform(-12, -8, (M, 1))).astype(np.float32)
    recorded = rng.integers(0, 16, (M, K)) if kind == "codes" else rng.integers(0, 2, (M, K))
    recorded[recorded == 8] = 0
    step = np.repeat(oracle.E4M3[scales] * g, 16, axis=1)
    x[:, ::3] = VALUES[rng.integers(0, 16, x[:, ::3].shape)] * step[:, ::3]  # codewords themselves
    want = [[member(x[m, k], recorded[m, k], step[m, k], kind) for k in range(K)] for m in range(M)]
    per_byte = 2 if kind == "codes" else 8
    grouped = recorded.reshape(M, -1, per_byte) << (np.arange(per_byte) * (8 // per_byte))
    bits = np.sum(grouped, axis=-1).astype(np.uint8)
    record = Recorded(
        bits=jnp.asarray(bits), scales=jnp.asarray(scales), global_scale=jnp.asarray(g)
    )
    for impl in IMPLS:
        run = functools.partial(op.fake_quant, format=format, kind=kind, guided=True, impl=impl)
        value, counts = jax.jit(run)(jnp.asarray(x), record, jnp.ones(M, bool))
        np.testing.assert_array_equal(value, np.asarray(want, np.float32))
        blocks = np.asarray(oracle.quantize(x, format)[1] == scales)
        np.testing.assert_array_equal(counts.scale_equal, np.sum(blocks, axis=1))
        np.testing.assert_array_equal(counts.coded, np.sum(np.asarray(want) != 0, axis=1))


@pytest.mark.parametrize("impl", IMPLS)
def test_plain_values_are_codes_times_steps_and_counts_are_per_row(impl):
    x = oracle.hard_rows(13, 40, np.float32, seed=6)
    format, valid = formats.get("nvfp4"), np.arange(13) % 4 != 1
    codes, scales, g = oracle.quantize(x, format)
    step = np.repeat(oracle.decode_scale(scales, format) * g, 16, axis=1)
    want = (VALUES[codes] * step)[:, :40]
    run = functools.partial(op.fake_quant, format=format, guided=True, impl=impl)
    value, counts = jax.jit(run)(jnp.asarray(x), None, jnp.asarray(valid))
    np.testing.assert_array_equal(value, want)
    np.testing.assert_array_equal(counts.coded, np.sum(codes[:, :40] != 0, axis=1) * valid)
    nonfinite = np.sum(np.isnan(step[:, :40]), axis=1) * valid
    np.testing.assert_array_equal(counts.nonfinite, nonfinite)
    assert counts.agreement is None and nonfinite.sum() > 0


@pytest.mark.parametrize("impl", IMPLS)
def test_axes_in_front_are_kept_and_the_gradient_passes_unchanged(impl):
    x, record, valid, g = inputs(SMALL["codes"])
    fold = functools.partial(jax.tree.map, lambda a: a[:12].reshape(3, 4, *a.shape[1:]))
    run = functools.partial(op.fake_quant, format="nvfp4", guided=True, impl=impl)
    value, counts = jax.jit(run)(*fold((x, record, valid)))
    assert value.shape == (3, 4, 96) and counts.coded.shape == (3, 4)
    flat = results("codes", "xla")[0][:12].reshape(3, 4, 96)
    np.testing.assert_array_equal(np.asarray(value, np.float32), flat.astype(np.float32))
    np.testing.assert_array_equal(results("codes", impl)[1], g)


def test_a_clipped_gradient_is_zero_where_a_value_saturates():
    """One block recorded on half its scale: the largest values lie above 6 steps."""
    x = jnp.asarray(np.linspace(-6, 6, 16, dtype=np.float32)[None])
    record = bench.record(x / 2, "nvfp4", "codes")
    want = np.abs(np.asarray(x)) <= 3.0001
    for impl in IMPLS:
        run = functools.partial(
            op.fake_quant, format="nvfp4", guided=True, ste="clipped", impl=impl
        )
        total = jax.jit(jax.grad(lambda x, run=run: jnp.sum(run(x, record, jnp.ones(1, bool))[0])))
        np.testing.assert_array_equal(total(x), want.astype(np.float32))


X, VALID = jnp.ones((2, 32), jnp.bfloat16), jnp.ones(2, bool)
OK = Recorded(
    bits=jnp.zeros((2, 16), jnp.uint8),
    scales=jnp.zeros((2, 2), jnp.uint8),
    global_scale=jnp.ones((2, 1), jnp.float32),
)
WRONG = {
    "x: dtype: got float16": (X.astype(jnp.float16), OK, VALID, {}),
    "kind: got 'bits'": (X, OK, VALID, {"kind": "bits"}),
    "ste: got 'none'": (X, OK, VALID, {"ste": "none"}),
    r"recorded.bits: shape: got \(2, 16\), need \(2, 4\)": (X, OK, VALID, {"kind": "mantissa"}),
    r"recorded.scales: shape: got \(2, 1\)": (
        X,
        dataclasses.replace(OK, scales=OK.scales[:, :1]),
        VALID,
        {},
    ),
    "global_scale: got None": (X, dataclasses.replace(OK, global_scale=None), VALID, {}),
    "global_scale: got an array, need None": (X, OK, VALID, {"format": "nvfp4:global_rule=one"}),
    "global_scale: dtype: got bfloat16": (
        X,
        dataclasses.replace(OK, global_scale=jnp.ones((2, 1), jnp.bfloat16)),
        VALID,
        {},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message):
    x, record, valid, options = WRONG[message]
    options = {"format": "nvfp4", "guided": True, "impl": "xla"} | options
    with pytest.raises((ValueError, TypeError), match=message):
        op.fake_quant(x, record, valid, **options)


CANNOT = {
    "must be decoded first": ("triton_interpret", {"scale_bits": 4}),
    "global_bits=16 must be decoded first": ("xla", {"global_bits": 16}),
    "conventions divide": ("mosaic_tpu_interpret", {"format": "nvfp4:convention=te"}),
    "no such kernel": ("mosaic_gpu", {}),
    "need a TPU": ("mosaic_tpu", {}),
}


@pytest.mark.parametrize("reason", CANNOT)
def test_what_an_implementation_cannot_do_is_refused_with_the_reason(reason):
    impl, options = CANNOT[reason]
    options = {"format": "nvfp4", "guided": True} | options
    with pytest.raises(NotImplementedError, match=reason), device.described("cuda", (10, 0)):
        op.fake_quant(X, OK, VALID, impl=impl, **options)


def test_costs_are_the_bytes_of_the_arrays():
    def result(found):
        value, counts = found.reference(*found.make(0))
        counts = dataclasses.replace(counts, undecoded=None)  # no kernel writes it
        return jax.tree.leaves((value, counts))

    for found in bench.BENCHES:
        given = jax.eval_shape(lambda found=found: jax.tree.leaves(found.make(0)))
        made = jax.eval_shape(lambda found=found: result(found))
        sizes = [sum(a.size * a.dtype.itemsize for a in leaves) for leaves in (given, made)]
        assert [found.cost.read, found.cost.written] == sizes, found.case
