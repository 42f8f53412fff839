"""From the trainer's master weights to what the sampler holds: packed FP4 experts, and a version."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax import config as cfg
from trace_jax.formats import e2m1
from trace_jax.qat import plan as qat_plan
from trace_jax.qat import sites
from trace_jax.types import Params

_FLOAT32_LEAVES = ("router", "attention_norm", "moe_norm", "q_norm", "k_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerWeights:
    """What one version of the sampler runs with. Shares no buffer with the trainer."""

    params: dict[str, Any]  # {"embed", "final_norm", ["head"], "segments": tuple of layer stacks}
    version: int  # updates that the trainer had done
    bytes: int  # size of all leaves


def sampler_segments(model: cfg.Model, quant: cfg.Quant) -> tuple[qat_plan.Segment, ...]:
    """Runs of layers with equal plans on the rollout's side."""
    plans = qat_plan.layer_plans(quant, model.layers)
    if quant.rollout == "bf16":
        plain = qat_plan.LayerPlan(experts=False, kv=False, recorded=False)
        plans = (plain,) * model.layers
    return qat_plan.segments(plans)


def make_sync(model: cfg.Model, quant: cfg.Quant) -> Callable[[Params, int], SamplerWeights]:
    """Builds `sync(params, version)`: quantises and packs expert weights, casts the rest.

    Expert weights are quantised from the BF16 cast of the float32 master, exactly as the trainer's
    fake quantisation does, so that both sides hold the same values.
    """
    segments = sampler_segments(model, quant)
    dtype = jnp.dtype(model.compute_dtype)

    @jax.jit
    def pack(params: Params) -> dict[str, Any]:
        layers = []
        for segment in segments:
            stack = jax.tree.map(lambda a, s=segment: a[s.start : s.stop], params["layers"])
            layers.append(_pack_layers(stack, segment.plan.experts, dtype))
        rest = {k: jnp.copy(v) for k, v in params.items() if k != "layers"}
        return {**rest, "segments": tuple(layers)}

    def sync(params: Params, version: int) -> SamplerWeights:
        packed = pack(params)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
        return SamplerWeights(params=packed, version=version, bytes=size)

    return sync


def _pack_layers(stack: Params, quantised: bool, dtype: Any) -> Params:
    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        # a copy even where the dtype stays: the trainer donates its buffers
        name = path[-1].key
        return jnp.copy(leaf) if name in _FLOAT32_LEAVES else jnp.copy(leaf).astype(dtype)

    out = jax.tree_util.tree_map_with_path(cast, stack)
    if quantised:
        for name in ("gate_up", "down"):
            out["moe"][name] = pack_weight(stack["moe"][name])
    return out


def pack_weight(w: jax.Array) -> dict[str, jax.Array]:
    """Packed codes (..., O, K/2), scale bytes (..., O, K/16), global scale (..., 1, 1)."""
    codes, scales, global_ = sites.weight_codes(w.astype(jnp.bfloat16).astype(jnp.float32))
    return {"codes": e2m1.pack(codes), "scales": scales, "global": global_}
