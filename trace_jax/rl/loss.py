"""The losses: GRPO with importance correction for RL, cross-entropy for the warm start.

Every mean is over the trained tokens of the whole batch and left undivided, so that the split into
micro-batches changes nothing. What is masked out is never multiplied: NaN * 0 is NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from trace_jax.checks import message
from trace_jax.rl.correction import MAX_LOG_RATIO, importance_metrics, importance_weight
from trace_jax.types import Batch, Mean


def policy_loss(
    logprobs_BS: Float[Array, "B S"],
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float | None,
    importance_cap: float | None,
) -> tuple[Mean, dict[str, Mean]]:
    """GRPO's clipped surrogate per token, weighted by pi_old/mu, plus an optional KL term.

    Math:    r = exp(logp - old); w = min(exp(old - mu), cap), detached
             loss_t = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef k3_t
             k3_t = exp(ref - logp) - (ref - logp) - 1, not weighted by w
    Args:    logprobs_BS: nats, of the policy that is differentiated. The batch gives mu
             (`sampler_logprobs_BS`), old (`old_logprobs_BS`; None: this is the only update of this
             rollout, so old is logp without its gradient and r is exactly 1) and ref.
    Returns: sum and token count over `loss_mask_BS`, and metrics `loss/...`, all undivided.
             `loss/clip_fraction` counts tokens whose gradient the clip removed.
    Raises:  ValueError if `kl_coef` is given and the batch has no reference log-probs.
    Source:  DeepSeekMath (arXiv 2402.03300) eq. 3 and 4, token-mean of DAPO (arXiv 2503.14476);
             weight: TRACE (arXiv 2610.07767). Test that states it: tests/rl/loss_test.py
    """
    mask_BS = jnp.asarray(batch.loss_mask_BS)
    logp_BS = _masked(logprobs_BS, mask_BS)
    old_BS = jax.lax.stop_gradient(
        logp_BS if batch.old_logprobs_BS is None else _masked(batch.old_logprobs_BS, mask_BS)
    )
    mu_BS = _masked(batch.sampler_logprobs_BS, mask_BS)
    weight_BS = importance_weight(old_BS, mu_BS, importance_cap)
    ratio_BS = jnp.exp(_clamp(logp_BS - old_BS))
    advantage_B1 = jnp.asarray(batch.advantages_B, jnp.float32)[:, None]
    too_high_BS = (advantage_B1 > 0) & (ratio_BS > 1 + clip_high)
    too_low_BS = (advantage_B1 < 0) & (ratio_BS < 1 - clip_low)
    bounded_BS = jnp.where(too_high_BS, 1 + clip_high, ratio_BS)
    bounded_BS = jnp.where(too_low_BS, 1 - clip_low, bounded_BS)
    policy = _token_mean(-weight_BS * bounded_BS * advantage_B1, mask_BS)
    metrics = {
        "loss/policy": policy,
        "loss/ratio": _token_mean(ratio_BS, mask_BS),
        "loss/clip_fraction": _token_mean((too_high_BS | too_low_BS).astype(jnp.float32), mask_BS),
        "loss/logprob_nats": _token_mean(logp_BS, mask_BS),
        **importance_metrics(weight_BS, mask_BS, importance_cap),
    }
    loss = policy
    if kl_coef is not None:
        reference_BS = batch.reference_logprobs_BS
        if reference_BS is None:
            raise ValueError(message("rl.loss.policy_loss", None, "reference log-probs for KL"))
        kl = _token_mean(_k3(logp_BS, _masked(reference_BS, mask_BS)), mask_BS)
        metrics["loss/kl"] = kl
        loss = Mean(total=policy.total + kl_coef * kl.total, count=policy.count)
    return loss, metrics


def supervised_loss(logprobs_BS: Float[Array, "B S"], batch: Batch) -> tuple[Mean, dict[str, Mean]]:
    """Cross-entropy of the trained tokens, in nats per token: the loss of the warm start.

    Math:    loss_t = -logp_t
    Returns: sum and token count over `loss_mask_BS`; metric `loss/supervised_nats`.
    """
    mask_BS = jnp.asarray(batch.loss_mask_BS)
    loss = _token_mean(-_masked(logprobs_BS, mask_BS), mask_BS)
    return loss, {"loss/supervised_nats": loss}


def _k3(logp_BS: Float[Array, "B S"], reference_BS: Float[Array, "B S"]) -> Float[Array, "B S"]:
    """Schulman's k3 estimator of KL(pi || ref) per token; never negative, never infinite."""
    log_ratio_BS = _clamp(jax.lax.stop_gradient(reference_BS) - logp_BS)
    return jnp.expm1(log_ratio_BS) - log_ratio_BS


def _masked(values_BS: Array | np.ndarray, mask_BS: Bool[Array, "B S"]) -> Float[Array, "B S"]:
    """The values in float32, and 0 (with no gradient) where nothing is trained."""
    return jnp.where(mask_BS, jnp.asarray(values_BS).astype(jnp.float32), 0.0)


def _clamp(log_ratio_BS: Float[Array, "B S"]) -> Float[Array, "B S"]:
    """Keeps exp finite (F23): beyond the bound the value is constant and has no gradient."""
    return jnp.clip(log_ratio_BS, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _token_mean(values_BS: Float[Array, "B S"], mask_BS: Bool[Array, "B S"]) -> Mean:
    total = jnp.sum(values_BS, where=mask_BS)
    return Mean(total=total, count=jnp.sum(mask_BS, dtype=jnp.float32))
