"""The configuration's quant section as a recipe over the policy, and the trainer's audit.

The policy's layers are stacked: parameters are `layers/moe/gate_up` and so on, with a leading axis
of layers; sites are named where their tensors arise, such as `layers/3/moe/expert_in`. K and V have
a path of their own, `layers/3/attention/k_cache`: `.../k` is the projection's weight.
"""

import dataclasses
from typing import Any

from trace_jax import config as cfg
from trace_jax.formats import Format
from trace_jax.qat import plan as qat_plan
from trace_jax.qat.audit import Audit, Row
from trace_jax.qat.recipe import Recipe, Rule
from trace_jax.qat.resolve import Seen, resolve
from trace_jax.qat.transform import tree_weights

PATHS = {  # of the sites within a layer
    "expert_in": "moe/expert_in",
    "expert_hidden": "moe/expert_hidden",
    "k": "attention/k_cache",
    "v": "attention/v_cache",
}


def site_path(name: str, layer: int) -> str:
    """The path of a site of the policy in the audit."""
    return f"layers/{layer}/{PATHS[name]}"


def expert_weights(format: str | Format, layer: str = "") -> Rule:
    """The rule for routed-expert weights (E, out, in); `layer`: the path before, with its "/"."""
    pattern = f"{layer}moe/{{gate_up,down}}"
    return Rule(pattern, weights=format, axis=-1, out=-2, guide=None)


def recipe(quant: cfg.Quant) -> Recipe:
    """What `quant` says, as rules over the policy's tree."""
    rules = []
    if quant.weights is not None:
        rules.append(expert_weights(quant.weights, "layers/*/"))
    if quant.acts is not None:
        hidden = quant.guide if quant.guide_hidden else None
        rules.append(Rule("layers/*/moe/expert_in", tensors=quant.acts, guide=quant.guide))
        rules.append(Rule("layers/*/moe/expert_hidden", tensors=quant.acts, guide=hidden))
    if quant.kv is not None:
        rules.append(Rule("layers/*/attention/{k,v}_cache", tensors=quant.kv, guide=quant.guide))
    return Recipe(
        rules=tuple(rules),
        layers="layers/*",
        scanned=True,
        keep_first=quant.keep_first,
        keep_last=quant.keep_last,
    )


def trainer_audit(model: cfg.Model, quant: cfg.Quant, params: Any) -> Audit:
    """Every parameter and site of the trainer's policy, and what the recipe makes of it.

    Args:    params: the policy's parameters, or their shapes.
    Raises:  ValueError as `resolve` does: a rule that matches nothing, and so on.
    """
    L = model.layers
    widths = {
        "expert_in": model.width,
        "expert_hidden": model.expert_ffn,
        "k": model.head_dim,
        "v": model.head_dim,
    }
    seen = {
        f"layers/{PATHS[name]}": Seen(
            module=f"layers/{PATHS[name].partition('/')[0]}", what="tensor", shape=(L, width)
        )
        for name, width in widths.items()
    }
    if quant.trainer == "bf16":
        return Audit(rows=tuple(_plain(tree_weights(params), seen, L)))
    audit = resolve(recipe(quant), tree_weights(params), seen).audit
    recorded = {
        site_path(site, i)
        for i, plan in enumerate(qat_plan.layer_plans(quant, L))
        for site in plan.recorded
    }
    rows = [
        row if row.path in recorded else dataclasses.replace(row, guide=None) for row in audit.rows
    ]
    return Audit(rows=tuple(rows))


def _plain(weights: dict, seen: dict, layers: int):
    """Rows of a side that quantises nothing."""
    why = 'quant.trainer="bf16"'
    for path, weight in weights.items():
        yield Row(path=path, what="weight", shape=weight.shape, format=None, why=why)
    for path, site in seen.items():
        yield Row(path=path, what=site.what, shape=site.shape, format=None, why=why)
