"""Matmuls of experts and dense MLPs with the arithmetic of native block-scaled FP4 hardware.

    y[m, o] = (g_x[m] * g_w) * sum_blocks sum_k (q_x * s_x) (q_w * s_w)    accumulated in float32

A code times its block scale has few significant bits (at most six for NVFP4), so operands and
products are exact in float32 and only the accumulation rounds; the global scales are applied once,
at the end. The trainer instead multiplies BF16 values of code * scale * global, as the paper does:
that difference is the one which guided rounding has to bridge.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax.formats import Format
from trace_jax.models import moe
from trace_jax.models.grouped_matmul import (
    Dispatch,
    gather_rows,
    grouped_matmul,
    scatter_pairs,
)
from trace_jax.qat import sites

Quantised = tuple[Array, Array, Array | None]  # codes, scale bytes, global scale of each row


def operand(
    codes: UInt8[Array, "*A K"], scales: UInt8[Array, "*A S"], format: Format
) -> Float[Array, "*A K"]:
    """code * block scale, exact in float32; the global scale stays out."""
    return format.dequantize_rows(codes, scales, None)


def weight_operand(weight: dict[str, Any], format: Format) -> Float[Array, "*A K"]:
    """The same of packed weights; K is padded to whole blocks."""
    return operand(format.unpack_codes(weight["codes"]), weight["scales"], format)


class Projections:
    """Both projections of a layer's experts, or of its dense MLP; `kept` is what they recorded.

    Either side of a matmul may stay in the compute dtype (no format), for W4A16. Experts work on
    the blocked rows of a dispatch; without one (None) there is one matrix for all rows.
    """

    def __init__(self, weights: Format | None, acts: Format | None, params: Any, name: str):
        """`name` is that of the sites, before "_in" and "_hidden"."""
        self.weights, self.acts, self.params, self.name = weights, acts, params, name
        self.kept: dict[str, Quantised] = {}

    def gate_up(self, x_MD: Float[Array, "M D"], d: Dispatch | None) -> Float[Array, "*A O"]:
        """From tokens to the rows of their experts."""
        rows, global_ = self._quantised(f"{self.name}_in", x_MD)
        if d is not None:
            rows = gather_rows(rows, d)
            global_ = None if global_ is None else gather_rows(global_, d)
        weight = self.params.gate_up.get_value()
        return self._matmul(rows, global_, weight, d).astype(x_MD.dtype)

    def down(self, hidden: Float[Array, "*A F"], d: Dispatch | None) -> Float[Array, "*A D"]:
        """From hidden rows back to the width of the model."""
        rows, global_ = self._quantised(f"{self.name}_hidden", hidden)
        return self._matmul(rows, global_, self.params.down.get_value(), d).astype(hidden.dtype)

    def _quantised(self, site: str, x: Array) -> tuple[Array, Array | None]:
        """The operand and the factor of each row that its global scale stands for."""
        if self.acts is None:
            return x, None
        rows = self.acts.pad(x.astype(jnp.float32))
        codes, scales, global_ = sites.own_rounding(rows, self.acts)
        self.kept[site] = (codes, scales, global_)
        factor = None if global_ is None else self.acts.decode_scale(global_)
        return operand(codes, scales, self.acts)[..., : x.shape[-1]], factor

    def _matmul(self, rows: Array, global_: Array | None, weight: Any, d: Dispatch | None) -> Array:
        """Accumulates in float32; all global scales come last."""

        def multiply(rows: Array, w: Array) -> Array:
            return moe.matmul(rows, w) if d is None else grouped_matmul(rows, w, d)

        if self.weights is None and self.acts is None:
            return multiply(rows, weight)
        if self.weights is None:
            total = multiply(rows, weight.astype(jnp.float32))
            return total if global_ is None else total * global_
        w = weight_operand(weight, self.weights)[..., : rows.shape[-1]]
        scale = self.weights.decode_scale(weight["global"])
        scale = scale if d is None else scale[d.expert_N]
        total = multiply(rows.astype(jnp.float32), w)
        return total * (scale if global_ is None else global_ * scale)


def to_pairs(kept: Any, dispatch: Dispatch) -> Any:
    """Recorded rows of the blocked layout, back at (M, X, ...)."""
    return jax.tree.map(lambda a: scatter_pairs(a, dispatch), kept)
