"""Oracles: ml_dtypes for values and a search over all of them in float64 for the nearest."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.formats import e4m3

VALUES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
FINITE = ALL_BF16[np.isfinite(ALL_BF16)]
# powers of two over the whole range, an E4M3 value, full mantissas
STEPS = [1.0, 2.0**-126, 2.0**-100, 2.0**127, 448.0, 2.0**-9, 0.4823, 1e-30, 3.3e20]

round_nearest = jax.jit(e4m3.round_nearest)
bracket = jax.jit(e4m3.bracket)


def parts(x, step):
    """(float64 magnitudes without what counts as zero, float64 step, negative)."""
    magnitude = np.abs(np.asarray(x, np.float64))
    return np.where(magnitude < 2.0**-126, 0, magnitude), np.float64(np.float32(step)), x < 0


def search(x, step):
    """Signed code: nearest value, ties to even; the tie is where |x| == fl(mid step)."""
    magnitude, step, negative = parts(x, step)
    middles = (VALUES[:-1] + VALUES[1:]) / 2 * step
    with np.errstate(over="ignore"):
        tie = middles.astype(np.float32).astype(np.float64)
    code = np.searchsorted(tie, magnitude, side="left")  # ties low ...
    is_tie = (code < 126) & (magnitude == tie[np.minimum(code, 125)])
    code = np.where(is_tie & (code % 2 == 1), code + 1, code)  # ... unless that is odd
    return np.where(negative & (code > 0), code | 128, code)


@pytest.mark.parametrize("step", STEPS)
def test_every_bf16_value_rounds_as_in_a_float64_search(step):
    got = np.asarray(round_nearest(jnp.asarray(FINITE), jnp.full(FINITE.shape, step)))
    np.testing.assert_array_equal(got, search(FINITE, step))
    assert not np.isin(got, [0x7F, 0x80, 0xFF]).any()


def test_rounding_with_a_step_of_one_is_the_cast_of_ml_dtypes():
    rng = np.random.default_rng(0)
    x = np.concatenate([FINITE, (rng.normal(size=1 << 16) * 100).astype(np.float32)])
    x = x[np.abs(x) <= 464]  # beyond, the cast gives NaN and we saturate
    got = np.asarray(round_nearest(jnp.asarray(x), jnp.ones(x.shape)))
    theirs = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(got, np.where(theirs == 128, 0, theirs))


@pytest.mark.parametrize("step", [1.0, 0.4823, 2.0**-40, 1e20])
def test_midpoints_go_to_the_even_code_and_their_neighbours_do_not(step):
    tie = ((VALUES[:-1] + VALUES[1:]) / 2).astype(np.float32) * np.float32(step)
    low = np.arange(126)
    for x, want in [
        (tie, low + low % 2),
        (np.nextafter(tie, np.float32(0)), low),
        (np.nextafter(tie, np.float32(np.inf)), low + 1),
    ]:
        for sign in (1, -1):
            got = np.asarray(round_nearest(jnp.asarray(sign * x), jnp.full(126, step, jnp.float32)))
            signed = want if sign == 1 else np.where(want > 0, want | 128, 0)
            np.testing.assert_array_equal(got, signed)


@pytest.mark.parametrize("step", STEPS)
def test_bracket_is_the_two_codewords_around_x(step):
    x = np.concatenate([FINITE[::7], (VALUES[:64] * np.float32(step)).astype(np.float32)])
    low, high = (np.asarray(a) for a in bracket(jnp.asarray(x), jnp.full(x.shape, step)))
    magnitude, exact, negative = parts(x, step)
    with np.errstate(over="ignore"):
        points = (VALUES * exact).astype(np.float32).astype(np.float64)
    floor = np.searchsorted(points, magnitude, side="right") - 1
    ceil = np.minimum(np.searchsorted(points, magnitude, side="left"), 126)
    np.testing.assert_array_equal(low, np.where(negative, -ceil, floor))
    np.testing.assert_array_equal(high, np.where(negative, -floor, ceil))
    assert low.dtype == high.dtype == np.int8


def test_codes_decode_as_in_ml_dtypes():
    every = np.arange(256, dtype=np.uint8)
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(e4m3.decode(jnp.asarray(every)), want)


def test_no_step_and_nan_give_zero():
    x = jnp.array([1.0, -3.0, jnp.inf, jnp.nan, -0.0])
    for step in (0.0, jnp.nan):
        np.testing.assert_array_equal(round_nearest(x, jnp.full(5, step)), np.zeros(5))
        np.testing.assert_array_equal(bracket(x, jnp.full(5, step)), np.zeros((2, 5)))
    np.testing.assert_array_equal(round_nearest(x, jnp.ones(5)), [0x38, 0xC4, 0x7E, 0, 0])
