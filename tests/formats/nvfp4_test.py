"""Oracle: the specification in the head of `formats/nvfp4.py`, written again in numpy.

Values of E4M3 come from ml_dtypes; the nearest one, and the nearest E2M1 code, from a search over
all in float64, except at a tie: that is where the specification's float32 product is met exactly.
"""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.formats import nvfp4

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
RULES = ["amax", "pow2", "one"]


def f32(x):
    return np.float32(x)


@jax.jit
def global_of_rows(x):
    amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return {rule: nvfp4.global_scale(amax, rule) for rule in RULES}


FORMAT = nvfp4.NVFP4()
quantize_rows = jax.jit(FORMAT.quantize_rows)
dequantize_rows = jax.jit(FORMAT.dequantize_rows)


def library(x, rule):
    """(codes, scale bytes, global scales, values) as numpy."""
    x = jnp.asarray(x)
    g = global_of_rows(x)[rule]
    codes, scales = quantize_rows(x, g)
    return tuple(np.asarray(a) for a in (codes, scales, g, dequantize_rows(codes, scales, g)))


def oracle_global(amax, rule):
    if rule == "one":
        return f32(1)
    if amax == 0 or not np.isfinite(amax):
        return f32(1)
    g = f32(max(f32(amax), f32(2.0**-100)) * f32(1 / 2688))
    return g if rule == "amax" else f32(2.0 ** math.ceil(math.log2(float(g))))


def oracle_scale(amax, g):
    """The byte of the E4M3 value nearest to amax / 6g; a tie is where amax == fl(6 mid g)."""
    middles = (E4M3[:-1] + E4M3[1:]) / 2
    ties = np.flatnonzero((6 * middles).astype(np.float32) * g == amax)
    if ties.size:
        low = int(ties[0])
        return low if low % 2 == 0 else low + 1
    exact = 6 * E4M3 * np.float64(g)
    return int(np.argmin(np.abs(min(np.float64(amax), exact[-1]) - exact)))


def oracle_block(x, g):
    """(codes, byte, values) of 16 numbers."""
    byte = oracle_scale(np.max(np.abs(x)), g)
    step = f32(f32(E4M3[byte]) * g)
    if step == 0:
        return np.zeros(16, np.uint8), byte, np.zeros(16, np.float32)
    magnitude = np.minimum(np.abs(x), f32(6) * step)
    distance = np.abs(magnitude.astype(np.float64)[:, None] - E2M1 * np.float64(step))
    code = np.argmin(distance, axis=-1)
    for low, middle in enumerate((E2M1[:-1] + E2M1[1:]) / 2):
        code = np.where(magnitude == f32(middle) * step, low + low % 2, code)
    values = np.copysign((E2M1[code].astype(np.float32) * step).astype(np.float32), x)
    return np.where((x < 0) & (code > 0), code | 8, code), byte, np.where(code > 0, values, 0)


