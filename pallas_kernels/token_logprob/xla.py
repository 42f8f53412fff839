"""Plain XLA: the vocabulary in chunks, so that logits are never larger than one chunk.

Chunks are of the vocabulary, not of tokens: then a chunk's gradient of the head is one product over
all tokens, accumulated in float32 and written once in the head's dtype, and the only array that is
read and written again for every chunk is the float32 gradient of the hidden states.

The last chunk is moved back to end with the vocabulary, so the head needs no padding (a copy); rows
that it shares with the chunk before are masked where they would count twice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.token_logprob import partial
from pallas_kernels.token_logprob.partial import Partial, Stats

# Logits that are no larger than this are one chunk, and are kept for the backward pass.
_KEPT_BYTES = 256 * 2**20
# Else a chunk has at most this, or `_LEAST` columns: wide enough to keep a GPU busy (4096 columns
# for 8192 tokens), small enough that the handful of such arrays that a TPU holds at a time does not
# matter.
_CHUNK_BYTES = 128 * 2**20
_LEAST = 1024
_MULTIPLE = 256  # whole tiles of a matmul


def chunk_width(tokens: int, vocabulary: int) -> int:
    """Columns of one chunk; the whole vocabulary if its logits are small enough to be kept."""
    if 4 * tokens * vocabulary <= _KEPT_BYTES or vocabulary <= _LEAST:
        return vocabulary
    most = max(_LEAST, _CHUNK_BYTES // (4 * tokens))
    chunks = -(-vocabulary // most)
    even = -(-vocabulary // chunks)
    return min(vocabulary, -(-even // _MULTIPLE) * _MULTIPLE)


def logits(
    hidden_MD: Float[Array, "M D"], head_VD: Float[Array, "V D"], temperature: float
) -> Float[Array, "M V"]:
    """float32, products accumulated in float32; the head in the dtype of the hidden states."""
    z_MV = _product(hidden_MD, head_VD.astype(hidden_MD.dtype), (1, 1))
    return z_MV if temperature == 1.0 else z_MV / jnp.float32(temperature)


def forward(
    hidden_MD: Float[Array, "M D"],
    head_VD: Float[Array, "V D"],
    tokens_M: Int[Array, " M"],
    *,
    temperature: float,
    top_k: int,
    width: int,
) -> Stats:
    """Over chunks of `width` columns."""
    vocabulary = head_VD.shape[0]

    def of_chunk(i: int | Array) -> Partial:
        start, valid = _place(i, width, vocabulary)
        head = jax.lax.dynamic_slice_in_dim(head_VD, start, width)
        z = logits(hidden_MD, head, temperature)
        return summarise(z, tokens_M, top_k, start, None if valid is None else valid[None, :])

    whole = jax.lax.fori_loop(
        1,
        -(-vocabulary // width),
        lambda i, so_far: partial.merge(so_far, of_chunk(i)),
        _filled(of_chunk(0), min(top_k, vocabulary)),
    )
    return partial.finish(whole)


def summarise(
    z: Float[Array, "M N"],
    tokens_M: Int[Array, " M"],
    top_k: int,
    start: int | Array = 0,
    valid_1N: Array | None = None,
) -> Partial:
    """Of logits of the columns from `start` on, those that are `valid`."""
    width = z.shape[-1]
    if valid_1N is not None:
        z = jnp.where(valid_1N, z, -jnp.inf)
    largest = jnp.max(z, axis=-1)
    below = z - largest[:, None]
    if valid_1N is not None:
        below = jnp.where(valid_1N, below, -jnp.inf)  # also where all that is valid is NaN
    share = jnp.exp(below)
    slope = share * below if valid_1N is None else jnp.where(valid_1N, share * below, 0.0)
    local_M = tokens_M - start
    inside_M = (local_M >= 0) & (local_M < width)
    at_M1 = jnp.clip(local_M, 0, width - 1)[:, None]
    chosen_M = jnp.take_along_axis(z, at_M1, axis=-1)[:, 0]
    top = ids = None
    if top_k:
        top, ids = jax.lax.top_k(z, min(top_k, width))
        ids = ids + start
    return Partial(
        largest_M=largest,
        mass_M=jnp.sum(share, axis=-1),
        slope_M=jnp.sum(slope, axis=-1),
        chosen_M=jnp.where(inside_M, chosen_M, -jnp.inf),
        top_Mk=top,
        ids_Mk=ids,
    )


def recomputed(
    hidden_MD: Array,
    rows_ND: Array,
    local_M: Array,
    stats: Stats,
    d_logprob_M: Array | None,
    d_entropy_M: Array | None,
    *,
    temperature: float,
    logits_MN: Array | None,
) -> Array:
    """`logit_gradient` of one chunk, of kept logits or of logits computed again."""
    z_MN = logits(hidden_MD, rows_ND, temperature) if logits_MN is None else logits_MN
    return logit_gradient(z_MN, local_M, stats, d_logprob_M, d_entropy_M, temperature)


def logit_gradient(
    z: Float[Array, "M N"],
    local_M: Int[Array, " M"],
    stats: Stats,
    d_logprob_M: Float[Array, " M"] | None,
    d_entropy_M: Float[Array, " M"] | None,
    temperature: float,
) -> Float[Array, "M N"]:
    """Gradient to the logits before the temperature; `local_M` counts columns from the chunk's.

    p = softmax(z):  d logprob / d z_j = [j = token] - p_j
                     d entropy / d z_j = -p_j (log p_j + entropy)
    """
    logp = stats.logp(z)
    weight = jnp.zeros((), z.dtype) if d_logprob_M is None else d_logprob_M[:, None]
    if d_entropy_M is not None:
        weight = weight + d_entropy_M[:, None] * (logp + stats.entropy_M[:, None])
    dz = -jnp.exp(logp) * weight
    if d_logprob_M is not None:
        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        chosen = column == local_M.astype(jnp.int32)[:, None]
        dz = dz + jnp.where(chosen, d_logprob_M[:, None], 0.0)
    return dz if temperature == 1.0 else dz / jnp.float32(temperature)


def backward(
    hidden_MD: Float[Array, "M D"],
    head_VD: Float[Array, "V D"],
    gradient,
    *,
    width: int,
    needs: tuple[bool, bool],
) -> tuple[Float[Array, "M D"] | None, Float[Array, "V D"] | None]:
    """Gradients to hidden states and head over chunks, those that are needed.

    Args: gradient: (rows of the head, first column) -> gradient to the logits of this chunk.
    """
    vocabulary = head_VD.shape[0]

    def of_chunk(i: int | Array) -> tuple[int | Array, Array | None, Array | None]:
        start, valid = _place(i, width, vocabulary)
        rows = head_VD
        if width < vocabulary:
            rows = jax.lax.dynamic_slice_in_dim(head_VD, start, width)
        dz = gradient(rows, start)
        d_head = gradient_product(dz, hidden_MD, (0, 0)) if needs[1] else None
        rows = rows.astype(hidden_MD.dtype)
        if valid is not None:
            rows = jnp.where(valid[:, None], rows, 0)
        return start, gradient_product(dz, rows, (1, 0)) if needs[0] else None, d_head

    def add(i: int | Array, so_far: tuple[Array | None, Array | None]):
        d_hidden, d_head = so_far
        start, more, part = of_chunk(i)
        if d_hidden is not None and more is not None:
            d_hidden = d_hidden + more
        if d_head is not None and part is not None:
            part = part.astype(head_VD.dtype)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, part, start, 0)
        return d_hidden, d_head

    if width == vocabulary:
        _, d_hidden, d_head = of_chunk(0)
    else:
        nothing = (
            jnp.zeros(hidden_MD.shape, jnp.float32) if needs[0] else None,
            jnp.zeros(head_VD.shape, head_VD.dtype) if needs[1] else None,
        )
        d_hidden, d_head = jax.lax.fori_loop(0, -(-vocabulary // width), add, nothing)
    return (
        None if d_hidden is None else d_hidden.astype(hidden_MD.dtype),
        None if d_head is None else d_head.astype(head_VD.dtype),
    )


def gradient_product(
    dz: Float[Array, "M N"], other: Float[Array, "A D"], axes: tuple[int, int]
) -> Float[Array, "B D"]:
    """float32 product with the other operand as it is (exact in float32)."""
    return _product(dz, other.astype(dz.dtype), axes)


def _product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    contracted = ((axes[0],), (axes[1],))
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


def _place(i: int | Array, width: int, vocabulary: int) -> tuple[int | Array, Array | None]:
    """First column of chunk i, and which of its columns no chunk before it has (None: all)."""
    if vocabulary % width == 0:
        return i * width, None
    start = jnp.minimum(i * width, vocabulary - width)
    return start, start + jnp.arange(width) >= i * width


def _filled(first: Partial, top_k: int) -> Partial:
    """Pads the candidates of a chunk with fewer columns than `top_k`."""
    if first.top_Mk is None or first.ids_Mk is None:
        return first
    lack = ((0, 0), (0, top_k - first.top_Mk.shape[-1]))
    top = jnp.pad(first.top_Mk, lack, constant_values=-jnp.inf)
    return Partial(
        largest_M=first.largest_M,
        mass_M=first.mass_M,
        slope_M=first.slope_M,
        chosen_M=first.chosen_M,
        top_Mk=top,
        ids_Mk=jnp.pad(first.ids_Mk, lack),
    )
