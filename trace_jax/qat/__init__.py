"""Quantisation-aware training by recipe: which layers are FP4, fake quantisation, guidance.

    q = qat.nnx(model, qat.Recipe(rules=(qat.Rule("layers/*/mlp/*", weights="nvfp4"),)), inputs)
    print(q.audit)
    out = q.apply(q.params, inputs)

`docs/qat.md` shows it on models of your own.
"""

from trace_jax.qat.audit import Audit, Row
from trace_jax.qat.linen_model import quantized as linen
from trace_jax.qat.nnx_model import QatVariable
from trace_jax.qat.nnx_model import quantized as nnx
from trace_jax.qat.recipe import Recipe, Rule
from trace_jax.qat.resolve import Layout, Plan, Seen, Weight, resolve
from trace_jax.qat.runtime import Quantized, site
from trace_jax.qat.transform import quantize_params, tree_weights

__all__ = [
    "Audit",
    "Layout",
    "Plan",
    "QatVariable",
    "Quantized",
    "Recipe",
    "Row",
    "Rule",
    "Seen",
    "Weight",
    "linen",
    "nnx",
    "quantize_params",
    "resolve",
    "site",
    "tree_weights",
]
