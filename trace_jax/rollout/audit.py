"""What the sampler really holds and quantises, to be compared with the trainer's audit."""

from typing import Any

from trace_jax import config as cfg
from trace_jax import formats
from trace_jax.formats import Format
from trace_jax.qat import plan as qat_plan
from trace_jax.qat.audit import WEIGHT, Audit, Row
from trace_jax.qat.policy_recipe import site_path


def sampler_audit(model: cfg.Model, quant: cfg.Quant, weights: Any) -> Audit:
    """A row per expert weight and site and layer.

    Args: weights: `SamplerWeights.params`, or their shapes: a weight counts as quantised if it is
          there as packed codes, whatever the configuration says.
    """
    rows = []
    plans = qat_plan.side_segments(quant, model.layers, quant.rollout)
    for segment, stack in zip(plans, weights["segments"], strict=True):
        for layer in range(segment.start, segment.stop):
            for name in ("gate_up", "down"):
                leaf = stack["moe"][name]
                rows.append(_weight(name, layer, leaf, segment.plan.weights, model))
            widths = {"expert_in": model.width, "expert_hidden": model.expert_ffn}
            for name, width in widths.items():
                rows.append(_site(name, layer, width, segment.plan.acts))
            for name in ("k", "v"):
                rows.append(_site(name, layer, model.head_dim, segment.plan.kv))
    return Audit(rows=tuple(rows))


def _weight(name: str, layer: int, leaf: Any, format: Format | None, model: cfg.Model) -> Row:
    """Shapes of packed codes are those of the matrix but for the padding to whole blocks."""
    packed = isinstance(leaf, dict)
    width = model.width if name == "gate_up" else model.expert_ffn
    out = (leaf["codes"] if packed else leaf).shape[1:-1]
    return Row(
        path=f"layers/{layer}/moe/{name}",
        what=WEIGHT,
        shape=(*out, width),
        format=formats.spell(format) if packed and format is not None else None,
        axis=(-1,) if packed else None,
        layer=layer,
    )


def _site(name: str, layer: int, width: int, format: Format | None) -> Row:
    text = None if format is None else formats.spell(format)
    return Row(path=site_path(name, layer), what="tensor", shape=(width,), format=text, layer=layer)
