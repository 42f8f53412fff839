"""The KV cache of the sampler: codes and scales (as written after RoPE), or high precision.

A cache is a dict {"k": ..., "v": ...} of leaves (L, B, C, J, ...), C slots a sequence; a quantised
one holds `SiteRecord`s, so that the cache itself is the guidance record of K and V.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.formats import Format
from trace_jax.formats.base import in_dtype
from trace_jax.guidance import codec
from trace_jax.guidance.record import Coding, SiteRecord
from trace_jax.qat.sites import Site, record_site


def encode(x: Float[Array, "*A K"], format: Format | None) -> Any:
    """What the cache stores for K or V vectors: packed codes, or x itself without a format."""
    if format is None:
        return x
    return record_site(x, Site(format=format))


def decode(stored: Any, format: Format | None, width: int, dtype: Any) -> Float[Array, "*A K"]:
    """The values attention sees, in the compute dtype; `width` is the length of a head."""
    if format is None:
        return stored.astype(dtype)
    kept = codec.decode(stored, format=format, coding=Coding())
    value = format.dequantize_rows(kept.values, kept.scales, kept.global_scale)
    return in_dtype(value[..., :width], dtype)


def record(cache: Any, format: Format, coding: Coding) -> Any:
    """A quantised cache as guidance: as it is, or packed as `coding` says."""
    if coding == Coding():
        return cache

    def packed(site: SiteRecord) -> SiteRecord:
        packed = site.bits, site.scales, site.global_scale
        return codec.encode_packed(*packed, format=format, coding=coding)

    return {name: packed(site) for name, site in cache.items()}


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
