"""Which layers are quantised and guided, resolved from the configuration before anything runs."""

import dataclasses
import itertools
import re

from trace_jax import config as cfg
from trace_jax import formats
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.guidance import codec
from trace_jax.guidance.record import GuidanceSpec

_FORMATS = ("weights", "acts", "kv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What happens in one layer; layers with equal plans are scanned together."""

    weights: Format | None  # of routed-expert weights
    acts: Format | None  # of the inputs of both expert matmuls
    kv: Format | None  # of the KV cache
    recorded: bool  # the rollout's rounding is kept for this layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of neighbouring layers with one plan: layers [start, stop)."""

    start: int
    stop: int
    plan: LayerPlan


def parse_layers(text: str, layers: int, first: int = 0) -> tuple[int, ...]:
    """Layer ids of "all", "latter_half", "last:N" or "0,3,5", ascending.

    Args:   layers, first: the choice is among layers first..layers-1, and halves and counts are of
            these; ids are absolute.
    Raises: ValueError if the text is none of these or names a layer outside.
    """
    where = "config.quant.guide_layers"
    if text == "all":
        return tuple(range(first, layers))
    if text == "latter_half":
        return tuple(range((first + layers) // 2, layers))
    found = re.fullmatch(r"(last:)?(\d+(?:,\d+)*)", text)
    numbers = [] if found is None else [int(number) for number in found[2].split(",")]
    last = found is not None and found[1] is not None
    known = len(numbers) == 1 or (bool(numbers) and not last)
    require(known, where, repr(text), 'one of "all", "latter_half", "last:N", "0,3,5"')
    if last:
        require(0 < numbers[0] <= layers - first, where, text, f"last:1 to last:{layers - first}")
        return tuple(range(layers - numbers[0], layers))
    inside = all(first <= number < layers for number in numbers)
    require(inside, where, text, f"layer ids {first}..{layers - 1}")
    return tuple(sorted(set(numbers)))


def layer_plans(quant: cfg.Quant, layers: int) -> tuple[LayerPlan, ...]:
    """The plan of each layer; `guide_layers` chooses among those that are quantised."""
    first, stop = quant.keep_first, layers - quant.keep_last
    kept = set(parse_layers(quant.guide_layers, stop, first))
    plans = []
    for i in range(layers):
        inside = first <= i < stop
        chosen = {name: getattr(quant, name) if inside else None for name in _FORMATS}
        used = {name: None if text is None else formats.get(text) for name, text in chosen.items()}
        guidable = used["acts"] is not None or used["kv"] is not None
        plans.append(LayerPlan(**used, recorded=guidable and i in kept))
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
        plans = (LayerPlan(weights=None, acts=None, kv=None, recorded=False),) * layers
    return segments(plans)


def guidance_spec(quant: cfg.Quant, layers: int) -> GuidanceSpec | None:
    """What a rollout under `quant` records; None if it records nothing."""
    recorded = tuple(i for i, p in enumerate(layer_plans(quant, layers)) if p.recorded)
    if quant.rollout == "bf16" or quant.trainer == "bf16" or not recorded:
        return None
    sites = {"expert_in": quant.acts, "expert_hidden": quant.acts, "k": quant.kv, "v": quant.kv}
    if not quant.guide_hidden:
        del sites["expert_hidden"]
    named = {site: formats.spell(formats.get(text)) for site, text in sites.items() if text}
    return GuidanceSpec(
        kind=quant.guide,
        layers=recorded,
        sites=tuple(named),
        formats=tuple(named.values()),
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
    total = 0
    for site, text in zip(spec.sites, spec.formats, strict=True):
        count, length = rows[site]
        format = formats.get(text)
        total += codec.site_bytes(count * length, format=format, coding=spec.coding, rows=count)
    return len(spec.layers) * total
