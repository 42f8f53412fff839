"""Oracles: a search over the codewords written out in float64, and records packed by numpy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.guidance.record import SiteRecord
from trace_jax.qat import sites

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = np.concatenate([E2M1, -E2M1])  # by code
CODES = [c for c in range(16) if c != 8]
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
BYTE_24 = int(np.flatnonzero(E4M3 == 24)[0])
KINDS = ["codes", "mantissa"]


def site_of(rule, kind, ste="plain"):
    return sites.Site(format=formats.get("nvfp4", global_rule=rule), kind=kind, ste=ste)


# Compiled as a whole: op by op, each shape would be compiled a dozen times.
@functools.partial(jax.jit, static_argnames=("rule", "kind", "guided", "ste"))
def quantize_site(x, record, valid, *, rule, kind, guided, ste="plain"):
    return sites.quantize_site(x, record, valid, site_of(rule, kind, ste), guided=guided)


@functools.partial(jax.jit, static_argnames="kind")
def guided_codes(x, recorded, step, *, kind):
    spread = jnp.repeat(step, 16, axis=-1)
    return sites.guided_codes(x, recorded, spread, site_of("one", kind))


def bracket(x, step):
    """(lo, hi): the codewords around clip(x / step, -6, 6), as codes. Exact in float64."""
    z = np.clip(float(x), -6.0 * float(step), 6.0 * float(step))
    low = max((c for c in CODES if VALUES[c] * float(step) <= z), key=lambda c: VALUES[c])
    high = min((c for c in CODES if VALUES[c] * float(step) >= z), key=lambda c: VALUES[c])
    return low, high


def trace_by_hand(x, code, step, kind):
    """TRACE's definition: argmin of |q - q_roll| over the bracket, or the recorded mantissa bit."""
    if step == 0:
        return 0
    pair = bracket(x, step)
    if kind == "codes":
        return min(pair, key=lambda c: abs(VALUES[c] - VALUES[code]))
    matching = [c for c in pair if (c & 1) == (code & 1)]
    return matching[0] if matching else pair[0]


def plain_by_hand(x, step):
    """Nearest, ties to the even code."""
    if step == 0:
        return 0
    z = np.clip(float(x), -6.0 * float(step), 6.0 * float(step))
    return min(CODES, key=lambda c: (abs(VALUES[c] * float(step) - z), c & 1))


def own_scales(x):
    """The nearest E4M3 bytes to max|x_block| / 6, ties to even. Exact in float64."""
    amax = np.abs(x.astype(np.float64)).reshape(len(x), -1, 16).max(-1)
    even_first = np.argsort(np.arange(127) & 1, kind="stable")
    distance = np.abs(amax[..., None] - 6 * E4M3[even_first].astype(np.float64))
    return even_first[np.argmin(distance, axis=-1)].astype(np.uint8)


def record(codes, scales, kind, global_scale=None):
    """Packed by numpy, not by the library."""
    codes = np.asarray(codes, np.uint8)
    nibbles = codes[..., 0::2] | codes[..., 1::2] << 4
    bits = nibbles if kind == "codes" else np.packbits(codes & 1, axis=-1, bitorder="little")
    g = None if global_scale is None else jnp.asarray(global_scale, jnp.float32)
    return SiteRecord(bits=jnp.asarray(bits), scales=jnp.asarray(scales), global_scale=g)


