"""Expert matmuls with the arithmetic of native block-scaled FP4 hardware.

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
    """The same of packed expert weights; K is padded to whole blocks."""
    return operand(format.unpack_codes(weight["codes"]), weight["scales"], format)


class Projections:
    """The two expert projections of one layer of the sampler; `kept` is what they recorded.

    Either side of a matmul may stay in the compute dtype (no format), for W4A16.
    """

    def __init__(self, weights: Format | None, acts: Format | None, params: Any):
        self.weights, self.acts, self.params = weights, acts, params
        self.kept: dict[str, Quantised] = {}

    def gate_up(self, x_MD: Float[Array, "M D"], d: Dispatch) -> Float[Array, "N b O"]:
        """From tokens to the rows of their experts."""
        rows_MD, global_ = self._quantised("expert_in", x_MD)
        weight = self.params.gate_up.get_value()
        if global_ is not None:
            global_ = gather_rows(global_, d)
        return self._matmul(gather_rows(rows_MD, d), global_, weight, d).astype(x_MD.dtype)

    def down(self, h_NbF: Float[Array, "N b F"], d: Dispatch) -> Float[Array, "N b D"]:
        """From hidden rows back to the width of the model."""
        rows, global_ = self._quantised("expert_hidden", h_NbF)
        return self._matmul(rows, global_, self.params.down.get_value(), d).astype(h_NbF.dtype)

    def _quantised(self, site: str, x: Array) -> tuple[Array, Array | None]:
        """The operand and the factor of each row that its global scale stands for."""
        if self.acts is None:
            return x, None
        rows = self.acts.pad(x.astype(jnp.float32))
        codes, scales, global_ = sites.own_rounding(rows, self.acts)
        self.kept[site] = (codes, scales, global_)
        factor = None if global_ is None else self.acts.decode_scale(global_)
        return operand(codes, scales, self.acts)[..., : x.shape[-1]], factor

    def _matmul(self, rows: Array, global_: Array | None, weight: Any, d: Dispatch) -> Array:
        """Accumulates in float32; all global scales come last."""
        if self.weights is None and self.acts is None:
            return grouped_matmul(rows, weight, d)
        if self.weights is None:
            total = grouped_matmul(rows, weight.astype(jnp.float32), d)
            return total if global_ is None else total * global_
        w_EOK = weight_operand(weight, self.weights)[..., : rows.shape[-1]]
        scale = self.weights.decode_scale(weight["global"])[d.expert_N]
        total = grouped_matmul(rows.astype(jnp.float32), w_EOK, d)
        return total * (scale if global_ is None else global_ * scale)


def to_pairs(kept: Any, dispatch: Dispatch) -> Any:
    """Recorded rows of the blocked layout, back at (M, X, ...)."""
    return jax.tree.map(lambda a: scatter_pairs(a, dispatch), kept)
