"""What all kernels share, each against ml_dtypes, numbers written out, or a planted fault."""

import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.common import cost, debug, device, impls, packed, tiles
from trace_jax import formats

BYTES = np.arange(256, dtype=np.uint8)
pack = jax.jit(packed.pack, static_argnames=("format", "global_axes"))


def in_kernel(f, x):
    """The result of elementwise arithmetic inside a kernel, run step by step."""

    def body(x_ref, out_ref):
        out_ref[...] = f(x_ref[...])

    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(x)


def assert_same_bits(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    real = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[real], want.view(np.uint32)[real])


@pytest.mark.parametrize("run", [lambda f, x: f(x), lambda f, x: jax.jit(f)(x), in_kernel])
@pytest.mark.parametrize(
    ("decode", "dtype", "count"),
    [
        (tiles.e2m1_value, ml_dtypes.float4_e2m1fn, 16),
        (tiles.e4m3_value, ml_dtypes.float8_e4m3fn, 256),
        (tiles.e8m0_value, ml_dtypes.float8_e8m0fnu, 256),
    ],
)
def test_tiles_decode_every_code_as_ml_dtypes(run, decode, dtype, count):
    want = BYTES[:count].view(dtype).astype(np.float32)
    want[np.abs(want) < 2.0**-126] *= 0  # e8m0's 2^-127 is subnormal in float32: flushed
    assert_same_bits(run(decode, jnp.arange(count, dtype=jnp.int32)), want)


def test_scale_value_reads_the_bytes_that_the_format_has():
    byte = jnp.asarray([0x38, 127], jnp.int32)  # E4M3: 1; E8M0: 2^-71. E4M3: NaN; E8M0: 1
    nvfp4, mxfp4 = (tiles.scale_value(byte, formats.get(name)) for name in ("nvfp4", "mxfp4"))
    assert nvfp4[0] == 1 and np.isnan(nvfp4[1])
    np.testing.assert_array_equal(mxfp4, [2.0**-71, 1])


FORMATS = ["nvfp4", "nvfp4:global_rule=one", "mxfp4", "mxfp8", "hif4"]


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("width", [64, 50])  # whole blocks, and not
def test_pack_keeps_the_values_of_the_specification(text, width):
    values = jax.random.normal(jax.random.key(0), (3, 5, width), jnp.float32)
    x = pack(values, text)
    packed.check("here", "x", x)
    assert x.shape == (3, 5, x.width) and 0 <= x.width - width < x.format.block
    y = np.asarray(x.operand()) * (1 if x.factor is None else np.asarray(x.factor))
    want = jax.jit(functools.partial(formats.quantize, format=text, global_axes=(-1,)))(values)
    # the factor is applied last here, and inside of the step there: two roundings each
    np.testing.assert_allclose(y[..., :width], want.dequantize(), rtol=2**-22, atol=0)
    assert not y[..., width:].any()


def test_operands_of_kernels_are_exact_in_bfloat16():
    x = jax.random.normal(jax.random.key(1), (64, 256), jnp.float32) * jnp.float32(37)
    for text in packed.DECODED:
        operand = pack(x, text).operand()
        assert_same_bits(operand.astype(jnp.bfloat16).astype(jnp.float32), operand)


def test_a_matrix_can_share_one_factor():
    x = pack(jnp.ones((4, 32), jnp.float32), "nvfp4", global_axes=(-2, -1))
    assert x.factor is not None and x.factor.shape == (1, 1)
    packed.check("here", "x", x)


