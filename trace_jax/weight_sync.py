"""From the trainer's master weights to what the sampler holds: packed FP4 matrices, a version.

`layer` and `assemble` take a sampler's parameters apart layer by layer, and put them together.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax import config as cfg
from trace_jax import stacks
from trace_jax.checks import message, require
from trace_jax.formats import Format
from trace_jax.qat import plan as qat_plan
from trace_jax.qat import sites
from trace_jax.stacks import Segment
from trace_jax.types import Params

MATRICES = ("gate_up", "down")  # of "moe" and "mlp": what is packed where a layer's plan says so
# small, and used in float32 arithmetic on both sides
_FLOAT32_LEAVES = ("router", "shared_gate", "A_log", "dt_bias", "conv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerWeights:
    """What one version of the sampler runs with. Shares no buffer with the trainer."""

    params: dict[str, Any]  # {"embed", "final_norm", ["head"], "segments": tuple of layer stacks}
    version: int  # updates that the trainer had done
    bytes: int  # size of all leaves


def make_sync(model: cfg.Model, quant: cfg.Quant) -> Callable[[Params, int], SamplerWeights]:
    """Builds `sync(params, version)`: quantises and packs experts (and MLPs), casts the rest.

    Weights are quantised from the BF16 cast of the float32 master, exactly as the trainer's
    fake quantisation does, so that both sides hold the same values.
    """
    segments = qat_plan.side_segments(quant, model, quant.rollout)

    @jax.jit
    def pack(params: Params) -> dict[str, Any]:
        rest = cast(model, {name: leaf for name, leaf in params.items() if name != "layers"})
        found = []
        for segment in segments:
            master = stacks.cut(model, segment, params["layers"])
            stack = cast(model, master)
            for component, format in packed_components(segment).items():
                for name in MATRICES:
                    stack[component][name] = pack_weight(master[component][name], format)
            found.append(stack)
        return {**rest, "segments": tuple(found)}

    def sync(params: Params, version: int) -> SamplerWeights:
        return sampler_weights(pack(params), version)

    return sync


def sampler_weights(params: dict[str, Any], version: int) -> SamplerWeights:
    """A sampler's parameters with their size."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return SamplerWeights(params=params, version=version, bytes=size)


def packed_components(segment: Segment) -> dict[str, Format]:
    """Which of "moe" and "mlp" are packed in a segment, and in which format."""
    found: dict[str, set[Format | None]] = {}
    for plan in segment.period:
        found.setdefault(plan.kind.ffn, set()).add(plan.weights)
    need = "one format for the layers of one component that are scanned together"
    for component, some in found.items():
        require(len(some) == 1, f"weight sync: {component}", f"{len(some)} formats", need)
    chosen = {component: next(iter(some)) for component, some in found.items()}
    return {component: format for component, format in chosen.items() if format is not None}


def layer(params: Mapping[str, Any], segments: Sequence[Segment], index: int) -> dict[str, Any]:
    """One layer of a sampler's parameters: a dict for each component, and its norms.

    Args:   segments: `qat.plan.side_segments(quant, model, quant.rollout)`. index: of the layer.
    """
    for segment, stack in zip(segments, params["segments"], strict=True):
        if segment.start <= index < segment.stop:
            return stacks.layer_of(segment, stack, index)
    need = f"a layer, 0..{segments[-1].stop - 1}"
    raise ValueError(message("weight sync: layer", index, need))


def assemble(
    layers: Sequence[Mapping[str, Any]], segments: Sequence[Segment], rest: Mapping[str, Any]
) -> dict[str, Any]:
    """Inverse of `layer` over all layers: a sampler's parameters.

    Args: layers: of the whole model, in order. rest: "embed", "final_norm" and, untied, "head".
    """
    count = segments[-1].stop
    require(len(layers) == count, "weight sync: layers", len(layers), count)
    found = (stacks.stack_layers(s, layers[s.start : s.stop]) for s in segments)
    return {**rest, "segments": tuple(found)}


def cast(model: cfg.Model, params: Any) -> Any:
    """Parameters in the sampler's dtypes, copied even where the dtype stays.

    The trainer donates its buffers. What both sides use in float32 arithmetic stays in float32.
    """
    return jax.tree_util.tree_map_with_path(partial(_cast, jnp.dtype(model.compute_dtype)), params)


def is_float32(name: str) -> bool:
    """Whether a leaf of this name stays in float32."""
    return name in _FLOAT32_LEAVES or name.endswith("norm")


def _cast(dtype: Any, path: Any, leaf: jax.Array) -> jax.Array:
    copied = jnp.copy(leaf)
    return copied if is_float32(path[-1].key) else copied.astype(dtype)


def pack_weight(w: jax.Array, format: Format) -> dict[str, jax.Array]:
    """Packed codes (..., O, K/2), scale bytes (..., O, S), global scale (..., 1, 1), 1 if none."""
    codes, scales, global_ = sites.weight_codes(w, format)
    if global_ is None:
        global_ = jnp.ones((*w.shape[:-2], 1, 1), jnp.float32)
    return {"codes": format.pack_codes(codes), "scales": scales, "global": global_}
