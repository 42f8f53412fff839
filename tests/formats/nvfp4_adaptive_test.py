"""Oracle: both candidates of every block, with errors in Python integers and in fractions."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats import nvfp4, nvfp4_adaptive

RULES = nvfp4_adaptive.RULES
E4M3 = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


def quantize(x, rule, global_=None):
    """(codes, scale bytes, values) of rows under a given global scale, or none."""
    form = nvfp4.NVFP4(scale_rule=rule, global_rule="amax" if global_ is not None else "one")

    @jax.jit
    def parts(x, g):
        codes, scales = form.quantize_rows(x, g)
        return codes, scales, form.dequantize_rows(codes, scales, g)

    g = None if global_ is None else jnp.full((1, 1), global_, jnp.float32)
    return [np.asarray(a) for a in parts(jnp.asarray(x, jnp.float32), g)]


def candidate(block, top, g):
    """(scale byte, values) of 16 numbers mapped to `top`, by search in float64."""
    exact = np.float64(top) * E4M3.astype(np.float64) * np.float64(g)
    peak = min(np.float64(np.abs(block).max()), exact[-1])
    distance = np.abs(peak - exact)
    byte = min(np.flatnonzero(distance == distance.min()), key=lambda b: b % 2)
    step = np.float32(E4M3[byte] * np.float32(g))
    points = E2M1.astype(np.float64) * np.float64(step)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # even codes first
    gaps = np.abs(np.minimum(np.abs(block), points[-1])[:, None] - points[order])
    return int(byte), E2M1[np.array(order)[np.argmin(gaps, axis=-1)]] * step


def errors(block, values, rule, number):
    """The error in the given kind of number: an integer on the block's grid, or a fraction."""
    each = [
        abs(number(abs(float(x))) - number(float(v))) for x, v in zip(block, values, strict=True)
    ]
    return {"mse": sum(e * e for e in each), "mae": sum(each), "abs_max": max(each)}[rule]


def draws(seed, blocks):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, size=(blocks, 16)).astype(np.float32)
    x[::3] = np.round(x[::3] * 8) / 8
    return x


@pytest.mark.parametrize("rule", RULES)
def test_the_choice_is_the_smaller_error_in_integers_and_in_real_numbers(rule):
    x, g = draws(0, 300), np.float32(0.01734)
    _, scales, values = quantize(x, rule, g)
    fours = 0
    for block, byte, value in zip(x, scales[:, 0], values, strict=True):
        (six, at_six), (four, at_four) = candidate(block, 6, g), candidate(block, 4, g)
        unit = 2.0 ** (math.floor(math.log2(np.abs(block).max())) - 23)

        def on_grid(v, unit=unit):
            return math.floor(v / unit)

        takes_four = errors(block, at_four, rule, on_grid) < errors(block, at_six, rule, on_grid)
        assert byte == (four if takes_four else six)
        np.testing.assert_array_equal(np.abs(value), at_four if takes_four else at_six)
        real = [errors(block, v, rule, fractions.Fraction) for v in (at_six, at_four)]
        if abs(real[0] - real[1]) > max(real) * fractions.Fraction(1, 2**16):
            assert takes_four == (real[1] < real[0])
        fours += takes_four
    assert 50 < fours < 250


@pytest.mark.parametrize("rule", RULES)
def test_an_equal_error_keeps_six_and_the_least_difference_decides(rule):
    """12 fits both scales, 2 and 3; 7 errs by 1 under both: what follows breaks the tie."""
    rest = {"tie": 0.0, "four": 1.5, "six": 2.0}  # 1.5 is on the grid of 3, 2 on that of 2
    for name, value in rest.items():
        block = np.zeros((1, 16))
        block[0, :2] = 12, -7
        block[0, 2:6] = value
        _, scales, _ = quantize(block, rule)
        # abs_max sees the 1 of the 7 whatever follows
        six = name != "four" or rule == "abs_max"
        assert E4M3[scales[0, 0]] == (2 if six else 3)
    block = np.zeros((1, 16), np.float32)
    block[0, :2] = 12, np.nextafter(np.float32(10.5), np.float32(12))  # 12 is 1.5 away, 9 more
    _, scales, _ = quantize(block, rule)
    assert E4M3[scales[0, 0]] == 2
    block[0, :2] = 12, 10.0  # a tie under 2: 8, errs by 2; under 3: 9
    assert E4M3[quantize(block, rule)[1][0, 0]] == 3


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_values_and_a_power_of_two_do_not_change_the_choice(rule):
    """Float sums in another order would, at near ties; integer sums cannot."""
    x = np.round(draws(1, 400) * 4) / 4
    turned = np.random.default_rng(2).permuted(x, axis=-1)
    _, scales, _ = quantize(x, rule, 2.0**-5)
    np.testing.assert_array_equal(scales, quantize(turned, rule, 2.0**-5)[1])
    np.testing.assert_array_equal(scales, quantize(x * 2.0**40, rule, 2.0**35)[1])


