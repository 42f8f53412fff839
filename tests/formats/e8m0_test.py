"""Oracle: the rules in exact arithmetic, on fractions of integers and powers of two."""

import fractions
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.formats import e8m0

ELEMENTS = {"e2m1": (6.0, 1), "e4m3": (448.0, 3)}
Fraction = fractions.Fraction


def log2_floor(x):
    """floor(log2 x) of a positive fraction, in integers."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def exponent(amax, rule, maximum, mantissa_bits):
    """The exponent of the scale as the rule's words say, before clamping."""
    x, power = Fraction(float(amax)), log2_floor(Fraction(maximum))
    if rule == "floor":
        return log2_floor(x) - power
    if rule == "ceil":
        return -log2_floor(1 / x) - power
    if rule == "round_up":
        return -log2_floor(Fraction(maximum) / x)
    unit = Fraction(2) ** (log2_floor(x) - mantissa_bits)  # "even": round the magnitude first
    steps, rest = divmod(x, unit)
    up = rest > unit / 2 or (rest == unit / 2 and steps % 2 == 1)
    return log2_floor((steps + up) * unit) - power


def scale_bytes(amax, rule, element):
    maximum, mantissa_bits = ELEMENTS[element]
    call = jax.jit(
        lambda a: e8m0.scale_bytes(a, rule, maximum=maximum, mantissa_bits=mantissa_bits)
    )
    return np.asarray(call(jnp.asarray(amax, jnp.float32)))


def samples():
    """Thresholds of every rule, one ulp beside them, over the range; powers of two, random."""
    mantissas = [1, 1.25, 1.49, 1.5, 1.5625, 1.74, 1.75, 1.875, 1.9375, 1.96875, 1.999]
    base = np.array(mantissas, np.float32)
    x = (base[:, None] * np.float32(2.0) ** np.arange(-126, 128, 3, dtype=np.float32)).reshape(-1)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    rng = np.random.default_rng(0)
    bits = rng.integers(0x00800000, 0x7F800000, 500, dtype=np.uint32)
    x = np.concatenate([x, bits.view(np.float32), np.float32([3.4028235e38])])
    return x[(x >= 2.0**-126) & np.isfinite(x)]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", e8m0.RULES)
def test_the_byte_is_the_one_of_the_rule_in_exact_arithmetic(rule, element):
    x = samples()
    want = [max(0, exponent(a, rule, *ELEMENTS[element]) + 127) for a in x]
    np.testing.assert_array_equal(scale_bytes(x, rule, element), want)


def test_the_four_rules_on_a_handful_by_hand():
    """amax 6, 6 + ulp, 7, 8 - ulp, 8 with E2M1: a scale of 1 is byte 127."""
    x = np.array([4, np.nextafter(np.float32(6), 9), 6, 7, np.nextafter(np.float32(8), 0), 8])
    for rule, want in {
        "floor": [127, 127, 127, 127, 127, 128],
        "ceil": [127, 128, 128, 128, 128, 128],
        "even": [127, 127, 127, 128, 128, 128],
        "round_up": [127, 128, 127, 128, 128, 128],
    }.items():
        np.testing.assert_array_equal(scale_bytes(x, rule, "e2m1"), want)


@pytest.mark.parametrize("rule", e8m0.RULES)
def test_zero_and_subnormal_blocks_get_byte_0_and_what_is_not_finite_0xff(rule):
    x = np.array([0.0, 1e-45, 1.1e-38, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(scale_bytes(x, rule, "e2m1"), [0, 0, 0, 255, 255])


def test_bytes_have_their_values_but_0_which_is_zero_and_0xff_which_is_nan():
    every = np.arange(256, dtype=np.uint8)
    got = np.asarray(e8m0.scale_value(jnp.asarray(every)))
    want = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(got[1:], want[1:])
    assert got[0] == 0 and want[0] == 2.0**-127 and math.isnan(got[255])


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"e8m0: rule: got nearest, need one of \['floor', 'ceil'"):
        e8m0.scale_bytes(jnp.ones(1), "nearest", maximum=6.0, mantissa_bits=1)
