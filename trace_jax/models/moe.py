"""The feed-forward of experts and dense MLPs: SwiGLU, and for experts dispatch and combination."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.models.grouped_matmul import Dispatch, make_dispatch, scatter_pairs

# blocked rows (N, b, K) -> blocked rows (N, b, O), in the compute dtype
Project = Callable[[Array, Dispatch], Array]


def swiglu(gate_up: Float[Array, "*A twoF"]) -> Float[Array, "*A F"]:
    """silu(gate) * up in float32; the first half is the gate."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def matmul(x: Float[Array, "*A K"], w_OK: Float[Array, "O K"]) -> Float[Array, "*A O"]:
    """x @ w.T of one dtype, accumulated in float32 and rounded once."""
    y = jnp.einsum("...k,ok->...o", x, w_OK, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def expert_mlp(
    routes_BTX: Int[Array, "B T X"],
    gates_BTX: Float[Array, "B T X"],
    experts: int,
    gate_up: Callable[[Dispatch], Array],
    down: Project,
) -> Float[Array, "B T D"]:
    """sum_x gate_x * down(swiglu(gate_up(x))) over each token's experts.

    Args:    routes: -1 drops a pair. gate_up: from the layout to rows (N, b, 2F).
             down: (N, b, F) to (N, b, D).
    Returns: (B, T, D) in the dtype of `down`; the sum over experts is in float32.
    """
    B, T, X = routes_BTX.shape
    dispatch = make_dispatch(routes_BTX.reshape(B * T, X), experts)
    y_NbD = down(swiglu(gate_up(dispatch)), dispatch)
    y_MXD = scatter_pairs(y_NbD, dispatch)
    gates = gates_BTX.reshape(B * T, X, 1).astype(jnp.float32)
    y_MD = jnp.sum(y_MXD.astype(jnp.float32) * gates, axis=1)
    return y_MD.reshape(B, T, -1).astype(y_NbD.dtype)
