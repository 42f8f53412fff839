"""Sparse upcycling: a mixture of experts whose every expert starts as the dense model's MLP.

    model, params = trace_jax.load("checkpoints/smollm2", dtype="float32")
    model, params = upcycle(model, params, experts=8, experts_per_token=2, key=jax.random.key(0))

Every dense MLP is copied into E experts and gets a small random router; all else stays. Gates of a
token's experts sum to one and equal experts give equal outputs, so without noise the new model
computes the old one's function, whatever the router says; training then tells the experts apart.
Saved as Qwen3-MoE (from Qwen3) or Mixtral (from Llama), which transformers loads.
Source: Sparse Upcycling, arXiv 2212.05055. It leaves some layers dense and does not renormalise
gates in its language models; here every MLP is upcycled and gates are renormalised.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.types import Params

FAMILIES = {"qwen3": "qwen3_moe", "llama": "mixtral"}
ROUTER_STD = 0.02  # of logits per unit of input: nearly uniform at the start
MATRICES = ("gate_up", "down")


def upcycle(
    model: cfg.Model,
    params: Params,
    *,
    experts: int,
    experts_per_token: int,
    key: jax.Array,
    noise: float = 0.0,
    router_std: float = ROUTER_STD,
) -> tuple[cfg.Model, Params]:
    """The mixture of experts that starts as a dense model, and its parameters.

    Memory: the MLPs' parameters times `experts`.
    Args:   model, params: a dense Qwen3 or Llama, as `trace_jax.load` gives them. key: of the
            routers and the noise. noise: standard deviation of what is added to each copy, as a
            part of its matrix's own; the first copy stays as it is. router_std: of the routers.
    Raises: ValueError for a model that has experts already, or whose family has no MoE form.
    """
    where = "upcycle"
    require(model.experts == 0, f"{where}: model.experts", model.experts, "0: a dense model")
    require(model.family in FAMILIES, f"{where}: family", model.family, f"one of {list(FAMILIES)}")
    require(experts >= 1, f"{where}: experts", experts, ">= 1")
    good = 1 <= experts_per_token <= experts
    require(good, f"{where}: experts_per_token", experts_per_token, f"1..experts ({experts})")
    require(noise >= 0, f"{where}: noise", noise, ">= 0")
    require(router_std >= 0, f"{where}: router_std", router_std, ">= 0")
    new = dataclasses.replace(
        model,
        family=FAMILIES[model.family],
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=model.dense_ffn,
        dense_ffn=0,
        renormalise_gates=True,
    )
    mlp = params["layers"]["mlp"]
    router_key, *keys = jax.random.split(key, 1 + len(MATRICES))
    shape = (model.layers, model.width, experts)
    moe = {"router": jax.random.normal(router_key, shape, jnp.float32) * jnp.float32(router_std)}
    for name, of_noise in zip(MATRICES, keys, strict=True):
        moe[name] = copies(mlp[name], experts, noise, of_noise)
    kept = {name: leaf for name, leaf in params["layers"].items() if name != "mlp"}
    return new, {**params, "layers": {**kept, "moe": moe}}


def copies(w: Array, experts: int, noise: float, key: jax.Array) -> Array:
    """(L, O, K) as (L, E, O, K), all copies but the first with noise."""
    shape = (w.shape[0], experts, *w.shape[1:])
    repeated = jnp.broadcast_to(w[:, None], shape)
    if noise == 0:
        return repeated.astype(w.dtype)
    size = jnp.std(w.astype(jnp.float32), axis=(1, 2), keepdims=True)[:, None] * jnp.float32(noise)
    drawn = jax.random.normal(key, shape, jnp.float32).at[:, 0].set(0) * size
    return (repeated.astype(jnp.float32) + drawn).astype(w.dtype)