def broken(**changes):
    """A matrix with other parts; a real one in which axes disagree is not let be by jaxtyping."""
    whole = pack(jnp.ones((4, 32), jnp.float32), "nvfp4")
    parts = {
        name: getattr(whole, name) for name in ("codes", "scales", "factor", "width", "format")
    }
    return types.SimpleNamespace(**parts | changes)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (
            {"codes": jnp.zeros((4, 15), jnp.uint8)},
            ValueError,
            r"f: w\.codes: shape: got \(4, 15\), need \(4, 16\)\. Fix: nvfp4 has 16 values a block",
        ),
        (
            {"codes": jnp.zeros((3, 16), jnp.uint8)},
            ValueError,
            r"f: w\.codes: shape: got \(3, 16\)",
        ),
        (
            {"scales": jnp.zeros((4, 3), jnp.uint8), "width": 48},
            ValueError,
            r"f: w\.codes: shape: got \(4, 16\), need \(4, 24\)",
        ),
        (
            {"codes": jnp.zeros((4, 16), jnp.int8)},
            TypeError,
            r"w\.codes: dtype: got int8, need uint8",
        ),
        ({"scales": jnp.zeros((4, 2), jnp.int8)}, TypeError, r"w\.scales: dtype: got int8, need u"),
        (
            {"factor": jnp.ones((4,), jnp.float32)},
            ValueError,
            r"f: w\.factor: shape: got \(4,\), need \(4, 1\)",
        ),
        (
            {"factor": jnp.ones((2, 1), jnp.float32)},
            ValueError,
            r"f: w\.factor: shape: got \(2, 1\), need \(4, 1\)",
        ),
        (
            {"factor": jnp.ones((4, 1), jnp.bfloat16)},
            TypeError,
            r"f: w\.factor: dtype: got bfloat16, need float32",
        ),
    ],
)
def test_a_broken_operand_is_named(changes, error, says):
    with pytest.raises(error, match=says):
        packed.check("f", "w", broken(**changes))


def test_formats_that_kernels_cannot_decode_are_named():
    x = jnp.ones((2, 64), jnp.float32)
    assert packed.undecoded("w", x) is None
    assert all(packed.undecoded("w", pack(x, name)) is None for name in packed.DECODED)
    says = "it cannot decode w in hif4, only nvfp4, mxfp4, mxfp8"
    assert packed.undecoded("w", pack(x, "hif4")) == says


ALL = {"xla": None, "triton": None, "mosaic_gpu": None, "mosaic_tpu": None}
HOPPER, BLACKWELL, NEWER = (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("platform", "capability", "able"),
    [
        ("cpu", None, set()),
        ("cuda", (8, 0), set()),
        ("cuda", HOPPER, {"triton"}),
        ("cuda", BLACKWELL, {"triton", "mosaic_gpu"}),
        ("cuda", NEWER, {"triton"}),  # no tcgen05 there
        ("rocm", None, set()),
        ("tpu", None, {"mosaic_tpu"}),
    ],
)
def test_a_device_runs_its_own_kernels_and_refuses_others(platform, capability, able):
    everywhere = {"xla", "triton_interpret", "mosaic_tpu_interpret"}
    with device.described(platform, capability):
        for impl in impls.IMPLS:
            if impl in able | everywhere:
                assert impls.choose("f", impl, ALL) == impl
                continue
            here = str(device.Device(platform, capability))
            with pytest.raises(NotImplementedError, match=f"f: impl {impl}: got {here}, need a"):
                impls.choose("f", impl, ALL)


def test_without_a_description_the_device_is_jax_own():
    assert device.current() == device.Device("cpu")
    with device.described("cuda", HOPPER):
        assert str(device.current()) == "cuda of compute capability 9.0"
        with device.described("tpu"):
            assert device.current() == device.Device("tpu")
        assert device.current().capability == HOPPER
    assert device.current() == device.Device("cpu")
    with pytest.raises(RuntimeError), device.described("tpu"):
        raise RuntimeError
    assert device.current() == device.Device("cpu")


@pytest.mark.parametrize(
    ("version", "platform", "capability", "is_"),
    [
        ("cuda 13000", "gpu", "9.0", device.Device("cuda", HOPPER)),
        ("cuda 13000", "gpu", "12.0", device.Device("cuda", NEWER)),
        ("rocm 70000", "gpu", "gfx942", device.Device("rocm")),
        ("libtpu", "tpu", None, device.Device("tpu")),
    ],
)
def test_real_devices_are_read_from_jax(monkeypatch, version, platform, capability, is_):
    client = types.SimpleNamespace(platform_version=version)
    found = types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)
    monkeypatch.setattr(device.jax, "devices", lambda: [found])
    assert device.current() == is_


