"""How a chat chooses its next token: greedy, or sampled from a truncated distribution.

Training samples from the full distribution only (`jax_engine`); these are for generating text.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.checks import require

# (logits_BV, keys_B, step) -> (token_B, logprob_B)
Draw = Callable[..., tuple[Array, Array]]


def make_draw(temperature: float, top_p: float | None = None, top_k: int | None = None) -> Draw:
    """Builds `draw(logits_BV, keys_B, step) -> (token_B, logprob_B)`.

    Log-probs (nats) are of the full distribution at the temperature, at 1 if that is 0.

    Args:   temperature: 0 takes the most likely token, the first of equals.
            top_k: sample from that many most likely tokens (all of those equal to the last too).
            top_p: sample from the fewest most likely tokens whose probabilities, after top_k, add
            up to at least this.
    Raises: ValueError for a value out of bounds.
    """
    where = "sampling"
    require(temperature >= 0, f"{where}: temperature", temperature, ">= 0")
    require(top_p is None or 0 < top_p <= 1, f"{where}: top_p", top_p, "> 0 and <= 1")
    require(top_k is None or top_k >= 1, f"{where}: top_k", top_k, ">= 1")

    def draw(
        logits_BV: Float[Array, "B V"], keys_B: Array, step: Int[Array, ""]
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        logits_BV = logits_BV.astype(jnp.float32)
        if temperature == 0:
            scaled = logits_BV
            token_B = jnp.argmax(logits_BV, axis=1).astype(jnp.int32)
        else:
            scaled = logits_BV / jnp.float32(temperature)
            allowed = scaled if top_k is None else _top_k(scaled, top_k)
            allowed = allowed if top_p is None else _top_p(allowed, top_p)
            keys = jax.vmap(lambda k: jax.random.fold_in(k, step))(keys_B)
            token_B = jax.vmap(jax.random.categorical)(keys, allowed).astype(jnp.int32)
        chosen = jnp.take_along_axis(scaled, token_B[:, None], axis=1)[:, 0]
        return token_B, chosen - jax.nn.logsumexp(scaled, axis=1)

    return draw


def _top_k(logits_BV: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """-inf below the k-th largest of each row."""
    k = min(k, logits_BV.shape[1])
    least_B1 = jax.lax.top_k(logits_BV, k)[0][:, -1:]
    return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)


def _top_p(logits_BV: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """-inf outside the nucleus: a token stays if what is more likely adds up to less than p."""
    order_BV = jnp.argsort(-logits_BV, axis=1, stable=True)
    sorted_BV = jnp.take_along_axis(jax.nn.softmax(logits_BV, axis=1), order_BV, axis=1)
    before_BV = jnp.cumsum(sorted_BV, axis=1) - sorted_BV
    keep_BV = before_BV < jnp.float32(p)
    rows = jnp.arange(logits_BV.shape[0])[:, None]
    keep_BV = jnp.zeros_like(keep_BV).at[rows, order_BV].set(keep_BV)
    return jnp.where(keep_BV, logits_BV, -jnp.inf)
