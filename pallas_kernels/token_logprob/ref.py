"""The specification: the whole logits, then log softmax. What the others must agree with."""

from typing import Any

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden_MD: Any, head_VD: Any, tokens_M: Any, *, temperature: float = 1.0, top_k: int = 0
) -> tuple[Any, Any, Any, Any]:
    """(logprob_M, entropy_M, top_logprobs_Mk, top_ids_Mk); the last two None without `top_k`.

    The head is cast to the dtype of the hidden states, products are accumulated in float32, and
    everything from the logits on is float32.
    """
    head = head_VD.astype(hidden_MD.dtype).astype(jnp.float32)
    logits_MV = (hidden_MD.astype(jnp.float32) @ head.T) / jnp.float32(temperature)
    logp_MV = jax.nn.log_softmax(logits_MV, axis=-1)
    logprob_M = jnp.take_along_axis(logp_MV, tokens_M[:, None], axis=-1)[:, 0]
    entropy_M = -jnp.sum(jnp.exp(logp_MV) * logp_MV, axis=-1)
    if not top_k:
        return logprob_M, entropy_M, None, None
    return logprob_M, entropy_M, *jax.lax.top_k(jax.lax.stop_gradient(logp_MV), top_k)
