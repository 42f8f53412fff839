"""Which axes of a Flax module's weights are contracted, where its kind makes that certain."""

from typing import Any

from flax import linen as nn
from flax import nnx

from trace_jax.qat.resolve import Layout, Weight
from trace_jax.qat.transform import EMBEDDING

_NO_MATRIX = "not a matrix of this module"


def weight(module: Any, name: str, leaf: Any, owner: str) -> Weight:
    """What is known of the parameter `name` of a module; a module of unknown kind says little."""
    known = _known(module, name, leaf.ndim)
    if not str(leaf.dtype).startswith(("float", "bfloat")):
        known["never"] = f"{leaf.dtype} values"
    return Weight(shape=tuple(leaf.shape), owner=owner, **known)


def _known(module: Any, name: str, rank: int) -> dict[str, Any]:
    if isinstance(module, nnx.Linear | nn.Dense):
        return {"layout": _last(1, 1)} if name == "kernel" else {"never": _NO_MATRIX}
    if isinstance(module, nnx.LinearGeneral):
        layout = _last(len(module.in_features), len(module.out_features))
        return {"layout": layout} if name == "kernel" else {"never": _NO_MATRIX}
    if isinstance(module, nn.DenseGeneral):
        features, axis = module.features, module.axis
        layout = _last(*(1 if isinstance(a, int) else len(a) for a in (axis, features)))
        return {"layout": layout} if name == "kernel" else {"never": _NO_MATRIX}
    if isinstance(module, nnx.Embed | nn.Embed):
        return {"only_by_axis": EMBEDDING}
    if isinstance(module, nnx.Conv | nn.Conv | nn.ConvLocal | nn.ConvTranspose | nnx.ConvTranspose):
        return {"never": "a convolution: not covered"}
    if isinstance(text := getattr(module, "einsum_str", None), str):
        if name == "bias":
            return {"never": _NO_MATRIX}
        layout = einsum_layout(text)
        fits = layout is not None and rank >= len(layout.axis) + len(layout.out)
        return {"layout": layout} if fits else {}
    return {}


def _last(contracted: int, out: int) -> Layout:
    """(..., contracted axes, output axes)."""
    axes = tuple(range(-contracted - out, 0))
    return Layout(axis=axes[:contracted], out=axes[contracted:])


def einsum_layout(text: str) -> Layout | None:
    """The layout of the second operand of "lhs,rhs->out"; None if it is not so plain.

    Letters of rhs that out lacks are contracted; those that only rhs and out have make the outputs;
    those in all three enumerate matrices.
    """
    inputs, arrow, out = text.replace(" ", "").partition("->")
    if not arrow or inputs.count(",") != 1 or "." in inputs.partition(",")[2]:
        return None
    lhs, rhs = inputs.split(",")
    axes = range(-len(rhs), 0)
    contracted = tuple(a for a, c in zip(axes, rhs, strict=True) if c not in out)
    outputs = tuple(a for a, c in zip(axes, rhs, strict=True) if c in out and c not in lhs)
    return Layout(axis=contracted, out=outputs) if contracted and outputs else None
