"""Which layers are quantised and guided, resolved from the configuration before anything runs."""

import dataclasses
import itertools

from trace_jax import config as cfg
from trace_jax import formats, layer_choice
from trace_jax.config_checks import guidable_sites
from trace_jax.formats import Format
from trace_jax.guidance import codec
from trace_jax.guidance.record import SITES, GuidanceSpec

_FORMATS = ("weights", "acts", "kv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What happens in one layer; layers with equal plans are scanned together."""

    weights: Format | None  # of routed-expert weights
    acts: Format | None  # of the inputs of both expert matmuls
    kv: Format | None  # of the KV cache
    recorded: tuple[str, ...]  # sites whose rounding in the rollout is kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of neighbouring layers with one plan: layers [start, stop)."""

    start: int
    stop: int
    plan: LayerPlan


def layer_plans(quant: cfg.Quant, layers: int) -> tuple[LayerPlan, ...]:
    """The plan of each layer; `guide_layers` chooses among those that are quantised."""
    first, stop = quant.keep_first, layers - quant.keep_last
    sites = guidable_sites(quant)
    kept = layer_choice.choose(quant.guide_layers, sites, first, stop) if sites else {}
    plans = []
    for i in range(layers):
        inside = first <= i < stop
        chosen = {name: getattr(quant, name) if inside else None for name in _FORMATS}
        used = {name: None if text is None else formats.get(text) for name, text in chosen.items()}
        recorded = tuple(site for site, ids in kept.items() if i in ids)
        plans.append(LayerPlan(**used, recorded=recorded))
    return tuple(plans)


def segments(plans: tuple[LayerPlan, ...]) -> tuple[Segment, ...]:
    """Groups neighbouring layers of equal plan, so that each group is one scan."""
    out, start = [], 0
    for plan, group in itertools.groupby(plans):
        stop = start + len(list(group))
        out.append(Segment(start=start, stop=stop, plan=plan))
        start = stop
    return tuple(out)


def side_segments(quant: cfg.Quant, layers: int, precision: str) -> tuple[Segment, ...]:
    """Segments of one side: nothing is quantised or recorded where its `precision` is "bf16".

    Args: precision: `quant.rollout` for the sampler, `quant.trainer` for the trainer.
    """
    plans = layer_plans(quant, layers)
    if precision == "bf16":
        plans = (LayerPlan(weights=None, acts=None, kv=None, recorded=()),) * layers
    return segments(plans)


def guidance_spec(quant: cfg.Quant, layers: int) -> GuidanceSpec | None:
    """What a rollout under `quant` records; None if it records nothing."""
    by_site: dict[str, list[int]] = {}
    for i, plan in enumerate(layer_plans(quant, layers)):
        for site in plan.recorded:
            by_site.setdefault(site, []).append(i)
    if quant.rollout == "bf16" or quant.trainer == "bf16" or not by_site:
        return None
    sites = tuple(site for site in SITES if site in by_site)
    texts = {"expert_in": quant.acts, "expert_hidden": quant.acts, "k": quant.kv, "v": quant.kv}
    return GuidanceSpec(
        kind=quant.guide,
        sites=sites,
        layers=tuple(tuple(by_site[site]) for site in sites),
        formats=tuple(formats.spell(formats.get(texts[site] or "")) for site in sites),
        scale_bits=quant.guide_scale_bits,
        global_bits=quant.guide_global_bits,
    )


def bytes_per_token(spec: GuidanceSpec | None, model: cfg.Model) -> int:
    """Guidance bytes a token costs, from the configuration alone (trace.md, bytes per token)."""
    if spec is None:
        return 0
    rows = {  # vectors with scales of their own, and their length
        "expert_in": (1, model.width),
        "expert_hidden": (model.experts_per_token, model.expert_ffn),
        "k": (model.kv_heads, model.head_dim),
        "v": (model.kv_heads, model.head_dim),
    }
    sites = {}
    for site, ids, text in zip(spec.sites, spec.layers, spec.formats, strict=True):
        count, length = rows[site]
        sites[site] = codec.SiteCount(
            layers=len(ids), rows=count, length=length, format=formats.get(text)
        )
    return codec.token_bytes(sites, coding=spec.coding)
