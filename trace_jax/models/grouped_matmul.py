"""Grouped matmul over experts whose cost follows the rows that experts really got.

Rows are laid out in blocks that each belong to one expert (`Dispatch`); the product of
`pallas_kernels.fp4_grouped_matmul` runs over the blocks in use only. An expert without rows gets
exactly zero gradient, because no block ever touches it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp4_grouped_matmul import op


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Where each (token, choice) pair sits in the blocked layout."""

    slot_MX: Int[Array, "M X"]  # its row in the layout; the number of rows where dropped (route -1)
    pair_R: Int[Array, " R"]  # the pair m*X + x of each row; M*X where the row is empty
    expert_N: Int[Array, " N"]  # the expert of each block
    rows_E: Int[Array, " E"]  # rows of each expert, whole blocks, in the order of experts
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
        rows_E=blocks_E * block,
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
    x_NbK: Float[Array, "N b K"],
    w_EOK: Float[Array, "E O K"],
    dispatch: Dispatch,
    impl: str = "xla",
) -> Float[Array, "N b O"]:
    """y[n] = x[n] @ w[expert of n].T for the blocks in use; products accumulate in float32.

    Args:    x_NbK, w_EOK: one dtype, which is also the dtype of the result. impl: of
             `pallas_kernels.fp4_grouped_matmul`, which has the gradients too.
    Returns: (N, block, O); blocks not in use are 0.
    """
    rows_RK = x_NbK.reshape(-1, x_NbK.shape[-1])
    y_RO = op.grouped_matmul(rows_RK, w_EOK, dispatch.rows_E, impl=impl, block=dispatch.block)
    return y_RO.reshape(*x_NbK.shape[:2], -1)