def draw(seed=0, rows=24, width=48, noise=0.02, dtype=ml_dtypes.bfloat16):
    """x of the trainer, and codes and scale bytes that a slightly different rollout chose."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(4, size=(rows, width)).astype(np.float32)
    x[0, :16], x[1, 16:32] = 0, x[1, 16:32] * np.float32(1e-3)
    rollout = x * (1 + noise * rng.normal(size=x.shape))
    scales = own_scales(rollout)
    step = np.repeat(E4M3[scales], 16, axis=-1)
    codes = np.vectorize(plain_by_hand)(rollout, step).astype(np.uint8)
    return x.astype(dtype), codes, scales, step


def every(f, *arrays, kind):
    return np.vectorize(lambda *a: f(*a, kind))(*arrays).astype(np.uint8)


def numbers(stats):
    """(total, count) of agreement, flips, scale_equal, nonfinite."""
    each = (stats.agreement, stats.flips, stats.scale_equal, stats.nonfinite)
    return [(float(mean.total), float(mean.count)) for mean in each]


def everywhere(x):
    return jnp.ones(x.shape[:-1], bool)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_papers_example_rounds_to_one_value_on_both_sides(kind, dtype):
    """60.24 and 59.76 with a block scale of 24: z = 2.51 and 2.49, so plainly 3 and 2."""
    x = np.full((2, 16), 144.0, np.float32)  # the maximum gives a scale of 24 on its own
    x[:, 0] = 60.24, 59.76
    codes = np.full((2, 16), 7)
    codes[:, 0] = 5  # the rollout took 3
    kept = record(codes, np.full((2, 1), BYTE_24, np.uint8), kind)
    options = {"rule": "one", "kind": kind}
    x = jnp.asarray(x, dtype)
    plain, _ = quantize_site(x, kept, everywhere(x), guided=False, **options)
    guided, _ = quantize_site(x, kept, everywhere(x), guided=True, **options)
    np.testing.assert_array_equal(plain[:, 0], [72, 48])
    np.testing.assert_array_equal(guided[:, 0], [72, 72])
    np.testing.assert_array_equal(guided[:, 1:], np.full((2, 15), 144))


@pytest.mark.parametrize("kind", KINDS)
def test_guided_codes_are_the_definition_for_every_recorded_code(kind):
    """All 15 codes against values in, beside and at every interval, on both sides of zero."""
    points = np.sort(np.concatenate([VALUES, VALUES[:-1] + 0.1, VALUES - 0.1, [9, -9, 2.5, -5]]))
    x, codes = (a.reshape(-1) for a in np.meshgrid(points, CODES))
    keep = x.size // 16 * 16
    for step in (24.0, 0.4375, 2.0**-9):
        xs = (x[:keep] * step).astype(np.float32)[None]
        words = codes[:keep].astype(np.uint8)[None]
        told = words if kind == "codes" else words & 1
        steps = np.full((1, keep // 16), step, np.float32)
        got = guided_codes(jnp.asarray(xs), jnp.asarray(told), jnp.asarray(steps), kind=kind)
        np.testing.assert_array_equal(got, every(trace_by_hand, xs, words, step, kind=kind))


def test_guidance_never_increases_the_local_discrepancy():
    """|q_TRACE - q_roll| <= |q_RTN - q_roll| for one scale, whatever the two sides hold."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(200, 160)) * 4).astype(np.float32)
    codes = rng.choice(CODES, size=x.shape).astype(np.uint8)
    steps = rng.choice(E4M3[40:80], size=(200, 10))
    got = guided_codes(jnp.asarray(x), jnp.asarray(codes), jnp.asarray(steps), kind="codes")
    step = np.repeat(steps, 16, axis=-1)
    z = np.clip(x.astype(np.float64) / step, -6, 6)
    plain = np.min(np.abs(VALUES[CODES] - z[..., None]), axis=-1)
    candidates = np.abs(np.abs(VALUES[CODES] - z[..., None]) - plain[..., None]) < 1e-12
    distance = np.abs(VALUES[CODES] - VALUES[codes][..., None])
    best_plain = np.min(np.where(candidates, distance, np.inf), axis=-1)
    ours = np.abs(VALUES[np.asarray(got)] - VALUES[codes])
    assert np.all(ours <= best_plain) and np.mean(ours < best_plain) > 0.1


