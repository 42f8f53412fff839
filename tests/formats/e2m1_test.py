"""Oracles: the 16 values written out, a nearest search over them in float64, and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.formats import e2m1

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
SORTED = [-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}  # midpoint -> even code
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
# E4M3's least and greatest value, the paper's 24, a full-mantissa product, a step near the floor
STEPS = [2.0**-9, 448.0, 24.0, 1.0, float(np.float32(13.0) * np.float32(0.0371)), 2.0**-120]

# Compiled as a whole: op by op, each shape would be compiled a dozen times.
round_nearest = jax.jit(e2m1.round_nearest)
bracket = jax.jit(e2m1.bracket)


def nearest_codes(x, step):
    """Float64: the distance to each of the 15 values; of two equally near ones the even code."""
    x = np.clip(np.asarray(x, np.float64), -6.0 * step, 6.0 * step)
    codes = np.array([c for c in range(16) if c != 8])
    codes = codes[np.argsort(codes & 1, kind="stable")]  # even ones first: argmin takes the first
    points = np.array([VALUES[c] for c in codes]) * np.float64(step)
    return codes[np.argmin(np.abs(x[..., None] - points), axis=-1)]


def bracket_by_search(x, step):
    """Places in SORTED of the largest value <= z and the smallest >= z, with z clipped to +-6."""
    points = np.array(SORTED) * np.float64(step)
    z = np.clip(np.asarray(x, np.float64), points[0], points[-1])[..., None]
    low = np.sum(points <= z, axis=-1) - 1
    high = len(SORTED) - np.sum(points >= z, axis=-1)
    return low, high


def random_rows(seed=0, count=4096):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=count) * 4).astype(np.float32)


def test_decode_gives_each_of_the_16_codes_its_value():
    got = e2m1.decode(jnp.arange(16, dtype=jnp.uint8))
    np.testing.assert_array_equal(got, np.array(VALUES, np.float32))
    assert got.dtype == jnp.float32


def test_decode_agrees_with_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(e2m1.decode(jnp.asarray(codes)), theirs)


@pytest.mark.parametrize(("midpoint", "code"), TIES.items())
@pytest.mark.parametrize("step", [1.0, 24.0, 2.0**-9, 0.4375])
def test_a_tie_goes_to_the_even_mantissa_and_its_neighbours_do_not(midpoint, code, step):
    tie = np.float32(midpoint * step)
    below, above = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))
    x = np.array([below, tie, above, -below, -tie, -above], np.float32)
    lower = code if VALUES[code] < midpoint else code - 1
    magnitudes = [lower, code, lower + 1]
    want = magnitudes + [m | 8 if m else 0 for m in magnitudes]
    np.testing.assert_array_equal(round_nearest(jnp.asarray(x), jnp.full(6, step)), want)


@pytest.mark.parametrize("step", STEPS)
def test_every_bf16_value_rounds_as_in_float64(step):
    x = ALL_BF16[np.isfinite(ALL_BF16)]
    got = np.asarray(round_nearest(jnp.asarray(x), jnp.full(x.shape, step, jnp.float32)))
    np.testing.assert_array_equal(got, nearest_codes(x, np.float32(step)))
    assert 8 not in got


def test_every_bf16_value_rounds_as_in_ml_dtypes():
    x = ALL_BF16[~np.isnan(ALL_BF16)]
    got = np.asarray(round_nearest(jnp.asarray(x), jnp.ones(x.shape, jnp.float32)))
    theirs = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(got, np.where(theirs == 8, 0, theirs))


def test_rounding_compares_with_the_float32_product_of_midpoint_and_step():
    """Where midpoint * step is not a float32, its rounded value is the tie: the one definition."""
    rng = np.random.default_rng(1)
    for midpoint, code in TIES.items():
        step = rng.uniform(0.1, 10, 200).astype(np.float32)
        bound = np.float32(midpoint) * step
        upper = code if VALUES[code] > midpoint else code + 1
        for x, want in [
            (bound, code),
            (np.nextafter(bound, np.float32(0)), upper - 1),
            (np.nextafter(bound, np.float32(np.inf)), upper),
        ]:
            got = round_nearest(jnp.asarray(x), jnp.asarray(step))
            np.testing.assert_array_equal(got, np.full(200, want))


def test_rounding_saturates_at_six():
    x = jnp.array([6.0, 6.1, 7.0, 1e30, jnp.inf, -6.1, -1e30, -jnp.inf], jnp.float32)
    got = round_nearest(x, jnp.ones(8, jnp.float32))
    np.testing.assert_array_equal(got, [7, 7, 7, 7, 7, 15, 15, 15])


def test_minus_zero_is_never_written():
    x = jnp.array([-0.0, -1e-30, -0.25, -0.1, -3.0, 0.0], jnp.float32)
    np.testing.assert_array_equal(round_nearest(x, jnp.ones(6)), [0, 0, 0, 0, 13, 0])
    np.testing.assert_array_equal(round_nearest(x, jnp.zeros(6)), np.zeros(6))
    zero = jnp.zeros(1, jnp.uint8)
    np.testing.assert_array_equal(e2m1.with_sign(zero, jnp.ones(1, bool)), [0])


def test_index_orders_codes_by_value_and_comes_back():
    codes = np.array([c for c in range(16) if c != 8], np.uint8)
    index = np.asarray(e2m1.index(jnp.asarray(codes)))
    by_value = sorted(codes, key=lambda c: VALUES[c])
    assert [int(index[list(codes).index(c)]) for c in by_value] == list(range(-7, 8))
    np.testing.assert_array_equal(e2m1.from_index(jnp.asarray(index)), codes)
    assert e2m1.index(jnp.array([8], jnp.uint8))[0] == 0


def test_mantissa_bits_alternate_along_the_sorted_codebook():
    """So of two neighbours exactly one carries a recorded bit (TRACE, compact guidance)."""
    codes = np.asarray(e2m1.from_index(jnp.arange(-7, 8, dtype=jnp.int8)))
    np.testing.assert_array_equal([VALUES[c] for c in codes], SORTED)
    bits = codes & 1
    assert np.all(bits[1:] != bits[:-1])
    np.testing.assert_array_equal(bits[7:], [0, 1, 0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize("step", [1.0, 24.0, 2.0**-9, 448.0])
def test_bracket_is_the_two_codewords_around_z(step):
    midpoints = np.array([*TIES, *(-np.array(list(TIES)))])
    special = np.concatenate([SORTED, midpoints, [6.5, -6.5, 1e30, -1e30, -0.0]]) * step
    x = np.concatenate([random_rows() * np.float32(step), special]).astype(np.float32)
    low, high = bracket(jnp.asarray(x), jnp.full(x.shape, step, jnp.float32))
    want_low, want_high = bracket_by_search(x, step)
    np.testing.assert_array_equal(low, want_low - 7)
    np.testing.assert_array_equal(high, want_high - 7)


def test_bracket_of_a_codeword_is_that_one_value_and_of_others_two_neighbours():
    words = jnp.array(SORTED, jnp.float32) * 24
    low, high = bracket(words, jnp.full(15, 24.0))
    np.testing.assert_array_equal(low, np.arange(-7, 8))
    np.testing.assert_array_equal(high, np.arange(-7, 8))
    for towards in (-np.inf, np.inf):
        beside = np.nextafter(np.asarray(words), np.float32(towards))
        beside[7] = np.copysign(2.0**-126, towards)  # a CPU takes subnormals for zero
        low, high = bracket(jnp.asarray(beside), jnp.full(15, 24.0))
        gap = np.asarray(high) - np.asarray(low)
        np.testing.assert_array_equal(gap, np.where(np.abs(beside) > 144, 0, 1))


def test_the_nearest_codeword_is_always_in_the_bracket():
    x, step = jnp.asarray(random_rows(2)), jnp.full(4096, 0.7, jnp.float32)
    low, high = bracket(x, step)
    index = e2m1.index(round_nearest(x, step))
    assert bool(jnp.all((low <= index) & (index <= high)))


def test_bracket_with_a_step_of_zero_is_zero():
    low, high = bracket(jnp.array([-3.0, 0.0, 1e30]), jnp.zeros(3))
    np.testing.assert_array_equal([low, high], np.zeros((2, 3)))


@pytest.mark.parametrize("step", [1.0, 2.0**-126, 2.0**-140])
def test_what_is_subnormal_counts_as_zero_whether_a_backend_flushes_it_or_not(step):
    """Midpoints times a tiny step flush to 0, and 0 >= 0 holds: without a guard 0 becomes .5."""
    x = jnp.array([0.0, -0.0, 1e-40, -1e-40, 2.0**-127], jnp.float32)
    steps = jnp.full(5, step, jnp.float32)
    np.testing.assert_array_equal(round_nearest(x, steps), np.zeros(5))
    np.testing.assert_array_equal(bracket(x, steps), np.zeros((2, 5)))


def test_pack_puts_the_even_index_in_the_low_nibble():
    codes = round_nearest(jnp.array([0.5, 6.0], jnp.float32), jnp.ones(2))
    np.testing.assert_array_equal(e2m1.pack(codes), [0x71])


def test_pack_agrees_with_the_byte_order_of_a_float4_bitcast():
    codes = np.random.default_rng(3).integers(0, 16, (4, 32)).astype(np.uint8)
    floats = jnp.asarray(codes.view(ml_dtypes.float4_e2m1fn)).reshape(4, 16, 2)
    bytes_ = jax.lax.bitcast_convert_type(floats, jnp.uint8)
    np.testing.assert_array_equal(e2m1.pack(jnp.asarray(codes)), bytes_)


def test_codes_and_bits_survive_packing():
    codes = np.arange(256, dtype=np.uint8)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(8, 64)
    packed = e2m1.pack(jnp.asarray(pairs))
    np.testing.assert_array_equal(np.asarray(packed).reshape(-1), codes)
    np.testing.assert_array_equal(e2m1.unpack(packed), pairs)
    bits = np.unpackbits(codes, bitorder="little").reshape(8, 256)
    packed = e2m1.pack_bits(jnp.asarray(bits))
    np.testing.assert_array_equal(np.asarray(packed).reshape(-1), codes)
    np.testing.assert_array_equal(e2m1.unpack_bits(packed), bits)


def test_rounding_is_comparisons_so_the_compiler_has_no_cast_to_delete():
    """XLA:GPU deletes a cast to float4 and back; the jaxpr and the compiled program compare."""
    x, step = jnp.ones((8, 64)), jnp.ones((8, 64))
    primitives = [str(eqn.primitive) for eqn in jax.make_jaxpr(e2m1.round_nearest)(x, step).eqns]
    # with step > 0, code > 0 and "not subnormal"
    assert (primitives.count("gt"), primitives.count("ge")) == (4 + 2, 3 + 1)
    text = round_nearest.lower(x, step).compile().as_text()
    assert text.count("direction=GE") >= 3 and text.count("direction=GT") >= 4
    assert "f4e2m1" not in text and "divide" not in text
