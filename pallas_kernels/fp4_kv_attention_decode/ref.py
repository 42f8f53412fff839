"""The specification: every slot is decoded, whatever the lengths."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.packed import Packed
from trace_jax.formats.base import in_dtype, product


def attention_decode(
    q_BHK: Float[Array, "B H K"],
    k: Packed,
    v: Packed,
    length_B: Int[Array, " B"],
    page_table_BN: Int[Array, "B N"] | None = None,
) -> Float[Array, "B H K"]:
    """See `op.attention_decode`."""
    B, H, K = q_BHK.shape
    if page_table_BN is not None:
        k, v = contiguous(k, page_table_BN), contiguous(v, page_table_BN)
    C, J = k.shape[1:3]
    seen_BC = jnp.arange(C)[None, :] < length_B[:, None]
    seen = seen_BC[:, :, None, None]
    k_BCJK = jnp.where(seen, values(k, q_BHK.dtype)[..., :K].astype(jnp.float32), 0)
    v_BCJK = jnp.where(seen, values(v, q_BHK.dtype)[..., :K].astype(jnp.float32), 0)
    q = q_BHK.reshape(B, J, H // J, K).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    score = jnp.einsum("bjgk,bcjk->bjgc", q, k_BCJK, precision=highest) * jnp.float32(K**-0.5)
    seen = seen_BC[:, None, None, :]
    weight = jax.nn.softmax(jnp.where(seen, score, jnp.float32(-1e30)), axis=-1)
    weight = in_dtype(jnp.where(seen, weight, 0), q_BHK.dtype).astype(jnp.float32)
    out = jnp.einsum("bjgc,bcjk->bjgk", weight, v_BCJK, precision=highest)
    return out.reshape(B, H, K).astype(q_BHK.dtype)


def values(x: Packed, dtype: jax.typing.DTypeLike) -> Float[Array, "*A K"]:
    """fl(element(code) * fl(scale * factor)) in float32, rounded to `dtype`."""
    step = x.format.steps(x.scales, None)
    step = step if x.factor is None else product(step, x.factor)
    codes = x.format.unpack_codes(x.codes)
    return in_dtype(x.format.element.decode(codes) * x.format.spread(step), dtype)


def contiguous(x: Packed, page_table_BN: Int[Array, "B N"]) -> Packed:
    """Leaves (pages, page, ...) as (B, N * page, ...)."""
    B, N = page_table_BN.shape

    def gather(leaf: Array) -> Array:
        return leaf[page_table_BN].reshape(B, N * leaf.shape[1], *leaf.shape[2:])

    return jax.tree.map(gather, x)