def test_mantissa_guidance_equals_full_guidance_when_the_code_is_in_the_bracket():
    x, codes, scales, step = draw(noise=0.3, dtype=np.float32)
    pairs = np.array([bracket(*p) if p[1] else (0, 0) for p in zip(x.flat, step.flat, strict=True)])
    inside = np.any(pairs.reshape(*x.shape, 2) == codes[..., None], axis=-1)
    assert 0.5 < inside.mean() < 1
    steps = jnp.asarray(E4M3[scales])
    full = guided_codes(jnp.asarray(x), jnp.asarray(codes), steps, kind="codes")
    compact = guided_codes(jnp.asarray(x), jnp.asarray(codes & 1), steps, kind="mantissa")
    np.testing.assert_array_equal(np.asarray(full)[inside], np.asarray(compact)[inside])
    np.testing.assert_array_equal(np.asarray(full)[inside], codes[inside])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_the_forward_value_is_the_guided_code_times_the_recorded_step(kind, dtype, shared):
    x, codes, scales, step = draw(noise=0.3, dtype=dtype)  # so that brackets and scales differ
    g = None
    if shared:  # a power of two, so that float64 stays an exact oracle
        g = np.full((24, 1), 0.25, np.float32)
        x, step = (x.astype(np.float32) * 0.25).astype(dtype), step * np.float32(0.25)
    y, _ = quantize_site(
        jnp.asarray(x),
        record(codes, scales, kind, g),
        everywhere(x),
        rule="amax" if shared else "one",
        kind=kind,
        guided=True,
    )
    want = VALUES[every(trace_by_hand, x.astype(np.float32), codes, step, kind=kind)] * step
    np.testing.assert_array_equal(y, want.astype(np.float32).astype(dtype))
    assert y.dtype == dtype


