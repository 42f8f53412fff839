"""Which layers are quantised and guided, resolved from the configuration once, before anything runs."""

import dataclasses
import itertools

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.guidance import codec
from trace_jax.guidance.record import GuidanceSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What happens in one layer; layers with equal plans are scanned together."""

    experts: bool  # routed experts W4A4
    kv: bool  # KV cache in FP4
    recorded: bool  # the rollout's rounding is kept for this layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of neighbouring layers with one plan: layers [start, stop)."""

    start: int
    stop: int
    plan: LayerPlan


def parse_layers(text: str, layers: int) -> tuple[int, ...]:
    """Layer ids of "all", "latter_half", "last:N" or "0,3,5", ascending.

    Raises: ValueError if the text is none of these or names a layer that does not exist.
    """
    where, need = "config.quant.guide_layers", 'one of "all", "latter_half", "last:N", "0,3,5"'
    if text == "all":
        return tuple(range(layers))
    if text == "latter_half":
        return tuple(range(layers // 2, layers))
    try:
        if text.startswith("last:"):
            count = int(text.removeprefix("last:"))
            require(0 < count <= layers, where, text, f"last:1 to last:{layers}")
            return tuple(range(layers - count, layers))
        ids = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        require(False, where, text, need, str(error))
        raise
    require(all(0 <= i < layers for i in ids), where, text, f"layer ids 0..{layers - 1}")
    return ids


def layer_plans(quant: cfg.Quant, layers: int) -> tuple[LayerPlan, ...]:
    """The plan of each layer. Nothing is quantised in high-precision rollouts and trainers alike."""
    kept = set(parse_layers(quant.guide_layers, layers))
    plans = []
    for i in range(layers):
        inside = quant.keep_first <= i < layers - quant.keep_last
        experts, kv = quant.experts and inside, quant.kv and inside
        plans.append(LayerPlan(experts=experts, kv=kv, recorded=(experts or kv) and i in kept))
    return tuple(plans)


def segments(plans: tuple[LayerPlan, ...]) -> tuple[Segment, ...]:
    """Groups neighbouring layers of equal plan, so that each group is one scan."""
    out, start = [], 0
    for plan, group in itertools.groupby(plans):
        stop = start + len(list(group))
        out.append(Segment(start=start, stop=stop, plan=plan))
        start = stop
    return tuple(out)


def guidance_spec(quant: cfg.Quant, layers: int) -> GuidanceSpec | None:
    """What a rollout under `quant` records; None if it records nothing."""
    recorded = tuple(i for i, p in enumerate(layer_plans(quant, layers)) if p.recorded)
    if quant.rollout == "bf16" or quant.trainer == "bf16" or not recorded:
        return None
    sites = ("expert_in",) if quant.experts else ()
    sites += ("expert_hidden",) if quant.experts and quant.guide_hidden else ()
    sites += ("k", "v") if quant.kv else ()
    return GuidanceSpec(kind=quant.guide, layers=recorded, sites=sites)


def bytes_per_token(spec: GuidanceSpec | None, model: cfg.Model, quant: cfg.Quant) -> int:
    """Guidance bytes a token costs, from the configuration alone (trace.md, bytes per token)."""
    if spec is None:
        return 0
    act, kv = int(quant.act_global != "one"), int(quant.kv_global != "one")
    head_values = model.kv_heads * model.head_dim
    cost = {
        "expert_in": codec.site_bytes(model.width, spec.kind, act),
        "expert_hidden": model.experts_per_token
        * codec.site_bytes(model.expert_ffn, spec.kind, act),
        "k": codec.site_bytes(head_values, spec.kind, model.kv_heads * kv),
        "v": codec.site_bytes(head_values, spec.kind, model.kv_heads * kv),
    }
    return len(spec.layers) * sum(cost[site] for site in spec.sites)
