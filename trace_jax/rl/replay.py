"""Rollout routing replay (R3): the trainer goes through the experts that the rollout chose.

All functions work over any leading axes. `E` experts, `X` experts per token; a route of -1 is
padding: no rollout processed that token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from trace_jax.types import Mean


def replayed_gates(
    router_logits: Float[Array, "*A E"], routes: Int[Array, "*A X"], *, renormalise: bool = True
) -> Float[Array, "*A X"]:
    """Gates of the recorded experts from the trainer's own router.

    Math:    g_x = exp(s_x) / sum_{j in routes} exp(s_j), with s the trainer's logits: softmax over
             all experts, then renormalised over the recorded ones (without `renormalise` the sum
             is over all experts). The choice has no gradient, the logits keep theirs.
    Args:    router_logits: any float dtype; arithmetic is float32. routes: ids; -1 is padding.
    Returns: float32 gates; padding gets exactly 0, and exactly no gradient. An id >= E is a bug
             upstream and gives NaN gates.
    Source:  R3 (arXiv 2510.11370), eq. for g_i; Megatron-LM#79 for what goes wrong when gates are
             gathered from zeroed probabilities. Test that states it: tests/rl/replay_test.py
    """
    routes = routes.astype(jnp.int32)
    recorded = routes >= 0
    picked = jnp.take_along_axis(
        router_logits.astype(jnp.float32), jnp.where(recorded, routes, 0), axis=-1, mode="fill"
    )
    # Replaced before exp, not after: the gradient of a masked infinity is NaN.
    picked = jnp.where(recorded, picked, jnp.finfo(jnp.float32).min)
    summed = picked
    if not renormalise:
        processed = jnp.any(recorded, axis=-1, keepdims=True)
        summed = jnp.where(processed, router_logits.astype(jnp.float32), 0.0)
    peak = jax.lax.stop_gradient(jnp.max(summed, axis=-1, keepdims=True))
    weight = jnp.where(recorded, jnp.exp(picked - peak), 0.0)
    every = weight if renormalise else jnp.exp(summed - peak)
    total = jnp.sum(every, axis=-1, keepdims=True)
    return weight / jnp.where(total == 0, 1.0, total)


def top_k_routes(
    router_logits: Float[Array, "*A E"], k: int, *, renormalise: bool = True
) -> tuple[Int32[Array, "*A X"], Float[Array, "*A X"]]:
    """The k experts with the highest logits (the lower id on a tie) and their gates.

    Returns: int32 ids, best first, and float32 gates that are bit for bit those of
             `replayed_gates` for these ids: replaying one's own routes changes nothing.
    """
    _, routes = jax.lax.top_k(jax.lax.stop_gradient(router_logits.astype(jnp.float32)), k)
    routes = routes.astype(jnp.int32)
    return routes, replayed_gates(router_logits, routes, renormalise=renormalise)


def route_mismatch(
    router_logits: Float[Array, "*A E"], routes: Int[Array, "*A X"], valid: Bool[Array, "*A"]
) -> Mean:
    """Fraction of (token, layer) pairs whose own top-k *set* is not the recorded one.

    The order of the experts does not matter. Pairs that are not `valid`, or have no recorded route,
    are not counted.
    """
    own, _ = top_k_routes(router_logits, routes.shape[-1])
    recorded = routes.astype(jnp.int32)
    counted = valid & jnp.all(recorded >= 0, axis=-1)
    differs = jnp.any(jnp.sort(own, axis=-1) != jnp.sort(recorded, axis=-1), axis=-1)
    return Mean(
        total=jnp.sum(differs, where=counted, dtype=jnp.float32),
        count=jnp.sum(counted, dtype=jnp.float32),
    )
