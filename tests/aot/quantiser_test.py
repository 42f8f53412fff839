"""The quantisers alone on GPUs: their float instructions, and their results after the optimiser."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.aot import compile as aot
from trace_jax.aot import ptx
from trace_jax.formats import e4m3, nvfp4

GPUS = ["h200", "b200"]
OTHERS = ["mxfp4", "mxfp8", "hif4"]
EACH = ["nvfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
# first guesses only: of the block scale (NVFP4) and of where a value lies (MXFP8); see below
INEXACT = {"nvfp4": {"div.full.f32"}, "mxfp4": set(), "mxfp8": {"rcp.approx.f32"}, "hif4": set()}


@functools.cache
def compiled(target, builder, format):
    job = aot.Job(
        builder=f"trace_jax.aot.step:{builder}", target=target, kwargs={"format": format}, ptx=True
    )
    return aot.compile_job(job)


@pytest.mark.parametrize("format", EACH)
@pytest.mark.parametrize("builder", ["quantiser", "site_quantiser"])
@pytest.mark.parametrize("target", GPUS)
def test_kernels_do_ieee_arithmetic_but_for_the_guess_of_a_scale(target, builder, format):
    kinds = ptx.float_instructions(compiled(target, builder, format).ptx)
    assert kinds["mul.rn.f32"] >= 6  # midpoint * step; the parser really reads PTX
    assert sum(n for kind, n in kinds.items() if kind.startswith("setp.g")) >= 6
    assert set(ptx.inexact(kinds)) == INEXACT[format]
    if builder == "quantiser":
        assert ptx.inexact(kinds).total() == len(INEXACT[format])  # once, no more


APPROXIMATE = """div.full.f32 div.approx.f32 rcp.approx.ftz.f32 rcp.rn.f32 fma.rn.f32 mul.f32
    add.f32 mul.rn.ftz.f32 ex2.approx.f32 cvt.rz.bf16.f32 setp.gt.ftz.f32 sqrt.approx.f32"""


@pytest.mark.parametrize("name", APPROXIMATE.split())
def test_what_could_change_a_code_is_found(name):
    text = f"\t@%p1 bra $L__BB0_2;\n\t{name} \t%r1, %r2, %r3;\n\tld.global.b32 \t%r2, [%rd1];\n"
    assert ptx.inexact(ptx.float_instructions(text)) == {name: 1}


def test_exact_instructions_are_let_pass():
    names = "mul.rn.f32 add.rn.f32 setp.ge.f32 abs.f32 selp.f32 cvt.f32.bf16 cvt.rn.bf16.f32"
    text = "".join(f"\t{name} \t%f1, %f2, %f3;\n" for name in names.split())
    kinds = ptx.float_instructions(text)
    assert kinds.total() == 7 and not ptx.inexact(kinds)


def every_scale_and_its_borders():
    """Block maxima at each E4M3 value, each midpoint, and one float32 to either side; g = 1."""
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2]) * np.float32(6)
    near = [np.nextafter(points, np.float32(side)) for side in (0, np.inf)]
    amax = np.concatenate([points, *near, [np.float32(1e30)]])
    return amax[(amax == 0) | (amax > 2.0**-126)].astype(np.float32)


@pytest.mark.parametrize("global_", [1.0, 0.0007345, 3.1])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_guess_that_is_one_code_off_gives_the_same_block_scale(monkeypatch, off, global_):
    """So the two ulp that `div.full.f32` may be off change nothing.

    A quotient that is a few ulp off is rounded to the right E4M3 code or, beside a midpoint, to its
    neighbour. Here every guess is the neighbour.
    """
    amax_N = jnp.asarray(every_scale_and_its_borders() * np.float32(global_))
    scale = jnp.float32(global_)
    right = np.asarray(nvfp4.block_scales(amax_N, scale))
    wrong = np.clip(right.astype(np.int32) + off, 0, 126).astype(np.uint8)
    assert np.mean(wrong != right) > 0.9
    guesses = []

    def neighbour(code):
        guesses.append(code)
        return jnp.asarray(wrong.view(ml_dtypes.float8_e4m3fn))

    monkeypatch.setattr(jax.lax, "optimization_barrier", neighbour)
    np.testing.assert_array_equal(np.asarray(nvfp4.block_scales(amax_N, scale)), right)
    assert len(guesses) == 1  # the guess goes through here, and nothing else does


@pytest.mark.parametrize("off", [-(2.0**-21), -(2.0**-23), 2.0**-23, 2.0**-21])
def test_an_approximate_quotient_gives_the_same_mxfp8_codes(monkeypatch, off):
    """So the ulps that `rcp.approx.f32` may be off change nothing: here up to four, either way."""
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2, [500.0]]).astype(np.float32)
    x = np.concatenate([points, *(np.nextafter(points, np.float32(s)) for s in (0, np.inf))])
    x = jnp.asarray(x[(x == 0) | (x > 2.0**-126)])
    step = jnp.ones_like(x)
    right = [np.asarray(e4m3.round_nearest(x, step)), *map(np.asarray, e4m3.bracket(x, step))]
    exact, moved = e4m3._near, []

    def off_by_ulps(magnitude, step):
        guess = exact(magnitude * jnp.float32(1 + off), step)
        moved.append(np.any(np.asarray(guess) != np.asarray(exact(magnitude, step))))
        return guess

    monkeypatch.setattr(e4m3, "_near", off_by_ulps)
    got = [np.asarray(e4m3.round_nearest(x, step)), *map(np.asarray, e4m3.bracket(x, step))]
    for want, found in zip(right, got, strict=True):
        np.testing.assert_array_equal(found, want)
    assert len(moved) == 2 and all(moved)  # the quotient goes through here, and it matters


def hard_values():
    """Random rows, rows of exact ties, zeros, an outlier, very small and very large rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 512)).astype(np.float32)
    x[0] = 0
    x[1] = np.tile(np.arange(-8, 8, dtype=np.float32) * 0.25, 32)
    x[2] *= np.float32(1e-30)
    x[3] *= np.float32(1e30)
    x[4, 7] = 1e6
    x[5:64] = np.round(x[5:64] * 4) / 4
    x[64:128] = x[64:128].astype(ml_dtypes.bfloat16)
    x[6, 16:32] = 0
    return x


@pytest.mark.parametrize("format", EACH)
@pytest.mark.parametrize("target", GPUS)
def test_optimised_gpu_program_gives_the_codes_of_the_cpu(run_on_cpu, target, format):
    x = hard_values()
    codes, scales, *global_ = run_on_cpu(compiled(target, "quantiser", format).hlo, x)
    here = jax.jit(lambda x: formats.quantize(x, format, global_axes="row"))(x)
    np.testing.assert_array_equal(codes, here.codes)
    np.testing.assert_array_equal(scales.view(np.uint8), np.asarray(here.scales).view(np.uint8))
    if here.global_scale is not None:
        np.testing.assert_array_equal(global_[0], here.global_scale)
    different = len(np.unique(codes))  # the values really reach all codes, or most of 253
    assert different > 200 if format == "mxfp8" else different == 15