def test_a_block_with_the_largest_value_of_the_tensor_can_take_four():
    """With M = 448 its scale would be 672, beyond E4M3; with 256 it is 384."""
    x = np.zeros((1, 16), np.float32)
    x[0, :4] = 40, 30, 20, 10  # exact when 40 is 4
    form = nvfp4.NVFP4(scale_rule="mse")
    g = form.global_scale(jnp.full((1, 1), 40.0))
    assert g.item() == np.float32(40) * np.float32(1 / 1536)
    _, scales, values = quantize(x, "mse", g.item())
    assert E4M3[scales[0, 0]] == 384
    np.testing.assert_allclose(values[0, :4], x[0, :4], rtol=2.0**-22)


def test_sums_of_squares_are_exact_up_to_the_largest_that_can_occur():
    """256 errors of 2^24 - 1, a tile of 16 x 16, against Python's integers."""
    most = 2**24 - 1
    for values in ([most] * 256, [most] * 255 + [most - 1], [1] * 256, [4095, 4096, 4097] * 5):
        e = np.array(values, np.uint32)
        high, low = e >> 12, e & 0xFFF
        parts = [np.sum(p, dtype=np.uint32) for p in (high * high, high * low, low * low)]
        top, rest = nvfp4_adaptive._whole(tuple(jnp.asarray(p)[None] for p in parts))
        assert int(top[0]) * 2**24 + int(rest[0]) == sum(v * v for v in values)
    a, b = (tuple(jnp.full(1, n, jnp.uint32) for n in (3, 0, last)) for last in (5, 6))
    assert bool(nvfp4_adaptive.less(a, b)) and not bool(nvfp4_adaptive.less(b, a))
    assert not bool(nvfp4_adaptive.less(a, a))


def test_four_over_six_errs_less_than_plain_nvfp4_and_a_tile_chooses_once():
    x = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
    plain = nvfp4.NVFP4()
    g = plain.global_scale(jnp.max(jnp.abs(jnp.asarray(x))).reshape(1, 1))
    codes, scales = jax.jit(plain.quantize_rows)(jnp.asarray(x), g)
    six = np.asarray(jax.jit(plain.dequantize_rows)(codes, scales, g))
    both = quantize(x, "mse", np.abs(x).max() / 1536)[2]
    assert np.mean((both - x) ** 2) < 0.9 * np.mean((six - x) ** 2)


def test_sums_of_squares_are_compared_as_whole_numbers():
    """Every pair of errors as Python integers, near the places where words carry over."""
    rng = np.random.default_rng(0)
    edges = [0, 1, 4095, 4096, 5119, 5120, 2**23 - 1, 2**23, 2**24 - 1]
    errors = [np.array([a, b]) for a in edges for b in edges]
    errors += [rng.integers(0, 2**24, 2) for _ in range(100)]
    errors = np.array(errors, np.int64)
    high, low = errors >> 12, errors & 0xFFF
    products = (high * high, high * low, low * low)
    parts = [jnp.asarray(p.sum(-1).astype(np.uint32)) for p in products]
    exact = [int((e.astype(object) ** 2).sum()) for e in errors]
    count = len(exact)
    rows = [jnp.repeat(p, count) for p in parts]
    columns = [jnp.tile(p, count) for p in parts]
    got = jax.jit(nvfp4_adaptive.less)(tuple(rows), tuple(columns))
    want = [a < b for a in exact for b in exact]
    np.testing.assert_array_equal(got, want)
