"""The configuration's quant section as a recipe over the policy, and the trainer's audit.

The policy's layers are stacked: parameters are `layers/moe/gate_up` and so on, with a leading axis
of the layers that have the component; sites are named where their tensors arise, such as
`layers/3/moe/expert_in`. K and V have a path of their own, `layers/3/attention/k_cache`: `.../k` is
the projection's weight.
"""

import dataclasses
from typing import Any

from trace_jax import config as cfg
from trace_jax import layer_kinds, stacks
from trace_jax.formats import Format
from trace_jax.guidance.record import SITES
from trace_jax.qat import plan as qat_plan
from trace_jax.qat.audit import Audit, Row
from trace_jax.qat.recipe import Recipe, Rule
from trace_jax.qat.resolve import Seen, resolve
from trace_jax.qat.transform import tree_weights

PATHS = {  # of the sites within a layer
    site: f"{component}/{site}_cache" if component == "attention" else f"{component}/{site}"
    for site, component in SITES.items()
}


def site_path(name: str, layer: int) -> str:
    """The path of a site of the policy in the audit."""
    return f"layers/{layer}/{PATHS[name]}"


def matrices(component: str, format: str | Format, layer: str = "") -> Rule:
    """The rule for the weights (..., out, in) of experts ("moe") or of dense MLPs ("mlp").

    Args: layer: the path before, with its "/".
    """
    pattern = f"{layer}{component}/{{gate_up,down}}"
    return Rule(pattern, weights=format, axis=-1, out=-2, guide=None)


def recipe(quant: cfg.Quant, model: cfg.Model) -> Recipe:
    """What `quant` says of this model, as rules over the policy's tree."""
    plans, rules = qat_plan.layer_plans(quant, model), []
    if quant.weights is not None:
        used = {plan.kind.ffn for plan in plans if plan.weights is not None}
        rules += [matrices(c, quant.weights, "layers/*/") for c in ("moe", "mlp") if c in used]
    for site in SITES:
        if any(plan.format_of(site) is not None for plan in plans):
            recorded = quant.guide_hidden or not site.endswith("_hidden")
            text = quant.kv if SITES[site] == "attention" else quant.acts
            guide = quant.guide if recorded else None
            rules.append(Rule(f"layers/*/{PATHS[site]}", tensors=text, guide=guide))
    return Recipe(
        rules=tuple(rules),
        layers="layers/*",
        scanned=True,
        rows=_rows(model),
        keep_first=quant.keep_first,
        keep_last=quant.keep_last,
    )


def _rows(model: cfg.Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The layers of each stack that some layers lack."""
    ids = stacks.ids_by_stack(layer_kinds.kinds(model))
    return tuple((f"layers/{name}", ids) for name, ids in ids.items() if len(ids) < model.layers)


def trainer_audit(model: cfg.Model, quant: cfg.Quant, params: Any) -> Audit:
    """Every parameter and site of the trainer's policy, and what the recipe makes of it.

    Args:    params: the policy's parameters, or their shapes.
    Raises:  ValueError as `resolve` does: a rule that matches nothing, and so on.
    """
    seen = {}
    for name, component in SITES.items():
        ids = layer_kinds.layers_with(model, component)
        if ids:
            shape = (len(ids), qat_plan.site_shape(model, name)[-1])
            module = f"layers/{component}"
            seen[f"layers/{PATHS[name]}"] = Seen(module=module, what="tensor", shape=shape)
    if quant.trainer == "bf16":
        return Audit(rows=tuple(_plain(tree_weights(params), seen)))
    audit = resolve(recipe(quant, model), tree_weights(params), seen).audit
    recorded = {
        site_path(site, i)
        for i, plan in enumerate(qat_plan.layer_plans(quant, model))
        for site in plan.recorded
    }
    rows = [
        row if row.path in recorded else dataclasses.replace(row, guide=None) for row in audit.rows
    ]
    return Audit(rows=tuple(rows))


def _plain(weights: dict, seen: dict):
    """Rows of a side that quantises nothing."""
    why = 'quant.trainer="bf16"'
    for path, weight in weights.items():
        yield Row(path=path, what="weight", shape=weight.shape, format=None, why=why)
    for path, site in seen.items():
        yield Row(path=path, what=site.what, shape=site.shape, format=None, why=why)
