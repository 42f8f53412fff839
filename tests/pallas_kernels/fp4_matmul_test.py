"""FP4 matmul: every implementation against numpy in float64; what is refused."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import device, packed
from pallas_kernels.common.debug import checked
from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_matmul import bench, decode, op, ref
from pallas_kernels.fp4_matmul.cases import CASES
from tests.pallas_kernels import fp4_oracle
from trace_jax import formats

SMALL = {case.name: case for case in CASES if case.small}
IMPLS = ("xla", "triton_interpret")
pack = jax.jit(packed.pack, static_argnums=1, static_argnames="global_axes")


def normal(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("impl", ["ref", *IMPLS])
@pytest.mark.parametrize("name", SMALL)
def test_every_small_case_is_the_product_in_float64(name, impl):
    case = SMALL[name]
    x, w = bench.make(case, 1)
    how = {"out_dtype": jnp.float32}
    f = ref.fp4_matmul if impl == "ref" else functools.partial(op.fp4_matmul, impl=impl)
    got = jax.jit(functools.partial(f, **how))(x, w)
    want, bound = fp4_oracle.product(x, w)
    assert got.shape == want.shape == (case.M, case.outputs)
    # float32 sums of K <= 544 products
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= 2e-6 * bound)
    assert case.M == 0 or np.max(np.abs(want)) > 0.1


@pytest.mark.parametrize("impl", IMPLS)
def test_quantised_rows_give_nearly_the_product_of_what_was_quantised(impl):
    x, w = normal((6, 64)), normal((20, 64), 1)
    got = op.fp4_matmul(pack(x, "nvfp4"), pack(w, "nvfp4", global_axes=(-2, -1)), impl=impl)
    want = np.asarray(x) @ np.asarray(w).T
    error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
    assert got.dtype == jnp.bfloat16
    assert 0.05 < error < 0.25  # FP4 errs by about a tenth on either side


@pytest.mark.parametrize("impl", IMPLS)
def test_the_result_is_rounded_once_to_the_dtype_asked_for(impl):
    x, w = normal((6, 64), dtype=jnp.bfloat16), pack(normal((20, 64), 1), "nvfp4")
    wide = op.fp4_matmul(x, w, impl=impl, out_dtype=jnp.float32)
    got = op.fp4_matmul(x, w, impl=impl)
    assert np.array_equal(np.asarray(got), np.asarray(wide).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_float32_x_keeps_all_its_bits(impl):
    w = Packed(
        codes=jnp.full((1, 8), 0x02, jnp.uint8),  # 1 and 0 in turn
        scales=jnp.full((1, 1), 0x38, jnp.uint8),
        factor=None,
        format=pack(jnp.ones((1, 16)), "nvfp4").format,
    )
    x = np.zeros((5, 16), np.float32)
    x[:, 0] = [1 + 2**-23, -(1 - 2**-24), 2**-100, 3.1415927, 16777215]
    got = op.fp4_matmul(jnp.asarray(x), w, impl=impl, out_dtype=jnp.float32)
    assert np.array_equal(np.asarray(got)[:, 0], x[:, 0])


def test_plain_xla_takes_any_format():
    x, w = normal((3, 128), dtype=jnp.bfloat16), pack(normal((5, 128), 1), "hif4")
    got = op.fp4_matmul(x, w, impl="xla", out_dtype=jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(w.operand(), np.float64).T
    factor = 1.0 if w.factor is None else np.asarray(w.factor).T
    assert np.allclose(np.asarray(got), want * factor, rtol=0, atol=1e-4)


def test_kernels_say_what_they_cannot_decode():
    w = pack(normal((5, 128), 1), "hif4")
    with pytest.raises(NotImplementedError, match=r"triton_interpret .*hif4"):
        op.fp4_matmul(normal((3, 128)), w, impl="triton_interpret")
    with pytest.raises(NotImplementedError, match="weights in nvfp4 or mxfp4, not mxfp8"):
        op.fp4_matmul(normal((3, 32)), pack(normal((5, 32)), "mxfp8"), impl="triton_interpret")


def test_an_impl_that_cannot_run_here_is_refused():
    x, w = normal((3, 32)), pack(normal((5, 32), 1), "nvfp4")
    with pytest.raises(NotImplementedError, match=r"fp4_matmul: impl triton: got cpu, need .*GPU"):
        op.fp4_matmul(x, w, impl="triton")
    with pytest.raises(NotImplementedError, match="mosaic_tpu"):
        op.fp4_matmul(x, w, impl="mosaic_tpu")
    with pytest.raises(ValueError, match="fp4_matmul: impl: got 'pallas'"):
        op.fp4_matmul(x, w, impl="pallas")
    with device.described("cuda", (10, 0)), pytest.raises(NotImplementedError, match="mosaic_gpu"):
        op.fp4_matmul(x, w, impl="mosaic_gpu")  # x is plain


def test_operands_that_do_not_fit_are_named():
    w = pack(normal((5, 48), 1), "nvfp4")
    run = functools.partial(op.fp4_matmul, impl="xla")
    with pytest.raises(ValueError, match="fp4_matmul: K: got 32 of x and 48 of w"):
        run(normal((3, 32)), w)
    with pytest.raises(ValueError, match="fp4_matmul: K: got 49 of x"):
        run(normal((3, 49)), w)
    with pytest.raises(ValueError, match="fp4_matmul: K: got 96 of x"):
        run(pack(normal((3, 96)), "mxfp8"), w)
    with pytest.raises(TypeError, match=r"fp4_matmul: x: dtype: got float16"):
        run(normal((3, 48), dtype=jnp.float16), w)
    with pytest.raises(TypeError, match=r"fp4_matmul: out_dtype: got .*int32"):
        run(normal((3, 48)), w, out_dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"fp4_matmul: w: shape: got \(1, 5, 48\), need \(O, K\)"):
        run(normal((3, 48)), pack(normal((1, 5, 48)), "nvfp4"))


def test_debug_mode_finds_nan_scales_and_nothing_happens_without_it():
    x, w = pack(normal((3, 32)), "nvfp4"), pack(normal((5, 32), 1), "nvfp4")
    run = functools.partial(op.fp4_matmul, impl="xla")
    checked(run)(x, w)
    broken = Packed(
        codes=w.codes, scales=w.scales.at[1, 1].set(0x7F), factor=w.factor, format=w.format
    )
    with pytest.raises(ValueError, match=r"fp4_matmul: w.scales: got 1 NaN, need none"):
        checked(run)(x, broken)
    y = np.asarray(run(x, broken), np.float32)
    assert np.isnan(y[:, 1]).all() and not np.isnan(y[:, [0, 2, 3, 4]]).any()


def test_benches_are_whole():
    for one in bench.BENCHES:
        got = jax.eval_shape(lambda one=one: one.run("xla")(*one.make(0)))
        assert one.cost.read > 0 and (one.cost.written > 0 or 0 in got.shape)
        if one.baseline is not None:
            theirs = jax.eval_shape(lambda one=one: one.baseline(*one.baseline_make(0)))
            assert (theirs.shape, theirs.dtype) == (got.shape, got.dtype)


def test_cost_of_a_case_counted_by_hand():
    cost = bench.cost(SMALL["odd"])  # 13 x 48 NVFP4, 71 x 48 NVFP4: 24 + 3 bytes a row
    assert (cost.read, cost.written, cost.operations) == (84 * 27, 4 * 13 * 71, 2 * 13 * 71 * 48)
    assert cost.kind == "fp4"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_plain_xla_decodes_every_code_under_every_scale_to_the_bits_of_the_format(format):
    codes = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (256, 1))
    whole = formats.get(format)
    scales = jnp.tile(jnp.arange(256, dtype=jnp.uint8)[:, None], (1, 512 // whole.block))
    x = Packed(codes=codes, scales=scales, factor=None, format=whole)
    got, want = decode.value(x, jnp.float32), x.operand()
    assert np.array_equal(np.asarray(got), np.asarray(want), equal_nan=True)
    signs = np.signbit(np.asarray(got)) == np.signbit(np.asarray(want))
    assert np.all(signs | np.isnan(np.asarray(want)))
