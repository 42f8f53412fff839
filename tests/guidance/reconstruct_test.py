"""Properties of guided rounding, for every 4-bit format. Oracle: float64 search over the codebook.

Values are random and, on purpose, ties, codewords, zeros, saturated ones and tiny ones.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.guidance import codec
from trace_jax.guidance.record import Coding
from trace_jax.qat import sites
from trace_jax.qat.sites import Site

# The magnitudes of each codebook, written out; code = sign << 3 | position
MAGNITUDES = {
    "e2m1": (0, 0.5, 1, 1.5, 2, 3, 4, 6),
    "s1p2": (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75),
}
FOUR_BIT = [n for n, f in sorted(formats.registry.FORMATS.items()) if f.element.BITS == 4]
NAMES = [*FOUR_BIT, "nvfp4:global_rule=one", "nvfp4:global_rule=pow2", "4over6", "mxfp4:rule=ceil"]
WIDTH, ROWS = 256, 48


@functools.cache
def codebook(format):
    """(codes, values) of the 15 codewords, by value."""
    m = np.array(MAGNITUDES[format.element.__name__.rpartition(".")[2]], np.float64)
    codes = np.r_[np.arange(15, 8, -1), np.arange(8)]
    return codes, np.where(codes >= 8, -m[codes & 7], m[codes & 7])


@functools.lru_cache
def case(name, seed=0):
    """The rollout's rows and the trainer's, which differ a little, a lot, or sit on a boundary."""
    format, rng = formats.get(name), np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, WIDTH)) * np.exp(2 * rng.standard_normal((ROWS, 1)))
    x[3], x[4, :64], x[5] = 0, 0, x[5] * 1e-30
    x = jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
    codes, scales, g = (np.asarray(a) if a is not None else None for a in own(x, format))
    steps = np.asarray(format.spread(format.steps(jnp.asarray(scales), as_jax(g))))
    noise = rng.standard_normal(x.shape) * np.r_[np.full(16, 0.01), np.full(32, 0.6)][:, None]
    y = np.asarray(x) + noise * steps
    _, values = codebook(format)
    low = rng.integers(0, 14, x.shape)
    ties = (values[low] + values[low + 1]) / 2 * steps
    pick = rng.integers(0, 12, x.shape)
    y = np.select(
        [pick == 0, pick == 1, pick == 2, pick == 3], [ties, values[low] * steps, 0 * y, 9 * y], y
    )
    y = y.astype(np.float32)
    # where a codeword or tie is not exact in float32, the library decides by its float32 product
    return format, y, codes, scales, g, steps


@functools.partial(jax.jit, static_argnames="format")
def own(x, format):
    return sites.own_rounding(x, format)


def as_jax(a):
    return None if a is None else jnp.asarray(a)


@functools.partial(jax.jit, static_argnames=("format", "kind"))
def guided(y, codes, scales, g, format, kind):
    """Codes that guided rounding chooses, through a record."""
    coding = Coding(kind=kind)
    record = codec.encode(codes, scales, g, format=format, coding=coding)
    out = codec.decode(record, y, format=format, coding=coding)
    site = Site(format=format, kind=kind)
    return sites.guided_codes(y, out.values, format.spread(out.steps), site)


def guided_codes(name, kind):
    format, y, codes, scales, g, _ = case(name)
    return np.asarray(
        guided(jnp.asarray(y), as_jax(codes), as_jax(scales), as_jax(g), format, kind)
    )


def positions(format, codes):
    """Place of each code in the order of values."""
    order, _ = codebook(format)
    place = np.full(16, -1)
    place[order] = np.arange(15)
    got = place[codes]
    assert (got >= 0).all()  # minus zero is never written
    return got


def bracket(name):
    """Places of the codewords around each value, by float64 search; equal where it is one."""
    format, y, _, _, _, steps = case(name)
    _, values = codebook(format)
    grid = (values.astype(np.float32) * steps[..., None]).astype(np.float32)  # as the format says
    low = np.clip((grid <= y[..., None]).sum(-1) - 1, 0, 14)
    high = np.clip(15 - (grid >= y[..., None]).sum(-1), 0, 14)
    zero = positions(format, np.zeros(y.shape, int))
    return np.where(steps > 0, low, zero), np.where(steps > 0, high, zero)


@pytest.mark.parametrize("name", NAMES)
def test_full_codes_choose_the_bracket_member_nearest_to_the_rollouts(name):
    format, _, codes, _, _, _ = case(name)
    low, high = bracket(name)
    _, values = codebook(format)
    target = values[positions(format, codes)]
    nearer_high = np.abs(values[high] - target) < np.abs(values[low] - target)
    got = positions(format, guided_codes(name, "codes"))
    np.testing.assert_array_equal(got, np.where(nearer_high, high, low))


@pytest.mark.parametrize("name", NAMES)
def test_mantissa_guidance_is_full_guidance_wherever_the_code_lies_in_the_bracket(name):
    format, _, codes, _, _, _ = case(name)
    low, high = bracket(name)
    place = positions(format, codes)
    inside = (low <= place) & (place <= high)
    assert 0.2 < inside.mean() < 0.98  # the data has both
    full, bits = guided_codes(name, "codes"), guided_codes(name, "mantissa")
    np.testing.assert_array_equal(bits[inside], full[inside])
    np.testing.assert_array_equal(full[inside], codes[inside])
    np.testing.assert_array_equal((bits & 1)[low != high], (codes & 1)[low != high])


@pytest.mark.parametrize("name", NAMES)
def test_guided_is_never_farther_from_the_rollout_than_plain_rounding_on_its_scale(name):
    format, y, codes, _, _, steps = case(name)
    round_nearest = jax.jit(format.element.round_nearest)
    plain = np.asarray(round_nearest(jnp.asarray(y), jnp.asarray(steps)))
    _, values = codebook(format)
    target = values[positions(format, codes)]
    far_guided = np.abs(values[positions(format, guided_codes(name, "codes"))] - target)
    far_plain = np.abs(values[positions(format, plain)] - target)
    assert (far_guided <= far_plain).all()
    assert far_guided.mean() < 0.95 * far_plain.mean()  # and it helps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["codes", "mantissa"])
def test_guided_codes_are_always_members_of_the_bracket(name, kind):
    format, _, _, _, _, _ = case(name)
    low, high = bracket(name)
    got = positions(format, guided_codes(name, kind))
    assert ((got == low) | (got == high)).all()
