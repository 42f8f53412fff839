"""Train-rollout mismatch: how far the trainer's log-probs are from the sampler's.

Definitions, with d = trainer - sampler in nats over the M trained tokens, pi = exp(trainer),
mu = exp(sampler) and r = pi / mu. Exponents are clamped to +-20.

| key | definition |
|---|---|
| parity/tokens                       | M |
| parity/logprob_abs_diff_nats        | mean abs(d) |
| parity/logprob_abs_diff_p99_nats    | 99th percentile of abs(d), linear between order statistics |
| parity/logprob_abs_diff_max_nats    | max abs(d) |
| parity/kl_nats                      | mean (r - 1 - log r): k3 estimator of KL(mu || pi) |
| parity/prob_diff_mean               | mean abs(pi - mu) |
| parity/pearson                      | Pearson correlation of pi and mu; 0 if either is constant |

The aliases of other frameworks are in `_aliases`, each by the definition its owner uses.
"""

import numpy as np
from jaxtyping import Bool, Float

MAX_LOG_RATIO = 20.0  # verl's SAFETY_BOUND


def parity_metrics(
    trainer_logprobs_BS: Float[np.ndarray, "B S"],
    sampler_logprobs_BS: Float[np.ndarray, "B S"],
    mask_BS: Bool[np.ndarray, "B S"],
) -> dict[str, float]:
    """All mismatch metrics of a batch, on the host in float64.

    Args:    trainer log-probs must be those of the parameters before the update (nats).
    Returns: plain floats. Without a trained token every value is 0, and `parity/tokens` says why.
             A NaN log-prob of a trained token makes the means NaN: it never hides.
    Source:  the table above. Test that states it: tests/parity_test.py
    """
    mask_BS = np.asarray(mask_BS, bool)
    trainer_BS = np.asarray(trainer_logprobs_BS, np.float64)
    sampler_BS = np.asarray(sampler_logprobs_BS, np.float64)
    if not mask_BS.any():  # the same keys, from one token on which both sides agree exactly
        one = np.zeros((1, 1))
        return dict.fromkeys(parity_metrics(one, one, np.ones((1, 1), bool)), 0.0)
    rows = np.flatnonzero(mask_BS.any(axis=1))
    pairs = [(trainer_BS[b][mask_BS[b]], sampler_BS[b][mask_BS[b]]) for b in rows]
    trainer_M, sampler_M = trainer_BS[mask_BS], sampler_BS[mask_BS]
    with np.errstate(invalid="ignore", over="ignore"):
        diff_M = trainer_M - sampler_M
        abs_M = np.abs(diff_M)
        pi_M, mu_M = np.exp(trainer_M), np.exp(sampler_M)
        metrics = {
            "parity/tokens": trainer_M.size,
            "parity/logprob_abs_diff_nats": abs_M.mean(),
            "parity/logprob_abs_diff_p99_nats": np.percentile(abs_M, 99),
            "parity/logprob_abs_diff_max_nats": abs_M.max(),
            "parity/kl_nats": _k3(diff_M).mean(),
            "parity/prob_diff_mean": np.abs(pi_M - mu_M).mean(),
            "parity/pearson": _pearson(pi_M, mu_M),
        }
        metrics |= _aliases(metrics, diff_M, np.abs(pi_M - mu_M), pairs)
    return {key: float(value) for key, value in metrics.items()}


def _aliases(
    parity: dict,
    diff_M: np.ndarray,
    prob_diff_M: np.ndarray,
    pairs: list[tuple[np.ndarray, np.ndarray]],
) -> dict:
    """The same facts under the names, and by the definitions, of other frameworks.

    verl (rollout_corr_helper.py): "training" is our trainer and "rollout" our sampler; perplexities
    are means over sequences of exp(-mean log-prob). NeMo-RL: `token_mult_prob_error` is
    mean exp(abs(d)); `gen_kl_error` is the k3 of KL(sampler || trainer). miles and slime:
    `train_rollout_logprob_abs_diff`. prime-rl: `mismatch_kl`. TRL's ratio is taken before its cap.
    """
    trainer_B = np.array([trainer.mean() for trainer, _ in pairs])
    sampler_B = np.array([sampler.mean() for _, sampler in pairs])
    log_ratio_B = np.array([(trainer - sampler).sum() for trainer, sampler in pairs])
    ppl_B = sampler_B - trainer_B
    ratio_M = _exp(diff_M)
    return {
        "rollout_corr/kl": -diff_M.mean(),
        "rollout_corr/k3_kl": parity["parity/kl_nats"],
        "rollout_corr/training_ppl": np.exp(-trainer_B).mean(),
        "rollout_corr/training_log_ppl": -trainer_B.mean(),
        "rollout_corr/rollout_ppl": np.exp(-sampler_B).mean(),
        "rollout_corr/rollout_log_ppl": -sampler_B.mean(),
        "rollout_corr/log_ppl_diff": ppl_B.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(ppl_B).mean(),
        "rollout_corr/ppl_ratio": np.exp(ppl_B).mean(),
        "rollout_corr/chi2_token": (ratio_M**2).mean() - 1,
        "rollout_corr/chi2_seq": (_exp(log_ratio_B) ** 2).mean() - 1,
        "training/rollout_probs_diff_mean": prob_diff_M.mean(),
        "training/rollout_probs_diff_max": prob_diff_M.max(),
        "training/rollout_probs_diff_std": prob_diff_M.std(ddof=1) if len(prob_diff_M) > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": parity["parity/pearson"],
        "token_mult_prob_error": _exp(np.abs(diff_M)).mean(),
        "gen_kl_error": parity["parity/kl_nats"],
        "train_rollout_logprob_abs_diff": parity["parity/logprob_abs_diff_nats"],
        "mismatch_kl": parity["parity/kl_nats"],
        "sampling/sampling_logp_difference/mean": parity["parity/logprob_abs_diff_nats"],
        "sampling/sampling_logp_difference/max": parity["parity/logprob_abs_diff_max_nats"],
        "sampling/importance_sampling_ratio/min": ratio_M.min(),
        "sampling/importance_sampling_ratio/mean": ratio_M.mean(),
        "sampling/importance_sampling_ratio/max": ratio_M.max(),
    }


def _exp(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _k3(diff_M: np.ndarray) -> np.ndarray:
    """r - 1 - log r per token, exact near 0."""
    clamped_M = np.clip(diff_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.expm1(clamped_M) - clamped_M


def _pearson(a_M: np.ndarray, b_M: np.ndarray) -> float:
    a_M, b_M = a_M - a_M.mean(), b_M - b_M.mean()
    scale = np.sqrt((a_M**2).sum() * (b_M**2).sum())
    return float((a_M * b_M).sum() / scale) if scale != 0 else 0.0
