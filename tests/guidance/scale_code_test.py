"""Oracle: candidates by search over all bytes, sums and repairs in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.guidance import scale_code

E4M3, E8M0 = 0x7F, 0xFF  # their NaN bytes
BITS = [2, 3, 4]


@functools.partial(jax.jit, static_argnames=("bits", "nan"))
def there_and_back(scales, own, bits, nan):
    return scale_code.decode(scale_code.encode(scales, bits, nan), own, bits, nan)


def decoded(scales, own, bits, nan=E4M3):
    got, failed = there_and_back(np.uint8(scales), np.uint8(own), bits, nan)
    return np.asarray(got), np.asarray(failed)


def candidates(low, own, bits, nan):
    """All bytes with these low bits, the nearest to own first, the lower one of equals first."""
    own = min(int(own), nan - 1)
    return sorted(range(low, nan, 1 << bits), key=lambda c: (abs(c - own), c))


def oracle(scales, own, bits, nan):
    """(bytes, failed) of one row of one group without NaN."""
    chosen = [
        candidates(s % (1 << bits), o, bits, nan)[:2] for s, o in zip(scales, own, strict=True)
    ]
    got = [c[0] for c in chosen]

    def check(row):
        return sum((i + 1) * (int(s) >> bits) for i, s in enumerate(row)) % 251

    if check(got) == check(scales):
        return got, False
    options = []
    for i, (first, second) in enumerate(chosen):
        near = min(int(own[i]), nan - 1)
        # the other neighbour of own with these low bits, on the other side
        other = first + (1 << bits) if first <= near else first - (1 << bits)
        repaired = [*got[:i], other, *got[i + 1 :]]
        close = abs(other - near) * 4 <= 3 << bits
        if 0 <= other < nan and close and check(repaired) == check(scales):
            assert other == second
            options.append((abs(other - near), i, repaired))
    return (got, True) if not options else (min(options)[2], False)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("nan", [E4M3, E8M0])
def test_every_pair_of_bytes_within_the_reach_decodes(bits, nan):
    """Exhaustive: one block, so a wrong byte cannot hide behind another; ends of the range too."""
    scales, own = (a.reshape(-1, 1) for a in np.mgrid[0:nan, 0:nan])
    got, failed = decoded(scales, own, bits, nan)
    difference = (scales - own)[:, 0]
    half = 1 << (bits - 1)
    sure = (difference >= -half) & (difference < half)
    np.testing.assert_array_equal(got[sure], scales[sure])
    repairable = np.abs(difference) <= 3 * (1 << bits) // 4  # the check names the block
    np.testing.assert_array_equal(got[repairable & ~failed], scales[repairable & ~failed])
    assert not failed[repairable].any()
    wrong = got[:, 0] != scales[:, 0]
    assert failed[wrong].all() and wrong[np.abs(difference) > (1 << bits)].all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("spread", [1.0, 2.5, 6.0])
def test_decode_is_the_search_over_all_bytes(bits, spread):
    rng = np.random.default_rng(bits)
    scales = rng.integers(0, 127, (300, 17))
    own = np.clip(scales + np.rint(rng.standard_normal(scales.shape) * spread), 0, 127).astype(int)
    got, failed = decoded(scales, own, bits)
    for row in range(len(scales)):
        want, fails = oracle(scales[row], own[row], bits, E4M3)
        np.testing.assert_array_equal(got[row], want)
        assert failed[row] == fails


def test_the_bytes_are_low_bits_lowest_first_and_a_check_a_group():
    scales = np.random.default_rng(0).integers(0, 127, (3, 130)).astype(np.uint8)
    for bits in BITS:
        coded = np.asarray(scale_code.encode(jnp.asarray(scales), bits, E4M3))
        flat = (scales[..., None] >> np.arange(bits, dtype=np.uint8) & 1).reshape(3, -1)
        low = np.packbits(flat, axis=-1, bitorder="little")
        high = (scales >> bits).astype(int)
        weights = np.arange(130) % 64 + 1
        checks = [
            (high[:, g] * weights[g]).sum(-1) % 251 for g in np.split(np.arange(130), [64, 128])
        ]
        np.testing.assert_array_equal(coded, np.concatenate([low, np.stack(checks, -1)], -1))
        assert coded.shape[-1] == scale_code.coded_bytes(130, bits)


@pytest.mark.parametrize("bits", BITS)
def test_a_nan_scale_survives_whatever_the_trainer_has_and_zeros_stay(bits):
    rng = np.random.default_rng(1)
    scales = rng.integers(0, 127, (200, 128))
    scales[:, ::7] = 0
    at = rng.integers(0, 128, 200)
    scales[np.arange(200), at] = E4M3
    own = np.where(scales == E4M3, 60, scales)  # the trainer itself is finite
    got, failed = decoded(scales, own, bits)
    assert (got[np.arange(200), at] == E4M3).all() and not failed.any()
    np.testing.assert_array_equal(got == 0, scales == 0)
    others = (got != scales) & (scales != E4M3)  # NaN too, in the same group of 64 only
    assert (got[others] == E4M3).all()
    rows, columns = np.nonzero(others)
    assert (columns // 64 == at[rows] // 64).all()
    own[np.arange(200), at] = E4M3  # a NaN of the trainer alone is no NaN of the rollout
    clean = np.where(scales == E4M3, 100, scales)
    got, _ = decoded(clean, own, bits)
    assert (got != E4M3).all()


@pytest.mark.parametrize("bits", BITS)
def test_undetected_errors_are_as_rare_as_the_module_says(bits):
    """Hopeless scales: almost every row must be counted, at most (1 + candidates) / 251 slip."""
    rng = np.random.default_rng(2)
    scales, own = rng.integers(0, 127, (2, 4000, 64))
    got, failed = decoded(scales, own, bits)
    wrong = (got != scales).any(axis=-1)
    assert wrong.mean() > 0.99
    period = 1 << bits
    low = (scales - own + period // 2) % period - period // 2
    candidates = (period - np.abs(low) <= 3 * period // 4).sum(axis=-1).mean()
    slipped = (wrong & ~failed).sum() / wrong.sum()
    assert slipped < 1.3 * (1 + candidates) / 251


@pytest.mark.parametrize("bits", BITS)
def test_a_wrong_check_byte_is_counted_or_is_nan(bits):
    scales = jnp.asarray(np.random.default_rng(3).integers(4, 120, (1, 64)), jnp.uint8)
    coded = np.asarray(scale_code.encode(scales, bits, E4M3)).repeat(256, axis=0)
    true = int(coded[0, -1])
    coded[:, -1] = np.arange(256)
    decode = jax.jit(scale_code.decode, static_argnums=(2, 3))
    got, failed = decode(jnp.asarray(coded), scales.repeat(256, axis=0), bits, E4M3)
    # own scales are exact, so every second choice is a whole period away: nothing is repairable
    assert np.flatnonzero(~np.asarray(failed)).tolist() == sorted({true, 255})
    changed = np.asarray(got) != np.asarray(scales)
    assert not changed[:255].any() and (np.asarray(got)[changed] == E4M3).all()
