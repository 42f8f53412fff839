"""Importance correction for the train-rollout gap: how much a sampled token counts in training."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trace_jax.types import Mean

MAX_LOG_RATIO = (
    20.0  # exp(20) = 4.9e8: no overflow, far outside any clip range; verl's SAFETY_BOUND
)


def importance_weight(
    old_logprobs: Float[Array, "*A"],
    sampler_logprobs: Float[Array, "*A"],
    cap: float | None,
) -> Float[Array, "*A"]:
    """Weighs each token by how much likelier the trainer finds it than the rollout did, capped.

    Math:    w = min(exp(pi_old - mu), cap), with the exponent clamped to +-MAX_LOG_RATIO.
    Args:    log-probs in nats, any float dtype; arithmetic is float32. cap None: no correction, 1.
    Returns: float32 weights without a gradient. NaN log-probs give NaN: masking is the caller's.
    Source:  truncated importance sampling; TRACE (arXiv 2610.07767) caps at 5.
             Test that states it: tests/rl/correction_test.py
    """
    if cap is None:
        return jnp.ones(old_logprobs.shape, jnp.float32)
    gap = old_logprobs.astype(jnp.float32) - sampler_logprobs.astype(jnp.float32)
    weight = jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jax.lax.stop_gradient(jnp.minimum(weight, cap))


def importance_metrics(
    weights: Float[Array, "*A"], mask: Bool[Array, "*A"], cap: float | None
) -> dict[str, Mean]:
    """Moments of the weights over the trained tokens, and the fraction that the cap cut.

    `effective_sample_fraction` needs both moments after they were summed over micro-batches.
    """
    count = jnp.sum(mask, dtype=jnp.float32)
    capped = mask & (weights >= cap) if cap is not None else jnp.zeros_like(mask)
    totals = {
        "loss/importance_weight": jnp.sum(weights, where=mask),
        "loss/importance_weight_squared": jnp.sum(weights**2, where=mask),
        "loss/importance_capped_fraction": jnp.sum(capped, dtype=jnp.float32),
    }
    return {name: Mean(total=total, count=count) for name, total in totals.items()}


def effective_sample_fraction(weight: Mean, weight_squared: Mean) -> float:
    """Kish's effective sample size over the sample size: mean(w)^2 / mean(w^2), in 0..1.

    1 when all weights agree; 0 for an empty mean. Exact whatever the micro-batch split.
    """
    squared = weight_squared.value
    return weight.value**2 / squared if squared else 0.0
