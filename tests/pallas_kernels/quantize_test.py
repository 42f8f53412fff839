"""The quantiser against numpy, which counts midpoints; its kernels' arithmetic at every border."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import debug, device
from pallas_kernels.quantize import bench, op, rounding, triton
from pallas_kernels.quantize.cases import CASES
from tests.pallas_kernels import quantize_oracle as oracle
from trace_jax import formats

SMALL = {case.name: case for case in CASES if case.small}
ROWS = jnp.ones((2, 32), jnp.bfloat16)
NAMED = (op.nvfp4_quantize, op.mxfp4_quantize)
IMPLS = ("xla", "triton_interpret", "mosaic_tpu_interpret")


def quantize(x, format, **options):
    return jax.jit(functools.partial(op.quantize, format=format, **options))(x)


def unpacked(codes):
    codes = np.asarray(codes)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1)
    return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def assert_is(got, want):
    codes, scales, g = want
    np.testing.assert_array_equal(got.scales, scales)
    np.testing.assert_array_equal(unpacked(got.codes), codes)
    assert (got.factor is None) == (g is None)
    if g is not None:
        np.testing.assert_array_equal(np.asarray(got.factor).view(np.uint32), g.view(np.uint32))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", SMALL)
def test_every_small_case_counts_midpoints_as_numpy(name, impl):
    case = SMALL[name]
    x = oracle.hard_rows(case.M, case.K, case.dtype, seed=3)
    got = quantize(jnp.asarray(x), case.format, impl=impl)
    assert_is(got, oracle.quantize(x.astype(np.float32), formats.get(case.format)))


@pytest.mark.parametrize(
    "format",
    [
        *(f"mxfp4:rule={rule}" for rule in ("floor", "ceil", "even", "round_up")),
        *(f"nvfp4:scale_rule={rule}" for rule in ("mse", "mae", "abs_max")),
        "nvfp4:scale_rule=mse,global_rule=pow2",
        "nvfp4:scale_rule=abs_max,global_rule=one",
    ],
)
def test_every_rule_of_kernels_counts_midpoints_as_numpy(format):
    """The arithmetic of kernels without a kernel around it: quick, so on many rows."""
    chosen = formats.get(format)
    x = oracle.hard_rows(300, 64, np.float32)
    x[100:200] = x[100:200].astype(ml_dtypes.bfloat16)  # errors that tie

    @jax.jit
    def run(x):
        values = jax.lax.bitcast_convert_type(x, jnp.int32).reshape(len(x), -1, chosen.block)
        bits = values & rounding.MAGNITUDE
        top = jnp.max(bits, axis=(1, 2), keepdims=True)
        g = rounding.row_global(top, chosen)
        byte = rounding.scale_bytes(bits, triton.BLOCK.largest(bits), g, chosen, triton.BLOCK)
        code = rounding.nearest(bits, rounding.step_of(byte, g, chosen))
        return rounding.signed(code, values).reshape(x.shape), byte[..., 0]

    codes, scales = run(x)
    want_codes, want_scales, _ = oracle.quantize(x, chosen)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes)


def test_a_scale_is_right_at_every_border_and_for_every_global_scale():
    points = np.concatenate([oracle.E4M3, (oracle.E4M3[:-1] + oracle.E4M3[1:]) / 2])
    rng = np.random.default_rng(0)
    gs = np.exp2(rng.uniform(-100, 100, 200)).astype(np.float32)
    gs = np.concatenate([gs, np.exp2([-111.0, -1, 0, 1, 116]).astype(np.float32)])
    scale = jax.jit(
        lambda amax, g, top: rounding.nvfp4_byte(amax, g, rounding.reciprocal(g), top),
        static_argnums=2,
    )
    for top in (6, 4):
        amax = np.float32(top) * points.astype(np.float32) * gs[:, None]
        near = [np.nextafter(amax, np.float32(side)) for side in (0, np.inf)]
        amax = np.concatenate([amax, *near, np.full_like(amax[:, :1], 1e38)], axis=1)
        amax = np.where((amax < oracle.TINY), np.float32(0), amax)
        want = oracle.nvfp4_scale(amax, np.broadcast_to(gs[:, None], amax.shape), top)
        np.testing.assert_array_equal(scale(amax.view(np.int32), gs[:, None], top), want)
        assert len(np.unique(want)) == 127


def test_the_reciprocal_is_near_enough_for_a_code_or_the_one_below():
    g = np.linspace(1, 2, 4097, dtype=np.float32)[:-1] * np.float32(2.0) ** np.arange(-111, 117)[
        :, None
    ].astype(np.float32)
    off = np.asarray(jax.jit(rounding.reciprocal)(g)).astype(np.float64) * g - 1
    assert np.max(np.abs(off)) < 2**-21  # 2^-20 is what the comparison can mend


def test_codes_are_right_at_every_border_of_every_scale():
    """With general global scales, whose products round: no constant factor may move into them."""
    g = np.exp2(np.random.default_rng(1).uniform(-60, 60, (50, 1, 1))).astype(np.float32)
    byte = np.arange(1, 127, dtype=np.int32)[:, None]
    step = oracle.E4M3[byte] * g
    middle = (oracle.E2M1[:-1] + oracle.E2M1[1:]) / np.float32(2) * step
    near = [np.nextafter(middle, np.float32(side)) for side in (0, np.inf)]
    x = np.concatenate([middle, *near, np.full_like(middle[..., :1], 1e38)], axis=2)

    @jax.jit
    def run(x, byte, g):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return rounding.nearest(bits, rounding.step_of(byte, g, formats.get("nvfp4")))

    np.testing.assert_array_equal(run(x, byte[None], g), oracle.magnitudes(x, step))


@pytest.mark.parametrize("step", [1.0, 0.0371, 2.0**-120, 6e36])
def test_codes_of_every_bf16_value_count_midpoints_as_numpy(step):
    x = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)  # to Inf
    got = jax.jit(rounding.nearest)(x.view(np.int32), np.float32(step))
    np.testing.assert_array_equal(got, oracle.magnitudes(x, np.float32(step)))


@pytest.mark.parametrize("impl", IMPLS)
def test_given_global_scales_are_taken_and_axes_kept(impl):
    x = oracle.hard_rows(6, 48, np.float32, seed=4).reshape(2, 3, 48)
    x = np.where(np.isfinite(x), x, np.float32(1))
    given = np.array([0.01, 2.0], np.float32).reshape(2, 1, 1)
    got = quantize(jnp.asarray(x), "nvfp4", impl=impl, factor_from=jnp.asarray(given))
    np.testing.assert_array_equal(got.factor, given)  # as it was given: shared by three rows
    g = np.repeat(given.reshape(2, 1), 3, axis=0)
    codes, scales, _ = oracle.quantize(x.reshape(6, 48), formats.get("nvfp4"), g)
    np.testing.assert_array_equal(np.asarray(got.scales).reshape(6, 3), scales)
    np.testing.assert_array_equal(unpacked(got.codes).reshape(6, 48), codes)


def test_names_ask_for_their_format():
    nvfp4, mxfp4 = (jax.jit(f, static_argnames=("format", "impl")) for f in NAMED)
    assert nvfp4(ROWS, impl="xla").format.name == "nvfp4"
    assert nvfp4(ROWS, format="nvfp4:scale_rule=static_4", impl="xla").factor.shape == (2, 1)
    assert mxfp4(ROWS, impl="xla").scales.shape == (2, 1)
    with pytest.raises(ValueError, match="nvfp4_quantize: format: got mxfp4, need nvfp4"):
        nvfp4(ROWS, format="mxfp4", impl="xla")


WRONG = {
    "dtype: got float16": (ROWS.astype(jnp.float16), "nvfp4", "row"),
    "factor_from: got 'tensor', need 'row'": (ROWS, "nvfp4", "tensor"),
    "factor_from: got scales": (ROWS, "mxfp4", jnp.ones((2, 1))),
    "factor_from: dtype: got bfloat16": (ROWS, "nvfp4", jnp.ones((2, 1), jnp.bfloat16)),
    r"factor_from: shape: got \(3, 1\)": (ROWS, "nvfp4", jnp.ones((3, 1))),
    "factor_from: shape: got": (ROWS, "nvfp4", jnp.ones((1,))),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message):
    x, format, factor_from = WRONG[message]
    with pytest.raises((ValueError, TypeError), match=message):
        op.quantize(x, format, impl="xla", factor_from=factor_from)


CANNOT = {
    "conventions divide": ("nvfp4:convention=te", "triton_interpret", 32),
    "tiles span rows": ("nvfp4:block_shape=16x16", "mosaic_tpu_interpret", 32),
    "not to mxfp8": ("mxfp8", "triton_interpret", 32),
    "rows of up to 16384 values": ("nvfp4", "triton_interpret", 16400),
    "no such kernel": ("nvfp4", "mosaic_gpu", 32),
    "need an NVIDIA GPU": ("nvfp4", "triton", 32),
    "need a TPU": ("nvfp4", "mosaic_tpu", 32),
}


@pytest.mark.parametrize("reason", CANNOT)
def test_what_an_implementation_cannot_do_is_refused_with_the_reason(reason):
    format, impl, K = CANNOT[reason]
    x = jnp.ones((2, K), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=reason), device.described("cuda", (8, 0)):
        op.quantize(x, format, impl=impl)


@pytest.mark.parametrize("format", ["nvfp4:convention=te", "mxfp8", "hif4"])
def test_xla_quantises_to_every_format_as_the_library(format):
    x = jnp.asarray(oracle.hard_rows(13, 128, np.float32))
    got = quantize(x, format, impl="xla")
    want = jax.jit(lambda x: formats.quantize(x, format, global_axes="row"))(x)
    np.testing.assert_array_equal(got.format.unpack_codes(got.codes), want.codes)
    np.testing.assert_array_equal(got.scales, np.asarray(want.scales).view(np.uint8))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 2.0**-120])
def test_global_scales_out_of_range_are_found_in_a_debug_run_only(bad):
    given = jnp.asarray([[1.0], [bad]], jnp.float32)
    run = functools.partial(op.quantize, format="nvfp4", impl="xla")
    with pytest.raises(ValueError, match=r"quantize: factor_from: got global scales from"):
        debug.checked(run)(ROWS, factor_from=given)
    run(ROWS, factor_from=given)  # says nothing
    debug.checked(run)(ROWS, factor_from=jnp.ones((2, 1)))


def test_costs_are_the_bytes_of_the_arrays():
    for found in bench.BENCHES:
        x = jax.eval_shape(lambda found=found: found.make(0))
        out = jax.eval_shape(lambda x, found=found: jax.tree.leaves(found.reference(x)), *x)
        sizes = [sum(a.size * a.dtype.itemsize for a in leaves) for leaves in (x, out)]
        assert [found.cost.read, found.cost.written] == sizes, found.case
