"""Expert matmuls with the arithmetic of native block-scaled FP4 hardware.

    y[m, o] = (g_x[m] * g_w) * sum_blocks sum_k (q_x * s_x) (q_w * s_w)    accumulated in float32

A code times its E4M3 block scale has at most six significant bits, so operands and products are
exact in float32 and only the accumulation rounds; the global scales are applied once, at the end.
The trainer instead multiplies BF16 values of code * scale * global, as the paper does: that
difference is the one which guided rounding has to bridge.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax.formats import e2m1, nvfp4
from trace_jax.models.grouped_matmul import (
    Dispatch,
    gather_rows,
    grouped_matmul,
    scatter_pairs,
)


def operand(codes: UInt8[Array, "*A K"], scales: UInt8[Array, "*A N"]) -> Float[Array, "*A K"]:
    """code * block scale, exact in float32; the global scale stays out."""
    return e2m1.decode(codes) * nvfp4.spread(nvfp4.scale_value(scales))


def quantize_activations(
    x: Float[Array, "*A K"], rule: str
) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A N"], Float[Array, "*A 1"]]:
    """Codes, scale bytes and global scale of each row."""
    x = x.astype(jnp.float32)
    global_ = nvfp4.global_scale(jnp.max(jnp.abs(x), axis=-1, keepdims=True), rule)
    codes, scales = nvfp4.quantize_rows(x, global_)
    return codes, scales, global_


def matmul(
    rows_NbK: Float[Array, "N b K"],
    row_global_Nb1: Float[Array, "N b 1"],
    weight: dict[str, Any],
    dispatch: Dispatch,
) -> Float[Array, "N b O"]:
    """Block-scaled product of quantised rows and packed expert weights, float32."""
    w_EOK = operand(e2m1.unpack(weight["codes"]), weight["scales"])
    total = grouped_matmul(rows_NbK, w_EOK, dispatch)
    return total * (row_global_Nb1 * weight["global"][dispatch.expert_N])


def make_projections(
    x_MD: Float[Array, "M D"], moe_params: Any, quantised: bool, rule: str
) -> tuple[Any, Any, dict[str, Any]]:
    """The two expert projections of the sampler, and what they recorded.

    Returns: (gate_up, down, kept); `kept` has the codes, scales and global scale of "expert_in" at
             once, and those of "expert_hidden" (in the blocked layout) after `down` has run.
    """
    dtype, kept = x_MD.dtype, {}
    gate_up_w, down_w = moe_params.gate_up.get_value(), moe_params.down.get_value()
    if not quantised:
        plain_in = lambda d: grouped_matmul(gather_rows(x_MD, d), gate_up_w, d)  # noqa: E731
        return plain_in, lambda h, d: grouped_matmul(h, down_w, d), kept
    kept["expert_in"] = quantize_activations(x_MD, rule)
    codes, scales, global_ = kept["expert_in"]
    x_operand = operand(codes, scales)

    def gate_up(d: Dispatch) -> Array:
        y = matmul(gather_rows(x_operand, d), gather_rows(global_, d), gate_up_w, d)
        return y.astype(dtype)

    def down(h_NbF: Array, d: Dispatch) -> Array:
        kept["expert_hidden"] = quantize_activations(h_NbF, rule)
        h_codes, h_scales, h_global = kept["expert_hidden"]
        return matmul(operand(h_codes, h_scales), h_global, down_w, d).astype(dtype)

    return gate_up, down, kept


def to_pairs(kept: Any, dispatch: Dispatch) -> Any:
    """Recorded rows of the blocked layout, back at (M, X, ...)."""
    return jax.tree.map(lambda a: scatter_pairs(a, dispatch), kept)