def test_an_unknown_impl_names_the_choices():
    with pytest.raises(ValueError, match=r"f: impl: got 'cuda', need one of \['xla', 'triton'"):
        impls.choose("f", "cuda", ALL)


@pytest.mark.parametrize("impl", ["mosaic_tpu", "mosaic_tpu_interpret"])
def test_an_impl_that_the_op_lacks_says_why_and_what_there_is(impl):
    says = r"got {} \({}\), need one of \['xla', 'triton'\]. Fix: choose another impl"
    none, has = "there is no such kernel of this op", {"xla": None, "triton": None}
    with pytest.raises(NotImplementedError, match=says.format(impl, none)):
        impls.choose("f", impl, has)
    with pytest.raises(NotImplementedError, match=says.format(impl, "it cannot decode w")):
        impls.choose("f", impl, has | {"mosaic_tpu": "it cannot decode w"})


def test_what_a_device_lacks_says_what_to_choose():
    with pytest.raises(NotImplementedError, match="Fix: impl='xla' here, or impl='triton_interp"):
        impls.choose("f", "triton", ALL)
    with device.described("cuda", HOPPER), pytest.raises(NotImplementedError) as raised:
        impls.choose("f", "mosaic_gpu", ALL)
    assert "need an NVIDIA GPU of compute capability 10.0 or 10.3" in str(raised.value)
    assert "Fix: impl='triton' or impl='xla'" in str(raised.value)


def test_interpreted_impls_are_told_apart():
    found = {impl for impl in impls.IMPLS if impls.interpreted(impl)}
    assert found == {"triton_interpret", "mosaic_tpu_interpret"}


def test_the_bound_is_the_slower_of_moving_and_computing():
    ceiling = cost.Ceiling(1e12, {"bf16": 1e15, "fp4": 4e15})
    small = cost.Cost(read=3 * 10**9, written=10**9, operations=10**12)
    assert small.bytes == 4 * 10**9
    assert ceiling.bound(small) == (4e-3, "memory")
    large = cost.Cost(read=3 * 10**9, written=10**9, operations=10**13)
    assert ceiling.bound(large) == (1e-2, "compute")
    fp4 = cost.Cost(read=3 * 10**9, written=10**9, operations=10**13, kind="fp4")
    assert ceiling.bound(fp4) == (4e-3, "memory")


def test_every_device_has_a_ceiling_for_every_kind():
    for ceiling in cost.CEILINGS.values():
        assert set(ceiling.compute) == {"f32", "bf16", "fp8", "fp4"}
        assert min(ceiling.memory, *ceiling.compute.values()) > 1e12


def toy(x, sizes):
    """A product that states a fact of its values, as ops do."""
    total = jnp.sum(sizes)
    need = "{total}, need the number of rows, {rows}. Fix: count the routes"
    debug.check(
        total == x.shape[0], f"toy: sizes: got {need}", total=total, rows=jnp.int32(x.shape[0])
    )
    return jnp.sum(x * x)


SAYS = r"^toy: sizes: got 5, need the number of rows, 4\. Fix: count the routes$"


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_checked_raises_what_a_check_says_and_nothing_else_does(around):
    x, bad, good = jnp.ones(4, jnp.float32), jnp.asarray([2, 3]), jnp.asarray([1, 3])
    f = around(toy)
    np.testing.assert_array_equal(f(x, bad), f(x, good))  # nobody asked
    np.testing.assert_array_equal(debug.checked(f)(x, good), f(x, good))
    with pytest.raises(ValueError, match=SAYS):
        debug.checked(f)(x, bad)


def test_checked_sees_checks_within_loops():
    def loop(x, sizes):
        return jax.lax.map(lambda size: toy(x, size), sizes)

    x, sizes = jnp.ones(4, jnp.float32), jnp.asarray([[1, 3], [2, 3]])
    with pytest.raises(ValueError, match=SAYS):
        debug.checked(loop)(x, sizes)
    np.testing.assert_array_equal(debug.checked(loop)(x, sizes[:1]), [4])