def oracle(x, rule):
    """As `library`, block by block."""
    rows, width = x.shape
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    scales = np.zeros((rows, width // 16), np.uint8)
    globals_ = np.array([[oracle_global(np.max(np.abs(row)), rule)] for row in x])
    for r in range(rows):
        for n in range(width // 16):
            part = slice(16 * n, 16 * n + 16)
            codes[r, part], scales[r, n], values[r, part] = oracle_block(x[r, part], globals_[r, 0])
    return codes, scales, globals_, values


def scale_ties():
    """Blocks whose maximum is 6 times the middle of two E4M3 values, or one ulp beside it."""
    middles = (6 * (E4M3[:-1] + E4M3[1:]) / 2).astype(np.float32)
    peaks = [middles, np.nextafter(middles, f32(0)), np.nextafter(middles, f32(1e9))]
    rows = np.random.default_rng(1).uniform(-1, 1, (6, 63, 16)).astype(np.float32)
    rows *= np.concatenate(peaks).reshape(6, 63, 1)
    rows[..., 3] = np.concatenate(peaks).reshape(6, 63)
    return rows.reshape(6, -1)


def adversarial():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(16, 64)).astype(np.float32)
    x[0] = 0  # a zero row
    x[1, 16:32] = 0  # a zero block
    x[2, 5] = 3e4  # one huge outlier: its neighbours' scales become subnormal or zero
    x[3] *= f32(1e30)
    x[4] *= f32(1e-30)
    x[5, :16] *= f32(1e-6)
    x[6] = np.round(x[6] * 4) / 4  # many ties
    x[7] *= np.repeat(f32(2.0) ** np.arange(-12, 0, 3), 16).astype(np.float32)
    x[8] = 448 * 6  # the largest representable, everywhere
    x[9] *= f32(1e4)
    x[10, 7] = -1e38
    x[11] = f32(2.0**-126)
    x[12] = np.where(x[12] < 0, -0.0, 0.0)
    return x


def drawn(dtype, seed=3):
    x = np.random.default_rng(seed).standard_t(3, size=(24, 64))
    return x.astype(np.float32).astype(dtype).astype(np.float32)


DATA = {
    "float32": lambda: drawn(np.float32),
    "bfloat16": lambda: drawn(ml_dtypes.bfloat16),
    "adversarial": adversarial,
    "scale ties": scale_ties,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("data", DATA)
def test_quantising_follows_the_specification_bit_for_bit(data, rule):
    x = DATA[data]()
    names = ("codes", "scales", "global", "values")
    for name, got, want in zip(names, library(x, rule), oracle(x, rule), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_block_scales_at_a_tie_of_a_full_mantissa_global_scale_are_even():
    """amax == fl(6 mid g), which need not be a tie of the reals, and one ulp to either side."""
    g = np.random.default_rng(4).uniform(0.5, 2, (8, 1)).astype(np.float32)
    middles = (3 * (E4M3[:-1] + E4M3[1:])).astype(np.float32)
    tie = middles * g
    low = np.broadcast_to(np.arange(126), tie.shape)
    for amax, want in [
        (tie, low + low % 2),
        (np.nextafter(tie, f32(0)), low),
        (np.nextafter(tie, f32(np.inf)), low + 1),
    ]:
        got = jax.jit(nvfp4.block_scales)(jnp.asarray(amax), jnp.asarray(g))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_products_keep_their_order_in_whatever_the_compiler_makes_of_them(blocks, shared):
    """XLA moves a constant to the smaller factor: mid * (s * g) would become s * (mid * g).

    Values at fl(mid * fl(s * g)) and next to it tell the two apart, under 300 global scales; some
    tie of the other order is indeed elsewhere.
    """
    rng = np.random.default_rng(7)
    shape = (1, 1) if shared else (300, 1)
    g = rng.uniform(0.5, 1, shape).astype(np.float32)
    byte = rng.integers(8, 126, (300, blocks))
    scale = E4M3[byte].astype(np.float32)
    step = (scale * g)[..., None]
    middles = (f32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))[None, None]
    tie = middles * step
    moved = scale[..., None] * (middles * g[..., None])
    assert np.any(tie != moved)
    low = np.broadcast_to(np.arange(7), tie.shape)
    for x, want in [
        (tie, low + low % 2),
        (np.nextafter(tie, f32(0)), low),
        (np.nextafter(tie, f32(np.inf)), low + 1),
    ]:
        full = np.concatenate([f32(6) * step, x, np.zeros((300, blocks, 8), np.float32)], axis=-1)
        codes, scales = quantize_rows(jnp.asarray(full.reshape(300, -1)), jnp.asarray(g))
        np.testing.assert_array_equal(scales, byte)
        got = np.asarray(codes).reshape(300, blocks, 16)
        np.testing.assert_array_equal(got[..., 1:8], want)
        values = np.asarray(dequantize_rows(codes, scales, jnp.asarray(g)))
        by_hand = E2M1.astype(np.float32)[got] * step
        np.testing.assert_array_equal(values.reshape(by_hand.shape), by_hand)


def test_eager_and_compiled_agree():
    x, rule = jnp.asarray(adversarial()), "pow2"  # "amax" is on its way
    amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    g = nvfp4.global_scale(amax, rule)
    codes, scales = FORMAT.quantize_rows(x, g)
    values = FORMAT.dequantize_rows(codes, scales, g)
    for got, want in zip((codes, scales, g, values), library(x, rule), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rule", RULES)
def test_finite_input_never_gets_a_nan_or_negative_scale(rule):
    x = np.random.default_rng(5).integers(0, 2**32, (64, 64), np.uint32).view(np.float32)
    # 7 % below the largest float32: closer to it, 6 * step can itself overflow
    x = np.where(np.abs(x) < 3.1e38, x, f32(0))
    codes, scales, g, values = library(x, rule)
    assert scales.max() <= 0x7E
    assert np.all(np.isfinite(values)) and np.all(g > 0)
    assert not np.any(codes == 8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_block_that_is_not_finite_decodes_to_nan_and_only_that_block(bad, rule):
    """Its row falls back to a global scale of 1 under every rule; the other rows see nothing."""
    x = drawn(np.float32)
    clean = library(x, rule)
    x[2, 20] = bad
    codes, scales, g, values = library(x, rule)
    assert scales[2, 1] == 0x7F and np.all(np.isnan(values[2, 16:32]))
    assert np.sum(np.isnan(values)) == 16 and g[2, 0] == 1
    rest = np.delete(x[2], np.s_[16:32])[None]
    np.testing.assert_array_equal(np.delete(values[2], np.s_[16:32])[None], oracle(rest, "one")[3])
    for got, want in zip((codes, scales, g, values), clean, strict=True):
        np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(want, 2, axis=0))


def test_zero_rows_have_a_scale_of_zero_and_a_global_scale_of_one():
    for rule in RULES:
        codes, scales, g, values = library(np.zeros((2, 32), np.float32), rule)
        assert not codes.any() and not scales.any() and not values.any()
        np.testing.assert_array_equal(g, np.ones((2, 1)))


def test_a_block_far_below_its_row_flattens_to_zero_with_a_scale_that_shows_it():
    """E4M3 ends at 2**-9: under "amax" a block below amax / 2**18 or so has no scale left."""
    x = np.ones((1, 32), np.float32)
    for ratio, zero in [(2.0**-20, True), (2.0**-15, False)]:
        x[0, 16:] = ratio
        _, scales, _, values = library(x, "amax")
        assert (scales[0, 1] == 0) == zero
        assert np.all((values[0, 16:] == 0) == zero)


@pytest.mark.parametrize("amax", [1e-45, 1e-35, 2.0**-100, 3.7e-5, 1.0, 2688.0, 2689.0, 3.4e38])
def test_pow2_global_scale_is_the_least_power_of_two_that_covers_the_maximum(amax):
    g = nvfp4.global_scale(jnp.array([amax], jnp.float32), "pow2")[0]
    plain = nvfp4.global_scale(jnp.array([amax], jnp.float32), "amax")[0]
    mantissa, _ = math.frexp(float(g))
    assert mantissa == 0.5
    assert float(g) / 2 < float(plain) <= float(g)


@pytest.mark.parametrize("rule", ["pow2", "one"])
def test_values_are_exact_in_bf16_if_the_global_scale_is_a_power_of_two(rule):
    """Four significant bits of the scale times two of the code: bf16 has eight."""
    for x in (drawn(np.float32), adversarial()):
        values = library(x, rule)[3]
        np.testing.assert_array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float32), values)


def test_values_need_not_be_exact_in_bf16_under_amax():
    values = library(drawn(np.float32), "amax")[3]
    assert np.any(values.astype(ml_dtypes.bfloat16).astype(np.float32) != values)


@pytest.mark.parametrize("rule", RULES)
def test_the_error_is_at_most_a_sixth_of_the_block_maximum(rule):
    """Between 4 and 6 a value is off by one step at most, and the step is amax / 6 within 2**-4."""
    x = drawn(np.float32)
    values = library(x, rule)[3]
    amax = np.max(np.abs(x.reshape(24, 4, 16)), axis=-1, keepdims=True)
    error = np.abs(values - x).reshape(24, 4, 16)
    assert np.all(error <= amax / 6 * (1 + 2.0**-4))


def test_scale_bytes_have_the_values_of_e4m3():
    every = np.arange(256, dtype=np.uint8)
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(nvfp4.scale_value(jnp.asarray(every)), want)


def test_a_step_without_global_scale_is_the_scale_itself():
    scales = jnp.arange(127, dtype=jnp.uint8)[None]
    ones = jnp.ones((1, 1), jnp.float32)
    np.testing.assert_array_equal(FORMAT.steps(scales, None), FORMAT.steps(scales, ones))


def test_the_scale_cast_is_barred_and_excess_precision_changes_nothing():
    """The one cast to E4M3 stands behind a barrier; XLA:GPU would otherwise fold it away."""
    x = jnp.asarray(drawn(np.float32))
    g = global_of_rows(x)["amax"]
    eqns = jax.make_jaxpr(nvfp4.block_scales)(FORMAT.block_amax(x), g).eqns
    narrow = [v for e in eqns for v in e.outvars if v.aval.dtype == jnp.float8_e4m3fn]
    barred = [e for e in eqns if str(e.primitive) == "optimization_barrier"]
    assert len(narrow) == 2 and barred[0].invars[0] is narrow[0]
    want = quantize_rows(x, g)
    for excess in (True, False):
        options = {"xla_allow_excess_precision": excess}
        program = jax.jit(FORMAT.quantize_rows).lower(x, g).compile(compiler_options=options)
        jax.tree.map(np.testing.assert_array_equal, program(x, g), want)


def test_errors_name_the_width_and_the_rule():
    with pytest.raises(ValueError, match=r"last axis of x: got 24, need a multiple of 16\. Fix:"):
        FORMAT.block_amax(jnp.zeros((2, 24)))
    with pytest.raises(ValueError, match=r"global_rule: got max, need one of \['amax', 'pow2', 'o"):
        nvfp4.global_scale(jnp.ones(1), "max")
    with pytest.raises(ValueError, match=r"nvfp4: block_shape: got 8x8, need one of \['1x16', "):
        nvfp4.NVFP4(block_shape="8x8")
    with pytest.raises(ValueError, match=r"convention te: got amax, mse, need global_rule amax"):
        nvfp4.NVFP4(convention="te", scale_rule="mse")
    tiles = nvfp4.NVFP4(block_shape="16x16")
    with pytest.raises(ValueError, match=r"16x16: got 1 axis, need rows of two axes or more"):
        tiles.quantize_rows(jnp.zeros(16), None)
    with pytest.raises(ValueError, match=r"got a global scale for each row, need one global scale"):
        tiles.quantize_rows(jnp.zeros((4, 16)), jnp.ones((4, 1)))


def test_a_tile_has_one_scale_whichever_way_the_matrix_lies():
    """So W and its transpose have the same values, and any reader of 1 x 16 blocks takes both."""
    x = np.random.default_rng(6).standard_t(3, size=(48, 64)).astype(np.float32)
    tiles = jax.jit(lambda x, g: nvfp4.NVFP4(block_shape="16x16").quantize_rows(x, g))
    g = jnp.asarray(oracle_global(np.abs(x).max(), "amax")).reshape(1, 1)
    codes, scales = tiles(jnp.asarray(x), g)
    turned, turned_scales = tiles(jnp.asarray(x.T), g)
    np.testing.assert_array_equal(codes, np.asarray(turned).T)
    each = np.asarray(scales).reshape(3, 16, 4)
    assert np.all(each == each[:, :1])
    np.testing.assert_array_equal(each[:, 0], np.asarray(turned_scales).reshape(4, 16, 3)[:, 0].T)
    peaks = np.abs(x.reshape(3, 16, 4, 16)).max(axis=(1, 3))
    for tile in np.ndindex(3, 4):
        assert each[tile[0], 0, tile[1]] == oracle_scale(peaks[tile], np.asarray(g).item())


def test_a_tile_that_is_short_of_rows_takes_what_there_is():
    x = drawn(np.float32)[:20]
    tiles = jax.jit(
        lambda x: nvfp4.NVFP4(block_shape="16x16", global_rule="one").quantize_rows(x, None)
    )
    codes, scales = tiles(jnp.asarray(x))
    padded_codes, padded_scales = tiles(jnp.asarray(np.pad(x, [(0, 12), (0, 0)])))
    np.testing.assert_array_equal(codes, padded_codes[:20])
    np.testing.assert_array_equal(scales, padded_scales[:20])


def test_static_4_maps_the_largest_value_to_four():
    """The specification with T = 4: no code is 6 unless a scale is subnormal or saturated."""
    x = drawn(np.float32)
    four = nvfp4.NVFP4(scale_rule="static_4")
    g = four.global_scale(jnp.float32(np.abs(x).max()).reshape(1, 1))
    assert g.item() == f32(np.abs(x).max()) * f32(1 / 1792)
    codes, scales = jax.jit(four.quantize_rows)(jnp.asarray(x), g)
    want = np.abs(x.reshape(24, 4, 16)).max(-1) / (4 * np.float64(g.item()))
    near = np.argmin(np.abs(E4M3 - want[..., None]), axis=-1)
    np.testing.assert_array_equal(scales, near)
    assert np.max(np.asarray(codes) & 7) == 6
