"""From a configuration to what a server is told to quantise and to return."""

import dataclasses
import math

from trace_jax import config as cfg
from trace_jax import formats
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.qat import plan as qat_plan
from trace_jax.rollout.sglang.layout import Layout, SiteLayout, Spelled


def layout_of(model: cfg.Model, quant: cfg.Quant) -> Layout:
    """The layout of a rollout under `quant`: what the sampler quantises, and what it records.

    Raises: ValueError for formats that the plug-in has no quantiser for.
    """
    plans = qat_plan.layer_plans(quant, model)
    if quant.rollout == "bf16":
        plans = qat_plan.plain_plans(model)
    quantised = tuple(i for i, plan in enumerate(plans) if plan.weights or plan.acts or plan.kv)
    spec = qat_plan.guidance_spec(quant, model)
    sites = []
    if spec is not None:
        for site, layers, text in zip(spec.sites, spec.layers, spec.formats, strict=True):
            *rows, length = qat_plan.site_shape(model, site)
            spelled, count = _spell(formats.get(text), f"site {site}"), math.prod(rows)
            sites.append(
                SiteLayout(name=site, format=spelled, rows=count, length=length, layers=layers)
            )
    used = {}
    for name in ("weights", "acts", "kv"):
        text = getattr(quant, name)
        used[name] = None
        if text is not None and quantised:
            used[name] = _spell(formats.get(text), f"config.quant.{name}")
    return Layout(
        layers=model.layers,
        topk=model.experts_per_token,
        kind="codes" if spec is None else spec.kind,
        sites=tuple(sites),
        quantised=quantised,
        **used,
    )


def _spell(format: Format, where: str) -> Spelled:
    options = {f.name: getattr(format, f.name) for f in dataclasses.fields(format)}
    known = format.name == "mxfp4" or (format.name == "nvfp4" and _is_exact(options))
    need = "nvfp4 (convention exact, blocks of 1x16) or mxfp4: what the plug-in rounds as we do"
    require(known, f"sglang: {where}", formats.spell(format), need, "rollout.engine=jax")
    return Spelled(
        name=format.name,
        options=tuple((name, str(value)) for name, value in options.items()),
        block=format.block,
        has_global=format.has_global,
    )


def _is_exact(options: dict[str, str]) -> bool:
    return options["convention"] == "exact" and options["block_shape"] == "1x16"
