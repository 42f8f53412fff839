"""Which layers are quantised and guided, resolved from the configuration before anything runs."""

import dataclasses
import math

from trace_jax import config as cfg
from trace_jax import formats, layer_choice, layer_kinds, stacks
from trace_jax.formats import Format
from trace_jax.guidance import codec
from trace_jax.guidance.record import SITES, GuidanceSpec
from trace_jax.layer_kinds import Kind
from trace_jax.model_checks import guidable_sites, quantised_components
from trace_jax.stacks import Segment

_FORMATS = ("weights", "acts", "kv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What happens in one layer; neighbours that repeat a few plans are scanned together."""

    kind: Kind
    weights: Format | None  # of routed-expert weights, or of the dense MLP's
    acts: Format | None  # of the inputs of both their matmuls
    kv: Format | None  # of the KV cache
    recorded: tuple[str, ...]  # sites whose rounding in the rollout is kept

    def format_of(self, site: str) -> Format | None:
        """The format that quantises a site in this layer; None: not quantised, or no such site."""
        if SITES[site] not in (self.kind.mixer, self.kind.ffn):
            return None
        return self.kv if SITES[site] == "attention" else self.acts


def layer_plans(quant: cfg.Quant, model: cfg.Model) -> tuple[LayerPlan, ...]:
    """The plan of each layer; `guide_layers` chooses among those that are quantised."""
    first, stop = quant.keep_first, model.layers - quant.keep_last
    sites, components = guidable_sites(quant, model), quantised_components(quant)
    kept = layer_choice.choose(quant.guide_layers, sites, first, stop) if sites else {}
    plans = []
    for i, kind in enumerate(layer_kinds.kinds(model)):
        used: dict[str, Format | None] = {}
        for name in _FORMATS:
            text = getattr(quant, name)
            has = kind.mixer in components[name] or kind.ffn in components[name]
            inside = first <= i < stop and has
            used[name] = formats.get(text) if inside and text is not None else None
        recorded = tuple(site for site, ids in kept.items() if i in ids)
        plans.append(LayerPlan(kind=kind, **used, recorded=recorded))
    return tuple(plans)


def plain_plans(model: cfg.Model) -> tuple[LayerPlan, ...]:
    """Plans of a side where nothing is quantised or recorded."""
    none = dict.fromkeys(_FORMATS)
    return tuple(LayerPlan(kind=k, **none, recorded=()) for k in layer_kinds.kinds(model))


def plain_segments(model: cfg.Model) -> tuple[Segment, ...]:
    """Segments of a side where nothing is quantised or recorded."""
    return stacks.segments(plain_plans(model), model.full_attention_every)


def side_segments(quant: cfg.Quant, model: cfg.Model, precision: str) -> tuple[Segment, ...]:
    """Segments of one side: nothing is quantised or recorded where its `precision` is "bf16".

    Args: precision: `quant.rollout` for the sampler, `quant.trainer` for the trainer.
    """
    if precision == "bf16":
        return plain_segments(model)
    return stacks.segments(layer_plans(quant, model), model.full_attention_every)


def guidance_spec(quant: cfg.Quant, model: cfg.Model) -> GuidanceSpec | None:
    """What a rollout under `quant` records; None if it records nothing."""
    by_site: dict[str, list[int]] = {}
    for i, plan in enumerate(layer_plans(quant, model)):
        for site in plan.recorded:
            by_site.setdefault(site, []).append(i)
    if quant.rollout == "bf16" or quant.trainer == "bf16" or not by_site:
        return None
    sites = tuple(site for site in SITES if site in by_site)
    texts = [quant.kv if SITES[site] == "attention" else quant.acts for site in sites]
    return GuidanceSpec(
        kind=quant.guide,
        sites=sites,
        layers=tuple(tuple(by_site[site]) for site in sites),
        formats=tuple(formats.spell(formats.get(text or "")) for text in texts),
        scale_bits=quant.guide_scale_bits,
        global_bits=quant.guide_global_bits,
    )


def site_shape(model: cfg.Model, site: str) -> tuple[int, ...]:
    """Shape of one token's values at a site; the last axis is the quantised one."""
    return {
        "expert_in": (model.width,),
        "expert_hidden": (model.experts_per_token, model.expert_ffn),
        "mlp_in": (model.width,),
        "mlp_hidden": (model.dense_ffn,),
        "k": (model.kv_heads, model.head_dim),
        "v": (model.kv_heads, model.head_dim),
    }[site]


def bytes_per_token(spec: GuidanceSpec | None, model: cfg.Model) -> int:
    """Guidance bytes a token costs, from the configuration alone (trace.md, bytes per token)."""
    if spec is None:
        return 0
    sites = {}
    for site, ids, text in zip(spec.sites, spec.layers, spec.formats, strict=True):
        *rows, length = site_shape(model, site)
        sites[site] = codec.SiteCount(
            layers=len(ids), rows=math.prod(rows), length=length, format=formats.get(text)
        )
    return codec.token_bytes(sites, coding=spec.coding)
