"""Grouped matmul over experts whose cost follows the rows that experts really got.

Rows are laid out in blocks that each belong to one expert (`Dispatch`); a loop runs over the blocks
in use only. `lax.ragged_dot` would be dense over experts on CPU and in XLA:GPU's default lowering.
An expert without rows gets exactly zero gradient, because no block ever touches it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Where each (token, choice) pair sits in the blocked layout."""

    slot_MX: Int[Array, "M X"]  # its row in the layout; the number of rows where dropped (route -1)
    pair_R: Int[Array, " R"]  # the pair m*X + x of each row; M*X where the row is empty
    expert_N: Int[Array, " N"]  # the expert of each block
    active: Int[Array, ""]  # blocks in use; they come first
    block: int = dataclasses.field(metadata={"static": True})  # rows a block


def make_dispatch(routes_MX: Int[Array, "M X"], experts: int) -> Dispatch:
    """Sorts pairs by expert and pads each expert's rows to whole blocks. Route -1 drops a pair."""
    pairs = routes_MX.size
    block = min(64, max(8, 1 << ((pairs // experts).bit_length() - 1 if pairs >= experts else 0)))
    blocks = -(-pairs // block) + experts  # enough for any split of the rows over experts
    flat = jnp.where(routes_MX < 0, experts, routes_MX).reshape(-1)
    size_E = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
    blocks_E = -(-size_E[:experts] // block)
    end_E = jnp.cumsum(blocks_E)
    first_row = jnp.concatenate(
        [(end_E - blocks_E) * block, jnp.full(1, blocks * block, jnp.int32)]
    )
    order = jnp.argsort(flat, stable=True)
    sorted_expert = flat[order]
    rank = jnp.arange(pairs, dtype=jnp.int32) - (jnp.cumsum(size_E) - size_E)[sorted_expert]
    row = jnp.where(sorted_expert < experts, first_row[sorted_expert] + rank, blocks * block)
    slot = jnp.zeros(pairs, jnp.int32).at[order].set(row)
    pair_R = (
        jnp.full(blocks * block, pairs, jnp.int32).at[row].set(order.astype(jnp.int32), mode="drop")
    )
    expert_N = jnp.searchsorted(end_E, jnp.arange(blocks, dtype=jnp.int32), side="right")
    return Dispatch(
        slot_MX=slot.reshape(routes_MX.shape),
        pair_R=pair_R,
        expert_N=jnp.minimum(expert_N, experts - 1).astype(jnp.int32),
        active=end_E[-1],
        block=block,
    )


def gather_rows(x_MK: Array, dispatch: Dispatch, per_pair: bool = False) -> Array:
    """Rows of tokens (M, K) or pairs (M*X, K) in the blocked layout (N, block, K); empty rows 0."""
    choices = dispatch.slot_MX.shape[1]
    index = dispatch.pair_R if per_pair else dispatch.pair_R // choices
    rows = x_MK.at[index].get(mode="fill", fill_value=0)
    return rows.reshape(-1, dispatch.block, *x_MK.shape[1:])


def scatter_pairs(y_NbK: Array, dispatch: Dispatch) -> Array:
    """Back from the blocked layout to (M, X, K); dropped pairs are 0."""
    flat = y_NbK.reshape(-1, *y_NbK.shape[2:])
    return flat.at[dispatch.slot_MX].get(mode="fill", fill_value=0)


def grouped_matmul(
    x_NbK: Float[Array, "N b K"], w_EOK: Float[Array, "E O K"], dispatch: Dispatch
) -> Float[Array, "N b O"]:
    """y[n] = x[n] @ w[expert of n].T for the blocks in use; products accumulate in float32.

    Args:    x_NbK, w_EOK: one dtype, which is also the dtype of the result.
    Returns: (N, block, O); blocks not in use are 0.
    """
    return _matmul(x_NbK, w_EOK, dispatch.expert_N, dispatch.active)


def _on_cpu_in_float32(loop: Callable[..., Any], *operands: Array) -> Any:
    """Runs a loop of matmuls in the operands' dtype, on CPU in float32.

    XLA:CPU has no fast BF16 matmul inside a loop (measured 10x slower than float32), so there the
    operands are widened before and the results narrowed after it. That changes no result: products
    of BF16 accumulate in float32 and are rounded once, either way.
    """

    def widened(*operands: Array) -> Any:
        wide = (
            a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in operands
        )
        return loop(*wide)

    def narrow(result: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(operands[0].dtype), result)

    return narrow(jax.lax.platform_dependent(*operands, cpu=widened, default=_in_float32(loop)))


def _in_float32(loop: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: jax.tree.map(lambda a: a.astype(jnp.float32), loop(*operands))


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


@jax.custom_vjp
def _matmul(x_NbK, w_EOK, expert_N, active):
    def loop(x_NbK, w_EOK, expert_N, active):
        def body(n, y):
            return y.at[n].set(_dot(x_NbK[n], w_EOK[expert_N[n]].T))

        y = jnp.zeros((*x_NbK.shape[:2], w_EOK.shape[1]), x_NbK.dtype)
        return jax.lax.fori_loop(0, active, body, y)

    return _on_cpu_in_float32(loop, x_NbK, w_EOK, expert_N, active)


def _forward(x_NbK, w_EOK, expert_N, active):
    return _matmul(x_NbK, w_EOK, expert_N, active), (x_NbK, w_EOK, expert_N, active)


def _backward(saved, dy_NbO):
    def loop(dy_NbO, x_NbK, w_EOK, expert_N, active):
        def body(n, carry):
            dx, dw = carry
            expert = expert_N[n]
            dx = dx.at[n].set(_dot(dy_NbO[n], w_EOK[expert]))
            product = jnp.matmul(dy_NbO[n].T, x_NbK[n], preferred_element_type=jnp.float32)
            return dx, dw.at[expert].add(product)

        zeros = jnp.zeros_like(x_NbK), jnp.zeros(w_EOK.shape, jnp.float32)
        return jax.lax.fori_loop(0, active, body, zeros)

    return *_on_cpu_in_float32(loop, dy_NbO, *saved), None, None


_matmul.defvjp(_forward, _backward)
