import math

import numpy as np
import pytest

from trace_jax.rl.advantage import group_advantages


def advantages(rewards, groups, *, normalize_std=True, std_floor=1e-3):
    return group_advantages(
        np.asarray(rewards, np.float64),
        np.asarray(groups, np.int32),
        normalize_std=normalize_std,
        std_floor=std_floor,
    )


def test_group_advantages_match_the_written_out_numbers():
    # Group 7: 0, 1, 1, 0 has mean 1/2 and sample variance 4 * (1/4) / 3.
    # Group 2: 0, 0, 1 has mean 1/3 and sample variance (1/9 + 1/9 + 4/9) / 2 = 1/3.
    got = advantages([0, 0, 1, 0, 1, 1, 0], [7, 2, 7, 2, 2, 7, 7])
    big, third = 0.5 * math.sqrt(3), math.sqrt(3)
    want = [-big, -third / 3, big, -third / 3, 2 * third / 3, big, -big]
    np.testing.assert_allclose(got.advantages_B, want, rtol=1e-6)
    assert got.advantages_B.dtype == np.float32
    assert (got.groups, got.zero_variance_groups, got.small_groups) == (2, 0, 0)


def test_group_advantages_are_centred_rewards_without_the_std():
    got = advantages([0, 0, 1, 0], [0, 0, 0, 0], normalize_std=False)
    np.testing.assert_array_equal(got.advantages_B, np.float32([-0.25, -0.25, 0.75, -0.25]))


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("std_floor", [0.0, 1e-3])
@pytest.mark.parametrize("reward", [0.35, 0.1, 1.0, 0.0, 1e8 + 0.3])
def test_group_advantages_are_exactly_zero_without_variance(reward, std_floor, normalize_std):
    """0.35 * 7 / 7 is not 0.35 in floating point: the residue must not be divided by itself."""
    got = advantages([reward] * 7, [3] * 7, normalize_std=normalize_std, std_floor=std_floor)
    assert np.all(got.advantages_B == 0)
    assert got.zero_variance_groups == 1


def test_group_advantages_do_not_blow_up_on_seven_times_035_against_one():
    """NeMo-RL#4161: a float32 residue there made the advantage 4000 times too large (F44)."""
    got = advantages([0.35] * 7 + [1.0], [0] * 8)
    # n - 1 equal values against one: a = (n - 1) / sqrt(n) for the one, -1 / sqrt(n) for the rest.
    np.testing.assert_allclose(got.advantages_B[7], 7 / math.sqrt(8), rtol=1e-6)
    np.testing.assert_allclose(got.advantages_B[:7], -1 / math.sqrt(8), rtol=1e-6)


def test_group_advantages_treat_a_std_below_the_floor_as_none():
    got = advantages([0.5, 0.5 + 1e-4], [0, 0], std_floor=1e-3)
    assert np.all(got.advantages_B == 0)
    above = advantages([0.5, 0.5 + 1e-4], [0, 0], std_floor=1e-6)
    np.testing.assert_allclose(above.advantages_B, [-math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_group_advantages_drop_a_failed_sample_without_touching_its_group(bad):
    got = advantages([0, 1, bad, 1, 1, 0], [0, 0, 0, 0, 1, 1])
    alone = advantages([0, 1, 1, 1, 0], [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(got.advantages_B[[0, 1, 3, 4, 5]], alone.advantages_B)
    assert got.advantages_B[2] == 0
    assert got.keep_B.tolist() == [True, True, False, True, True, True]
    assert got.dropped_samples == 1


def test_group_advantages_are_zero_and_counted_without_a_second_valid_sample():
    got = advantages([1, np.nan, np.nan, np.nan, 0, 1], [0, 0, 1, 1, 2, 2])
    assert np.all(got.advantages_B[:4] == 0)
    assert np.all(got.advantages_B[4:] != 0)
    assert (got.groups, got.small_groups, got.dropped_samples) == (3, 2, 3)
    assert got.keep_B[0]  # its tokens stay in the loss (with advantage 0), only failures leave it


def test_group_advantages_do_not_depend_on_the_order_of_the_samples():
    rng = np.random.default_rng(0)
    rewards, groups = rng.random(40), rng.integers(0, 6, 40)
    order = rng.permutation(40)
    straight = advantages(rewards, groups).advantages_B
    np.testing.assert_allclose(
        advantages(rewards[order], groups[order]).advantages_B, straight[order], rtol=1e-6
    )


def test_group_advantages_refuse_ids_of_another_length():
    with pytest.raises((ValueError, TypeError), match="group"):
        advantages([0, 1], [0, 0, 0])
