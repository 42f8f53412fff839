"""The KV cache of the sampler: NVFP4 codes and scales (as written after RoPE), or high precision.

A cache is a dict {"k": ..., "v": ...} of leaves (L, B, C, J, ...), C slots a sequence; a quantised
one holds `SiteRecord`s, so that the cache itself is the guidance record of K and V.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.formats import e2m1, nvfp4
from trace_jax.guidance import codec
from trace_jax.guidance.record import SiteRecord


def encode(x: Float[Array, "*A K"], rule: str | None) -> Any:
    """What the cache stores for K or V vectors: packed NVFP4, or x itself if `rule` is None."""
    if rule is None:
        return x
    x = x.astype(jnp.float32)
    global_ = nvfp4.global_scale(jnp.max(jnp.abs(x), axis=-1, keepdims=True), rule)
    codes, scales = nvfp4.quantize_rows(x, global_)
    return codec.encode(codes, scales, None if rule == "one" else global_, "codes")


def decode(stored: Any, dtype: Any) -> Float[Array, "*A K"]:
    """The values attention sees, in the compute dtype."""
    if not isinstance(stored, SiteRecord):
        return stored.astype(dtype)
    codes, step = codec.decode(stored, "codes")
    return (e2m1.decode(codes) * nvfp4.spread(step)).astype(dtype)


def record(cache: Any, kind: str) -> Any:
    """A quantised cache as guidance: the codes as they are, or only one mantissa bit of each."""
    if kind == "codes":
        return cache

    def mantissa(site: SiteRecord) -> SiteRecord:
        bits = e2m1.pack_bits(e2m1.unpack(site.bits) & 1)
        return SiteRecord(bits=bits, scales=site.scales, global_scale=site.global_scale)

    return {name: mantissa(site) for name, site in cache.items()}


def extend(prompt: Any, slots: int, samples: int) -> Any:
    """From prefilled leaves (L, P, T, ...) to a cache (L, P*samples, slots, ...)."""

    def grow(leaf: Array) -> Array:
        padding = [(0, 0)] * leaf.ndim
        padding[2] = (0, slots - leaf.shape[2])
        return jnp.repeat(jnp.pad(leaf, padding), samples, axis=1)

    return jax.tree.map(grow, prompt)


def write(cache: Any, layer: Array, slot_B: Int[Array, " B"], new: Any) -> Any:
    """Stores one token per sequence: leaves of `new` are (B, 1, J, ...)."""
    rows = jnp.arange(slot_B.shape[0])
    return jax.tree.map(lambda c, n: c.at[layer, rows, slot_B].set(n[:, 0]), cache, new)


def read(cache: Any, layer: Array) -> Any:
    """One layer's leaves (B, C, J, ...)."""
    return jax.tree.map(lambda c: jax.lax.dynamic_index_in_dim(c, layer, 0, keepdims=False), cache)
