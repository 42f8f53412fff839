"""Oracle: the definitions written out token by token in Python floats."""

import math

import numpy as np
import pytest

from trace_jax.parity import parity_metrics

TRAINER = [[-1.0, -0.5, -2.0], [-0.25, -3.0, -9.0]]
SAMPLER = [[-1.1, -0.5, -1.5], [-0.75, -2.0, 0.0]]
MASK = [[True, True, True], [True, True, False]]
PAIRS = [(-1.0, -1.1), (-0.5, -0.5), (-2.0, -1.5), (-0.25, -0.75), (-3.0, -2.0)]


def metrics(trainer=TRAINER, sampler=SAMPLER, mask=MASK):
    return parity_metrics(
        np.asarray(trainer, np.float32), np.asarray(sampler, np.float32), np.asarray(mask, bool)
    )


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_parity_metrics_are_what_the_table_says():
    got = metrics()
    probs = [(math.exp(p), math.exp(m)) for p, m in PAIRS]
    pi_mean, mu_mean = mean(p for p, _ in probs), mean(m for _, m in probs)
    covariance = mean((p - pi_mean) * (m - mu_mean) for p, m in probs)
    spread = math.sqrt(
        mean((p - pi_mean) ** 2 for p, _ in probs) * mean((m - mu_mean) ** 2 for _, m in probs)
    )
    want = {
        "parity/tokens": 5,
        "parity/logprob_abs_diff_nats": (0.1 + 0 + 0.5 + 0.5 + 1.0) / 5,
        # rank 0.99 * (5 - 1) = 3.96 of the sorted 0, .1, .5, .5, 1.
        "parity/logprob_abs_diff_p99_nats": 0.5 + 0.96 * 0.5,
        "parity/logprob_abs_diff_max_nats": 1.0,
        "parity/kl_nats": mean(math.exp(p - m) - 1 - (p - m) for p, m in PAIRS),
        "parity/prob_diff_mean": mean(abs(p - m) for p, m in probs),
        "parity/pearson": covariance / spread,
    }
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=1e-6), key


def test_aliases_follow_the_definitions_of_their_frameworks():
    got = metrics()
    rows = [PAIRS[:3], PAIRS[3:]]
    log_ppl = [(-mean(p for p, _ in row), -mean(m for _, m in row)) for row in rows]
    want = {
        "rollout_corr/kl": mean(m - p for p, m in PAIRS),
        "rollout_corr/k3_kl": got["parity/kl_nats"],
        "rollout_corr/training_ppl": mean(math.exp(t) for t, _ in log_ppl),
        "rollout_corr/rollout_ppl": mean(math.exp(r) for _, r in log_ppl),
        "rollout_corr/training_log_ppl": mean(t for t, _ in log_ppl),
        "rollout_corr/rollout_log_ppl": mean(r for _, r in log_ppl),
        "rollout_corr/log_ppl_diff": mean(t - r for t, r in log_ppl),
        "rollout_corr/log_ppl_abs_diff": mean(abs(t - r) for t, r in log_ppl),
        "rollout_corr/ppl_ratio": mean(math.exp(t - r) for t, r in log_ppl),
        "rollout_corr/chi2_token": mean(math.exp(2 * (p - m)) for p, m in PAIRS) - 1,
        "rollout_corr/chi2_seq": mean(math.exp(2 * sum(p - m for p, m in r)) for r in rows) - 1,
        "training/rollout_probs_diff_mean": got["parity/prob_diff_mean"],
        "training/rollout_probs_diff_max": max(abs(math.exp(p) - math.exp(m)) for p, m in PAIRS),
        "training/rollout_actor_probs_pearson_corr": got["parity/pearson"],
        "token_mult_prob_error": mean(math.exp(abs(p - m)) for p, m in PAIRS),
        "gen_kl_error": got["parity/kl_nats"],
        "train_rollout_logprob_abs_diff": got["parity/logprob_abs_diff_nats"],
        "mismatch_kl": got["parity/kl_nats"],
        "sampling/sampling_logp_difference/mean": got["parity/logprob_abs_diff_nats"],
        "sampling/sampling_logp_difference/max": 1.0,
        "sampling/importance_sampling_ratio/min": math.exp(-1.0),
        "sampling/importance_sampling_ratio/mean": mean(math.exp(p - m) for p, m in PAIRS),
        "sampling/importance_sampling_ratio/max": math.exp(0.5),
    }
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=1e-6), key


def test_parity_kl_estimates_the_divergence_from_the_sampler():
    """Over tokens drawn from mu, the mean of k3 is KL(mu || pi), not KL(pi || mu)."""
    mu, pi = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    tokens = np.repeat([0, 1, 2], [70, 20, 10])[None]  # the exact frequencies of mu
    got = metrics(np.log(pi)[tokens], np.log(mu)[tokens], np.ones(tokens.shape))
    assert got["parity/kl_nats"] == pytest.approx(np.sum(mu * np.log(mu / pi)), rel=1e-6)
    assert got["parity/kl_nats"] != pytest.approx(np.sum(pi * np.log(pi / mu)), rel=0.05)


def test_identical_engines_have_no_mismatch():
    got = metrics(sampler=TRAINER)
    for key in ("logprob_abs_diff_nats", "logprob_abs_diff_p99_nats", "kl_nats", "prob_diff_mean"):
        assert got[f"parity/{key}"] == 0
    assert got["parity/pearson"] == pytest.approx(1.0)
    assert got["token_mult_prob_error"] == 1


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_trained_does_not_count(poison):
    trainer, sampler = np.array(TRAINER), np.array(SAMPLER)
    trainer[1, 2] = sampler[1, 2] = poison
    assert metrics(trainer, sampler) == metrics()


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_mask_gives_zeros_and_a_count_of_zero(shape):
    empty = np.zeros(shape)
    got = metrics(np.full(shape, np.nan), empty, empty)
    assert got.keys() == metrics().keys()
    assert set(got.values()) == {0.0}


def test_a_nan_of_a_trained_token_does_not_hide():
    trainer = np.array(TRAINER)
    trainer[0, 0] = np.nan
    got = metrics(trainer)
    assert math.isnan(got["parity/logprob_abs_diff_nats"]) and math.isnan(got["parity/kl_nats"])
    assert got["parity/tokens"] == 5


def test_a_log_ratio_of_1000_stays_finite():
    got = metrics([[-1000.0, 0.0]], [[0.0, -1000.0]], [[True, True]])
    assert all(math.isfinite(value) for value in got.values())
    assert got["parity/logprob_abs_diff_max_nats"] == 1000


@pytest.mark.parametrize("tokens", [1, 2])
def test_constant_probabilities_have_no_correlation(tokens):
    got = metrics([[-1.0] * tokens], [[-1.0] * tokens], [[True] * tokens])
    assert all(math.isfinite(value) for value in got.values())
    assert got["parity/pearson"] == 0
