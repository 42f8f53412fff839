"""What the sampler really holds and quantises, to be compared with the trainer's audit."""

from typing import Any

from trace_jax import config as cfg
from trace_jax import formats, weight_sync
from trace_jax.formats import Format
from trace_jax.guidance.record import SITES
from trace_jax.qat import plan as qat_plan
from trace_jax.qat.audit import WEIGHT, Audit, Row
from trace_jax.qat.policy_recipe import site_path


def sampler_audit(model: cfg.Model, quant: cfg.Quant, weights: Any) -> Audit:
    """A row per matrix of experts or MLP and per site, of each layer.

    Args: weights: `SamplerWeights.params`, or their shapes: a weight counts as quantised if it is
          there as packed codes, whatever the configuration says.
    """
    rows = []
    for segment, stack in zip(
        qat_plan.side_segments(quant, model, quant.rollout), weights["segments"], strict=True
    ):
        for layer, plan in enumerate(segment.layers, segment.start):
            component = plan.kind.ffn
            for name in weight_sync.MATRICES:
                leaf = stack[component][name]
                rows.append(_weight(component, name, layer, leaf, plan.weights, model))
            for site, place in SITES.items():
                if place in (plan.kind.mixer, plan.kind.ffn):
                    width = qat_plan.site_shape(model, site)[-1]
                    rows.append(_site(site, layer, width, plan.format_of(site)))
    return Audit(rows=tuple(rows))


def _weight(
    component: str, name: str, layer: int, leaf: Any, format: Format | None, model: cfg.Model
) -> Row:
    """Shapes of packed codes are those of the matrix but for the padding to whole blocks."""
    packed = isinstance(leaf, dict)
    hidden = model.expert_ffn if component == "moe" else model.dense_ffn
    width = model.width if name == "gate_up" else hidden
    out = (leaf["codes"] if packed else leaf).shape[1:-1]
    return Row(
        path=f"layers/{layer}/{component}/{name}",
        what=WEIGHT,
        shape=(*out, width),
        format=formats.spell(format) if packed and format is not None else None,
        axis=(-1,) if packed else None,
        layer=layer,
    )


def _site(name: str, layer: int, width: int, format: Format | None) -> Row:
    text = None if format is None else formats.spell(format)
    return Row(path=site_path(name, layer), what="tensor", shape=(width,), format=text, layer=layer)
