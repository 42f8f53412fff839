"""Plain XLA: K and V are decoded once, a few slots at a time, up to the longest sequence.

Codes are decoded as two halves of a head, even and odd dimensions, so that no nibbles are
interleaved, and heads come before slots while still packed, so that no wide array is transposed.
Softmax is over all slots at once, as in the specification: only the order of sums differs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import device
from pallas_kernels.common.packed import Packed
from trace_jax.formats.base import in_dtype

# Values decoded at a time. On a CPU 4 MiB of float32, which stay in its cache (4 times as many: 3
# times slower); elsewhere enough to fill the device.
_CPU_VALUES, _VALUES = 1 << 20, 1 << 25
_UNSEEN = -1e30

Step = Callable[[Array, Array], Array]


def attention_decode(
    q_BHK: Float[Array, "B H K"],
    k: Packed,
    v: Packed,
    length_B: Int[Array, " B"],
    page_table_BN: Int[Array, "B N"] | None = None,
) -> Float[Array, "B H K"]:
    """See `op.attention_decode`."""
    (B, H, K), dtype, J = q_BHK.shape, q_BHK.dtype, k.shape[2]
    C = k.shape[1] if page_table_BN is None else page_table_BN.shape[1] * k.shape[1]
    size = _block_slots(B * J * k.width, C, 1 if page_table_BN is None else k.shape[1])
    blocks = -(-C // size)
    needed = jnp.clip((jnp.max(length_B) + (size - 1)) // size, 0, blocks)
    precision = None if jnp.finfo(dtype).bits == 16 else jax.lax.Precision.HIGHEST
    parts = 1 if k.format.element.BITS == 8 else 2
    q = jnp.pad(q_BHK, [(0, 0), (0, 0), (0, k.width - K)]).astype(jnp.float32)
    q = q.reshape(B, J, H // J, k.width)

    def scores(i: Array, score: Array) -> Array:
        start = jnp.minimum(i * size, C - size)
        decoded = _decode(_slots(k, start, size, page_table_BN), dtype)
        new = jnp.zeros((), jnp.float32)
        for part, k_BJCP in enumerate(decoded):
            q_part = q[..., part::parts]
            new = new + jnp.einsum("bjgp,bjcp->bjgc", q_part, k_BJCP, precision=precision)
        new = new * jnp.float32(K**-0.5)
        return jax.lax.dynamic_update_slice_in_dim(score, new, start, 3)

    score = jnp.full((B, J, H // J, C), _UNSEEN, jnp.float32)
    score = _loop(blocks, needed, scores, score)
    weight = _weights(score, length_B, dtype)

    def mix(i: Array, out: Array) -> Array:
        start = jnp.minimum(i * size, C - size)
        slot = start + jnp.arange(size)  # the last block may begin with slots of the one before
        part_weight = jax.lax.dynamic_slice_in_dim(weight, start, size, 3)
        part_weight = jnp.where(slot >= i * size, part_weight, 0)
        seen = (slot[None, :] < length_B[:, None])[:, None, :, None]
        decoded = _decode(_slots(v, start, size, page_table_BN), dtype)
        new = [
            # beyond the length there may be NaN, which no weight of zero would remove
            jnp.einsum("bjgc,bjcp->bjgp", part_weight, jnp.where(seen, x, 0), precision=precision)
            for x in decoded
        ]
        return out + jnp.stack(new, axis=-1)

    out = jnp.zeros((B, J, H // J, v.width // parts, parts), jnp.float32)
    out = _loop(blocks, needed, mix, out).reshape(B, H, v.width)[..., :K]
    return out.astype(dtype)


def _block_slots(values: int, C: int, page: int) -> int:
    """Slots decoded at a time, whole pages; `values`: of one slot of all sequences."""
    most = _CPU_VALUES if device.current().platform == "cpu" else _VALUES
    return min(C, max(1, most // (values * page)) * page)


def _loop(blocks: int, needed: Array, step: Step, start: Array) -> Array:
    if blocks == 1:
        return step(jnp.int32(0), start)
    return jax.lax.fori_loop(0, needed, step, start)


def _slots(x: Packed, start: Array, size: int, page_table_BN: Array | None) -> Packed:
    """Leaves (B, size, J, ...), from `start` on."""
    if page_table_BN is None:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size, 1), x)
    page = x.shape[1]
    pages = jax.lax.dynamic_slice_in_dim(page_table_BN, start // page, size // page, 1)
    B = pages.shape[0]
    return jax.tree.map(lambda leaf: leaf[pages].reshape(B, size, *leaf.shape[2:]), x)


def _decode(x: Packed, dtype: jax.typing.DTypeLike) -> list[Float[Array, "B J C P"]]:
    """Values rounded to `dtype`, in float32: of even and of odd dimensions, or (8 bits) of all."""
    x = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 1), x)
    step = x.format.steps(x.scales, None)
    step = step if x.factor is None else step * x.factor
    # kept apart: its product must not be reassociated, nor each step be made once a value
    step = jax.lax.optimization_barrier(step)
    whole = x.format.element.BITS == 8
    codes = [x.codes] if whole else [x.codes & 15, x.codes >> 4]
    step = jnp.repeat(step, x.format.span // len(codes), axis=-1)
    values = [in_dtype(x.format.element.decode(part) * step, dtype) for part in codes]
    return [value.astype(jnp.float32) for value in values]


def _weights(
    score: Float[Array, "B J G C"], length_B: Int[Array, " B"], dtype: jax.typing.DTypeLike
) -> Float[Array, "B J G C"]:
    """Softmax over the slots seen, rounded to `dtype`; zeros where a sequence sees none."""
    seen = (jnp.arange(score.shape[-1])[None, :] < length_B[:, None])[:, None, None, :]
    weight = jax.nn.softmax(jnp.where(seen, score, jnp.float32(_UNSEEN)), axis=-1)
    return in_dtype(jnp.where(seen, weight, 0), dtype).astype(jnp.float32)
