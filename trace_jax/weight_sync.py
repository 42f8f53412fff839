"""From the trainer's master weights to what the sampler holds: packed FP4 experts, a version."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax import config as cfg
from trace_jax.formats import Format
from trace_jax.qat import plan as qat_plan
from trace_jax.qat import sites
from trace_jax.types import Params

# small, and used in float32 arithmetic on both sides
_FLOAT32_LEAVES = ("router", "attention_norm", "moe_norm", "q_norm", "k_norm", "final_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerWeights:
    """What one version of the sampler runs with. Shares no buffer with the trainer."""

    params: dict[str, Any]  # {"embed", "final_norm", ["head"], "segments": tuple of layer stacks}
    version: int  # updates that the trainer had done
    bytes: int  # size of all leaves


def make_sync(model: cfg.Model, quant: cfg.Quant) -> Callable[[Params, int], SamplerWeights]:
    """Builds `sync(params, version)`: quantises and packs expert weights, casts the rest.

    Expert weights are quantised from the BF16 cast of the float32 master, exactly as the trainer's
    fake quantisation does, so that both sides hold the same values.
    """
    segments = qat_plan.side_segments(quant, model.layers, quant.rollout)
    dtype = jnp.dtype(model.compute_dtype)

    @jax.jit
    def pack(params: Params) -> dict[str, Any]:
        out = jax.tree_util.tree_map_with_path(partial(_cast, dtype), params)
        layers, experts, stacks = out.pop("layers"), params["layers"]["moe"], []
        for segment in segments:
            rows = slice(segment.start, segment.stop)
            stack = jax.tree.map(lambda a, rows=rows: a[rows], layers)
            if segment.plan.weights is not None:
                for name in ("gate_up", "down"):
                    stack["moe"][name] = pack_weight(experts[name][rows], segment.plan.weights)
            stacks.append(stack)
        return {**out, "segments": tuple(stacks)}

    def sync(params: Params, version: int) -> SamplerWeights:
        packed = pack(params)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
        return SamplerWeights(params=packed, version=version, bytes=size)

    return sync


def _cast(dtype: Any, path: Any, leaf: jax.Array) -> jax.Array:
    # a copy even where the dtype stays: the trainer donates its buffers
    copied = jnp.copy(leaf)
    return copied if path[-1].key in _FLOAT32_LEAVES else copied.astype(dtype)


def pack_weight(w: jax.Array, format: Format) -> dict[str, jax.Array]:
    """Packed codes (..., O, K/2), scale bytes (..., O, S), global scale (..., 1, 1), 1 if none."""
    codes, scales, global_ = sites.weight_codes(w, format)
    if global_ is None:
        global_ = jnp.ones((*w.shape[:-2], 1, 1), jnp.float32)
    return {"codes": format.pack_codes(codes), "scales": scales, "global": global_}