@pytest.mark.parametrize("guided", [True, False])
def test_without_a_record_rounding_is_plain(guided):
    x, _, _, _ = draw()
    y, stats = quantize_site(
        jnp.asarray(x), None, everywhere(x), rule="one", kind="codes", guided=guided
    )
    exact = x.astype(np.float32)
    step = np.repeat(E4M3[own_scales(exact)], 16, axis=-1)
    want = VALUES[np.vectorize(plain_by_hand)(exact, step)] * step
    np.testing.assert_array_equal(y, want.astype(x.dtype))
    assert stats.agreement is None and stats.flips is None and stats.scale_equal is None
    coded = np.count_nonzero(want)
    for mean, total in ((stats.coded, coded), (stats.nonfinite, 0)):
        assert (float(mean.total), float(mean.count)) == (total, want.size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_scale_of_zero_gives_zeros(kind):
    x = jnp.asarray(draw()[0])
    nothing = record(np.zeros(x.shape), np.zeros((24, 3), np.uint8), kind)
    y, stats = quantize_site(x, nothing, everywhere(x), rule="one", kind=kind, guided=True)
    np.testing.assert_array_equal(y, np.zeros(x.shape))
    assert stats.agreement.value == 1


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rounds_plainly_and_is_not_counted(kind):
    x, codes, scales, _ = draw()
    valid = np.arange(24) % 3 != 0
    codes[~valid], scales[~valid] = 15, 0x7F  # what lies there must not matter
    options = {"rule": "one", "kind": kind, "guided": True}
    y, stats = quantize_site(
        jnp.asarray(x), record(codes, scales, kind), jnp.asarray(valid), **options
    )
    plain, _ = quantize_site(jnp.asarray(x), None, jnp.asarray(valid), **options)
    np.testing.assert_array_equal(np.asarray(y)[~valid], np.asarray(plain)[~valid])
    alone, counts = quantize_site(
        jnp.asarray(x[valid]),
        record(codes[valid], scales[valid], kind),
        jnp.ones(16, bool),
        **options,
    )
    np.testing.assert_array_equal(np.asarray(y)[valid], alone)
    assert numbers(stats) == numbers(counts)
    assert stats.agreement.count == 16 * 48 and stats.nonfinite.count == 16 * 48


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bad", "rule"), [(np.nan, "one"), (np.inf, "amax")])
def test_a_block_that_is_not_finite_stays_nan_under_guidance_and_is_counted(kind, bad, rule):
    x, codes, scales, _ = draw()
    g = None if rule == "one" else np.ones((24, 1))
    options = {"rule": rule, "kind": kind, "guided": True}
    clean, _ = quantize_site(
        jnp.asarray(x), record(codes, scales, kind, g), everywhere(x), **options
    )
    x[5, 17] = bad
    y, stats = quantize_site(
        jnp.asarray(x), record(codes, scales, kind, g), everywhere(x), **options
    )
    y, clean = np.array(y.astype(jnp.float32)), np.array(clean.astype(jnp.float32))
    assert np.all(np.isnan(y[5, 16:32])) and np.isnan(y).sum() == 16
    y[5, 16:32] = clean[5, 16:32]
    np.testing.assert_array_equal(y, clean)
    assert (stats.nonfinite.total, stats.nonfinite.count) == (16, 24 * 48)


@pytest.mark.parametrize(("kind", "guided"), list(itertools.product(KINDS, [True, False])))
def test_stats_count_what_they_say(kind, guided):
    """Over valid tokens; "one", so that the trainer's own scales and codes are known in float64."""
    x, codes, scales, step = draw(seed=2, noise=0.05)
    valid = np.arange(24) % 4 != 1
    _, stats = quantize_site(
        jnp.asarray(x),
        record(codes, scales, kind),
        jnp.asarray(valid),
        rule="one",
        kind=kind,
        guided=guided,
    )
    exact = x.astype(np.float32)
    own_step = np.repeat(E4M3[own_scales(exact)], 16, axis=-1)
    if guided:
        chosen = every(trace_by_hand, exact, codes, step, kind=kind)
    else:
        chosen = np.vectorize(plain_by_hand)(exact, own_step)
    plain = np.vectorize(plain_by_hand)(exact, step)
    differ = (plain != codes) if kind == "codes" else ((plain & 1) != (codes & 1))
    same = (chosen == codes) if kind == "codes" else ((chosen & 1) == (codes & 1))
    equal = (own_scales(exact) == scales)[valid]
    values, blocks = valid.sum() * 48, valid.sum() * 3
    want = [(same[valid].sum(), values), (differ[valid].sum(), values), (equal.sum(), blocks)]
    assert numbers(stats) == [*want, (0, values)]
    assert 0 < equal.sum() < blocks and differ.any()


def test_scale_equal_compares_bytes_whatever_the_global_scale():
    """Two rows that differ by a factor have the same bytes under "amax", and different steps."""
    x, codes, _, _ = draw(dtype=np.float32)
    options = {"rule": "amax", "kind": "codes", "guided": True}
    own_rounding = jax.jit(sites.own_rounding, static_argnums=1)
    _, own, _ = own_rounding(jnp.asarray(x), formats.get("nvfp4"))
    shares = []
    for factor in (1.0, 1.01):
        g = (np.abs(x).max(-1, keepdims=True) / 2688 * factor).astype(np.float32)
        kept = record(codes, np.asarray(own), "codes", g)
        shares.append(quantize_site(jnp.asarray(x), kept, everywhere(x), **options)[1].scale_equal)
    assert [s.value for s in shares] == [1, 1]
    other = np.asarray(own) ^ 1
    kept = record(codes, other, "codes", np.ones((24, 1)))
    assert quantize_site(jnp.asarray(x), kept, everywhere(x), **options)[1].scale_equal.value == 0


def test_leading_axes_do_not_matter():
    x, codes, scales, _ = draw()
    options = {"rule": "one", "kind": "codes", "guided": True}
    flat, stats = quantize_site(
        jnp.asarray(x), record(codes, scales, "codes"), everywhere(x), **options
    )
    deep = record(codes.reshape(2, 3, 4, 48), scales.reshape(2, 3, 4, 3), "codes")
    y, deep_stats = quantize_site(
        jnp.asarray(x).reshape(2, 3, 4, 48), deep, jnp.ones((2, 3, 4), bool), **options
    )
    np.testing.assert_array_equal(y.reshape(24, 48), flat)
    assert numbers(stats) == numbers(deep_stats)


@pytest.mark.parametrize("kind", KINDS)
def test_excess_precision_changes_nothing(kind):
    """What XLA:GPU does to casts by default must not reach the value: there is none to delete."""
    x, codes, scales, _ = draw()
    kept = record(codes, scales, kind)

    def site(x, bits, scales):
        one = SiteRecord(bits=bits, scales=scales, global_scale=None)
        where = everywhere(x)
        return sites.quantize_site(x, one, where, site_of("one", kind), guided=True)[0]

    args = (jnp.asarray(x), kept.bits, kept.scales)
    want, _ = quantize_site(args[0], kept, everywhere(x), rule="one", kind=kind, guided=True)
    lowered = jax.jit(site).lower(*args)
    for excess in (True, False):
        program = lowered.compile(compiler_options={"xla_allow_excess_precision": excess})
        np.testing.assert_array_equal(program(*args), want)
    text = program.as_text()
    assert "f4e2m1" not in text and text.count("direction=GE") >= 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [17, 80, 232])
