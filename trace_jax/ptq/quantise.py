"""A model's weights quantised after training: what the sampler runs with, and their values."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from trace_jax import config as cfg
from trace_jax import layer_kinds, stacks, weight_sync
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.ptq import hscale
from trace_jax.ptq.calibration import Hessian
from trace_jax.qat import plan as qat_plan
from trace_jax.types import Params
from trace_jax.weight_sync import SamplerWeights


def quantise(
    model: cfg.Model, quant: cfg.Quant, params: Params, hessian: Hessian | None, version: int = 0
) -> SamplerWeights:
    """Packed weights of the sampler; with a Hessian, scales by H-Scale.

    Args:   quant: which layers and matrices, in which format, as for a rollout. params: master
            weights. hessian: of `calibrate`; None: the format's own scales.
    Raises: ValueError if `quant` quantises no weights of this model.
    """
    plain = weight_sync.make_sync(model, quant)(params, version)
    if hessian is None:
        return plain
    segments, refined = [], 0
    for segment, stack in _packed_segments(model, quant, plain):
        found = {
            name: dict(leaf) if isinstance(leaf, dict) else leaf for name, leaf in stack.items()
        }
        for component, format in weight_sync.packed_components(segment).items():
            ids = stacks.ids_in(segment)[component]
            for name in weight_sync.MATRICES:
                w, h = (
                    stacks.rows_of((layer_kinds.layers_with(model, component), leaf), ids)
                    for leaf in (
                        params["layers"][component][name],
                        hessian.diagonal(component, name),
                    )
                )
                found[component][name] = hscale.refine(
                    w, jnp.asarray(h), stack[component][name], format
                )
                refined += 1
        segments.append(found)
    fix = 'rollout="fp4", a format in weights, and mlps="all" for dense layers'
    require(refined > 0, "ptq: quant", "no quantised weights", "some", fix)
    return weight_sync.sampler_weights({**plain.params, "segments": tuple(segments)}, version)


@partial(jax.jit, static_argnames=("format", "width"))
def values(packed: dict[str, Array], format: Format, width: int) -> Float[Array, "*A O K"]:
    """float32 values of packed weights, `width` of each row (the rest is padding)."""
    codes = format.unpack_codes(packed["codes"])[..., : format.padded(width)]
    return format.dequantize_rows(codes, packed["scales"], packed["global"])[..., :width]


def dequantised(
    model: cfg.Model, quant: cfg.Quant, params: Params, weights: SamplerWeights
) -> Params:
    """Parameters with the values of the sampler's quantised matrices in place of the masters."""
    rows: dict[tuple[str, str], list[Any]] = {}
    layers = {k: dict(v) if isinstance(v, dict) else v for k, v in params["layers"].items()}
    for segment, stack in _packed_segments(model, quant, weights):
        packed = weight_sync.packed_components(segment)
        for component in {plan.kind.ffn for plan in segment.period}:
            every = layer_kinds.layers_with(model, component)
            ids = stacks.ids_in(segment)[component]
            for name in weight_sync.MATRICES:
                master = stacks.rows_of((every, params["layers"][component][name]), ids)
                if component in packed:
                    format, leaf = packed[component], stack[component][name]
                    master = values(leaf, format, master.shape[-1])
                rows.setdefault((component, name), []).append(master)
    for (component, name), parts in rows.items():
        layers[component][name] = jnp.concatenate(parts)
    return {**params, "layers": layers}


def _packed_segments(model: cfg.Model, quant: cfg.Quant, weights: SamplerWeights) -> Any:
    segments = qat_plan.side_segments(quant, model, quant.rollout)
    return zip(segments, weights.params["segments"], strict=True)


def weight_errors(
    model: cfg.Model, params: Params, approximate: Params, hessian: Hessian
) -> tuple[float, float]:
    """Relative errors of all expert and MLP matrices, (plain, weighted by h); float64.

    Math: sqrt(sum (w - w^)^2 / sum w^2), and the same with h in both sums.
    """
    sums = np.zeros(4)
    for component in ("moe", "mlp"):
        if not layer_kinds.layers_with(model, component):
            continue
        for name in weight_sync.MATRICES:
            h = hessian.diagonal(component, name)
            for row in range(len(h)):  # a layer at a time: float64 of all would be large
                w, approx = (
                    np.asarray(p["layers"][component][name][row], np.float64)
                    for p in (params, approximate)
                )
                error, power = np.square(approx - w), np.square(w)
                weight = h[row].astype(np.float64)[..., None, :]
                parts = (error, power, weight * error, weight * power)
                sums += [np.sum(part) for part in parts]
    return float(np.sqrt(sums[0] / sums[1])), float(np.sqrt(sums[2] / sums[3]))
