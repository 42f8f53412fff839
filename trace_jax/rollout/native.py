"""Matmuls of experts and dense MLPs with the arithmetic of native block-scaled FP4 hardware.

    y[m, o] = (g_x[m] * g_w) * sum_blocks sum_k (q_x * s_x) (q_w * s_w)    accumulated in float32

A code times its block scale has few significant bits (at most six for NVFP4), so operands and
products are exact in float32 and only the accumulation rounds; the global scales are applied once,
at the end. The trainer instead multiplies BF16 values of code * scale * global, as the paper does:
that difference is the one which guided rounding has to bridge.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul.op import fp4_grouped_matmul
from pallas_kernels.fp4_matmul.op import fp4_matmul
from pallas_kernels.quantize.op import quantize
from trace_jax import config as cfg
from trace_jax.formats import Format
from trace_jax.models import moe
from trace_jax.models.grouped_matmul import (
    Dispatch,
    gather_rows,
    grouped_matmul,
    scatter_pairs,
)
from trace_jax.qat import sites

# packed codes, scale bytes and global scale of each row: as a record keeps them
Quantised = tuple[UInt8[Array, "*A P"], UInt8[Array, "*A S"], Float[Array, "*A 1"] | None]


def packed_weight(weight: dict[str, Any], format: Format) -> Packed:
    """A matrix of `weight_sync.pack_weight` as kernels take it."""
    factor = format.decode_scale(weight["global"])
    return Packed(codes=weight["codes"], scales=weight["scales"], factor=factor, format=format)


def packed_rows(
    x: Float[Array, "*A K"], format: Format, impl: str
) -> tuple[Packed, Float[Array, "*A 1"] | None]:
    """Rows rounded plainly, each with its own global scale: for a kernel, and that scale."""
    if impl != "xla":
        rows = quantize(x, format, impl=impl)
        return rows, rows.factor  # of the formats that kernels quantise, the two are one
    codes, scales, global_ = sites.own_rounding(format.pad(x.astype(jnp.float32)), format)
    factor = None if global_ is None else format.decode_scale(global_)
    packed = format.pack_codes(codes)
    return Packed(codes=packed, scales=scales, factor=factor, format=format), global_


@dataclasses.dataclass(frozen=True)
class Projections:
    """Both projections of a layer's experts, or of its dense MLP; `kept` is what they recorded.

    Either side of a matmul may stay in the compute dtype (no format), for W4A16. Experts work on
    the blocked rows of a dispatch; without one (None) there is one matrix for all rows.
    """

    weights: Format | None
    acts: Format | None
    params: Any
    name: str  # of the sites, before "_in" and "_hidden"
    kernels: cfg.Kernels = cfg.XLA
    kept: dict[str, Quantised] = dataclasses.field(default_factory=dict)

    def gate_up(self, x_MD: Float[Array, "M D"], d: Dispatch | None) -> Float[Array, "*A O"]:
        """From tokens to the rows of their experts."""
        rows = self._quantised(f"{self.name}_in", x_MD)
        if d is not None:
            rows = jax.tree.map(lambda a: gather_rows(a, d), rows)
        return self._matmul(rows, self.params.gate_up.get_value(), d, x_MD)

    def down(self, hidden: Float[Array, "*A F"], d: Dispatch | None) -> Float[Array, "*A D"]:
        """From hidden rows back to the width of the model."""
        rows = self._quantised(f"{self.name}_hidden", hidden)
        return self._matmul(rows, self.params.down.get_value(), d, hidden)

    def _quantised(self, site: str, x: Array) -> Packed | Array:
        """The operand of a matmul: packed and kept where activations are quantised."""
        if self.acts is None:
            return x
        rows, global_ = packed_rows(x, self.acts, self.kernels.quantize)
        self.kept[site] = (rows.codes, rows.scales, global_)
        return rows

    def _matmul(self, rows: Any, weight: Any, d: Dispatch | None, like: Array) -> Array:
        """Accumulates in float32, all global scales come last; in the dtype of `like`."""
        if self.weights is None:
            return self._by_plain_weight(rows, weight, d, like)
        w, how = packed_weight(weight, self.weights), {"impl": self.kernels.fp4_matmul}
        if d is None:
            return fp4_matmul(rows, w, out_dtype=like.dtype, **how)
        flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), rows)
        y = fp4_grouped_matmul(flat, w, d.rows_E, block=d.block, out_dtype=like.dtype, **how)
        return y.reshape(-1, d.block, y.shape[-1])

    def _by_plain_weight(self, rows: Any, weight: Any, d: Dispatch | None, like: Array) -> Array:
        factor = None
        if isinstance(rows, Packed):
            factor, rows = rows.factor, rows.operand()[..., : weight.shape[-1]]
            weight = weight.astype(jnp.float32)
        impl = self.kernels.grouped_matmul
        total = moe.matmul(rows, weight) if d is None else grouped_matmul(rows, weight, d, impl)
        return (total if factor is None else total * factor).astype(like.dtype)


def to_pairs(kept: Any, dispatch: Dispatch) -> Any:
    """Recorded rows of the blocked layout, back at (M, X, ...)."""
    return jax.tree.map(lambda a: scatter_pairs(a, dispatch), kept)