def test_rows_of_any_width_are_padded_inside_and_counted_without_the_padding(kind, width):
    x = draw(width=240, dtype=np.float32)[0][:, :width]
    options = {"rule": "amax", "kind": kind}
    y, stats = quantize_site(jnp.asarray(x), None, everywhere(x), guided=False, **options)
    padded = np.pad(x, [(0, 0), (0, -width % 16)])
    codes, scales, g = jax.jit(sites.own_rounding, static_argnums=1)(
        jnp.asarray(padded), formats.get("nvfp4")
    )
    assert not np.asarray(codes)[:, width:].any()
    step = np.repeat(E4M3[np.asarray(scales)] * np.asarray(g), 16, axis=-1)
    np.testing.assert_array_equal(
        y, (VALUES[np.asarray(codes)].astype(np.float32) * step)[:, :width]
    )
    assert stats.coded.count == 24 * width
    kept = record(codes, scales, kind, g)
    again, stats = quantize_site(jnp.asarray(x), kept, everywhere(x), guided=True, **options)
    np.testing.assert_array_equal(again, y)
    assert stats.agreement.value == 1 and stats.agreement.count == 24 * width


def test_the_clipped_gradient_is_zero_exactly_where_the_value_saturates():
    x, codes, _, _ = draw(dtype=np.float32)
    small = np.full((24, 3), 20, np.uint8)  # scales so small that many values saturate
    kept = record(codes, small, "codes")
    options = {"rule": "one", "kind": "codes", "guided": True}

    def total(x, ste):
        y, _ = quantize_site(x, kept, everywhere(x), ste=ste, **options)
        return jnp.sum(y * jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape))

    weight = np.arange(x.size, dtype=np.float32).reshape(x.shape)
    inside = np.abs(x) <= 6 * E4M3[20]
    assert 0.1 < inside.mean() < 0.9
    gradient = jax.grad(total)
    np.testing.assert_array_equal(gradient(jnp.asarray(x), "plain"), weight)
    np.testing.assert_array_equal(gradient(jnp.asarray(x), "clipped"), np.where(inside, weight, 0))


def test_an_unknown_straight_through_names_the_choices():
    with pytest.raises(ValueError, match="qat: ste: got hard, need one of"):
        site_of("one", "codes", "hard")


def test_a_value_exactly_at_the_largest_magnitude_is_not_clipped():
    x = np.full((1, 16), 6 * E4M3[40], np.float32)
    x[0, 1] = np.nextafter(x[0, 1], np.float32(np.inf))
    kept = record(np.full((1, 16), 7), np.full((1, 1), 40, np.uint8), "codes")
    gradient = jax.grad(
        lambda x: jnp.sum(
            quantize_site(
                x, kept, everywhere(x), rule="one", kind="codes", guided=True, ste="clipped"
            )[0]
        )
    )
    np.testing.assert_array_equal(gradient(jnp.asarray(x)), [[1, 0] + [1] * 14])
