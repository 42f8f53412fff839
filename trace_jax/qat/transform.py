"""The pure transform of a parameter tree: matrices that a recipe names are fake-quantised by path.

Works on any pytree whose keys are names: nested dicts, `flax.nnx.State`, lists. No framework is
needed, so the same function serves Flax models, hand-written ones, and the trainer's own policy.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from trace_jax.checks import require
from trace_jax.qat import sites
from trace_jax.qat.recipe import Recipe
from trace_jax.qat.resolve import Layout, Plan, Weight, WeightPlan, resolve

Tree = TypeVar("Tree")


def quantize_params(params: Tree, recipe: Recipe | Plan) -> Tree:
    """The tree with every matrix that the recipe names fake-quantised, straight-through.

    Math:    a matrix has its contracted axes flattened into one, blocks along it, and one global
             scale; stacked matrices (experts, layers) are independent. The source precision is
             the BF16 cast (`sites.quantize_weight`).
    Args:    params: float leaves under names. recipe: or a plan resolved from one.
    Returns: the same tree, leaves in their own dtype; differentiable, each cotangent passes
             unchanged.
    Raises:  ValueError as `resolve` does, and for a parameter of the plan that is missing.
    Source:  TRACE (arXiv 2610.07767): both sides quantise the same synced source.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = [path_of(keys) for keys, _ in leaves]
    values = dict(zip(paths, (leaf for _, leaf in leaves), strict=True))
    plan = resolve(recipe, tree_weights(params)) if isinstance(recipe, Recipe) else recipe
    missing = sorted(set(plan.weights) - set(values))
    require(not missing, "qat.quantize_params", f"no {missing[:5]}", "the parameters of the plan")
    alone = set(plan.weights) - {path for group in plan.groups for path in group}
    for group in [*plan.groups, *((path,) for path in sorted(alone))]:
        weight = plan.weights[group[0]]
        with jax.named_scope(f"quantize[{group[0].replace('/', '.')}]"):
            found = quantize_together([values[path] for path in group], weight)
        values.update(zip(group, found, strict=True))
    return jax.tree_util.tree_unflatten(treedef, [values[path] for path in paths])


def tree_weights(params: Any) -> dict[str, Weight]:
    """What is known of the parameters of a bare tree, whose modules are not.

    A matrix named `kernel` is Flax's (in, out), one named `embedding` is left alone unless a rule
    names its axis; of any other the rule must tell the axis.
    """
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = path_of(keys)
        owner, _, name = path.rpartition("/")
        known: dict[str, Any] = {}
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            known["never"] = f"{leaf.dtype} values"
        elif name == "kernel":
            known.update(layout=Layout(axis=(-2,), out=(-1,)), rank=2)
        elif name == "embedding":
            known["only_by_axis"] = EMBEDDING
        found[path] = Weight(shape=tuple(leaf.shape), owner=owner, **known)
    return found


EMBEDDING = "an embedding; axis=-1 in the rule quantises it"


def quantize_together(
    weights: list[Float[Array, "..."]], plan: WeightPlan
) -> list[Float[Array, "..."]]:
    """Quantises weights of one plan; matrices at the same place share one global scale."""
    rows = [_to_rows(w, plan.layout) for w in weights]
    widths = [r.shape[-2] for r in rows]
    cut = np.cumsum(widths)[:-1].tolist()
    joined = jnp.concatenate(rows, axis=-2) if len(rows) > 1 else rows[0]
    quantised = sites.quantize_weight(joined, plan.format, joined.dtype)
    out = []
    for w, part in zip(weights, jnp.split(quantised, cut, axis=-2), strict=True):
        value = _from_rows(part, w.shape, plan.layout)
        if plan.layers is not None:
            here = np.array(plan.layers).reshape(-1, *(1,) * (w.ndim - 1))
            value = jnp.where(here, value, w)
        out.append(value)
    return out


def _order(rank: int, layout: Layout) -> tuple[int, ...]:
    """Axes in the order: those that enumerate matrices, the matrix's outputs, the contracted."""
    out, axis = ([a % rank for a in axes] for axes in (layout.out, layout.axis))
    return (*(a for a in range(rank) if a not in (*out, *axis)), *out, *axis)


def _to_rows(w: Array, layout: Layout) -> Array:
    """(matrices..., outputs, contracted)."""
    moved = jnp.transpose(w, _order(w.ndim, layout))
    lead = moved.shape[: w.ndim - len(layout.out) - len(layout.axis)]
    contracted = int(np.prod(moved.shape[w.ndim - len(layout.axis) :]))
    return moved.reshape(*lead, -1, contracted)


def _from_rows(rows: Array, shape: tuple[int, ...], layout: Layout) -> Array:
    order = _order(len(shape), layout)
    moved = rows.reshape([shape[a] for a in order])
    return jnp.transpose(moved, np.argsort(order).tolist())


def path_of(keys: tuple[Any, ...]) -> str:
    """The path of a leaf; the last step into a Flax variable is no name of its own."""
    names = []
    for key in keys:
        if isinstance(key, jax.tree_util.GetAttrKey) and key.name in ("value", "raw_value"):
            continue
        for field in ("key", "name", "idx"):
            if hasattr(key, field):
                names.append(str(getattr(key, field)))
                break
    return "/".join(names)
