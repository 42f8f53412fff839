"""Oracle: numpy, whose float32 division is the processor's, correctly rounded (IEEE 754)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats.division import divide

quotient = jax.jit(divide)
SPECIAL = np.array(
    [0.0, 1e-45, 2.0**-149, 1e-40, 2.0**-126, 1.0, 1.5, 3.0, 2688.0, 3.4028235e38, np.inf, np.nan],
    np.float32,
)


def assert_equal_bits(a, b):
    with np.errstate(all="ignore"):
        want = a / b
    got = np.asarray(quotient(jnp.asarray(a), jnp.asarray(b)))
    same = got.view(np.uint32) == want.view(np.uint32)
    wrong = np.flatnonzero(~(same | (np.isnan(got) & np.isnan(want))))
    assert wrong.size == 0, (a[wrong[:3]], b[wrong[:3]], got[wrong[:3]], want[wrong[:3]])


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 2**32),  # any bits: every exponent, both signs, NaN, Inf, subnormal quotients
        (0x3F800000, 0x40000000),  # 1..2: every rounding of the significand
        (0, 0x01000000),  # around the smallest normal number
        (0x7E800000, 0x7F800001),  # up to Inf
    ],
)
def test_a_quotient_has_the_bits_that_ieee_division_gives(low, high):
    rng = np.random.default_rng(0)
    a = rng.integers(low, high, 1 << 19, dtype=np.uint32).view(np.float32)
    assert_equal_bits(a, rng.integers(low, high, 1 << 19, dtype=np.uint32).view(np.float32))
    assert_equal_bits(a, rng.integers(0, 2**32, 1 << 19, dtype=np.uint32).view(np.float32))


def test_every_significand_divided_by_a_few_and_a_few_by_every_one():
    """All 2^23 would take a second each; every 16th, and those next to a power of two."""
    some = np.concatenate([np.arange(0, 1 << 23, 16), np.arange(64), (1 << 23) - 1 - np.arange(64)])
    every = (some.astype(np.uint32) + 0x3F800000).view(np.float32)
    for other in (3.0, 6.0, 2688.0, 448.0, float(np.float32(1) / np.float32(3))):
        assert_equal_bits(every, np.full_like(every, other))
        assert_equal_bits(np.full_like(every, other), every)


def test_ends_and_signs():
    for sign_a in (1, -1):
        for sign_b in (1, -1):
            a, b = np.meshgrid(sign_a * SPECIAL, sign_b * SPECIAL)
            assert_equal_bits(a.reshape(-1), b.reshape(-1))


def test_operands_are_broadcast_and_eager_is_the_same():
    a = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    got = divide(jnp.asarray(a), jnp.float32(2688))
    np.testing.assert_array_equal(got, a / np.float32(2688))
    np.testing.assert_array_equal(got, quotient(jnp.asarray(a), jnp.float32(2688)))


def test_no_float_division_is_compiled():
    text = quotient.lower(jnp.ones(8), jnp.ones(8)).compile().as_text()
    assert "f32[8]{0} divide" not in text and "u32[8]{0} divide" in text
