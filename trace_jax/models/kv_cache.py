"""The KV cache of the sampler: codes and scales (as written after RoPE), or high precision.

A cache is a dict {"k": ..., "v": ...} of leaves (L, B, C, J, ...), C slots a sequence; a quantised
one holds `SiteRecord`s, so that the cache itself is the guidance record of K and V.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_kv_attention_decode import op
from trace_jax.formats import Format
from trace_jax.formats.base import in_dtype
from trace_jax.guidance import codec
from trace_jax.guidance.record import Coding, SiteRecord
from trace_jax.models import attention
from trace_jax.qat.sites import Site, record_site

_COUNTED = 2**31  # bytes


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


def write_by_kernel(
    cache: Any,
    layer: Array,
    slot_B: Int[Array, " B"],
    k: Array,
    v: Array,
    format: Format,
    impl: str,
) -> Any:
    """Quantises and stores one token per sequence, K and V (B, 1, J, K), in one kernel."""
    pages, table_B1, whole = _pages(cache, layer, format)
    new = (k[:, 0], v[:, 0], slot_B)
    *written, _ = op.write(*pages, *new, impl=impl, record=None, page_table_BN=table_B1)
    packed = zip(("k", "v"), written, strict=True)
    stored = {
        n: SiteRecord(bits=p.codes, scales=p.scales, global_scale=p.factor) for n, p in packed
    }
    if not whole:
        return jax.tree.map(lambda leaf, old: old.at[layer].set(leaf), stored, cache)
    return jax.tree.map(lambda leaf, old: leaf.reshape(old.shape), stored, cache)


def attend(
    q_B1HK: Float[Array, "B 1 H K"],
    cache: Any,
    layer: Array,
    length_B: Int[Array, " B"],
    format: Format | None,
    impl: str,
) -> Float[Array, "B 1 H K"]:
    """Attention of one token per sequence over the first `length_B` slots of one layer's cache."""
    if format is None:
        k, v = (leaf.astype(q_B1HK.dtype) for leaf in (read(cache, layer)[n] for n in ("k", "v")))
        visible_BC = jnp.arange(k.shape[1])[None, :] < length_B[:, None]
        return attention.attend(q_B1HK, k, v, visible_BC[:, None, :])
    if impl == "xla":
        k, v = (_packed(read(cache, layer)[n], format) for n in ("k", "v"))
        out = op.attention_decode(q_B1HK[:, 0], k, v, length_B, impl=impl)
    else:
        (k, v), table_B1, _ = _pages(cache, layer, format)
        out = op.attention_decode(q_B1HK[:, 0], k, v, length_B, impl=impl, page_table_BN=table_B1)
    return out[:, None]


def _pages(cache: Any, layer: Array, format: Format) -> tuple[tuple[Packed, Packed], Array, bool]:
    """The cache as pages, one a layer and sequence, the layer's table (B, 1), and "all layers".

    A kernel takes whole arrays: a slice of one layer is copied for it at every step, and is taken
    only where the whole is more than kernels can count (2 GiB).
    """
    leaves = jax.tree.leaves(cache)
    sequences = jnp.arange(leaves[0].shape[1], dtype=jnp.int32)
    whole = max(leaf.nbytes for leaf in leaves) < _COUNTED
    if whole:
        pages = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), cache)
        table_B1 = (layer * len(sequences) + sequences)[:, None]
    else:
        pages, table_B1 = read(cache, layer), sequences[:, None]
    return (_packed(pages["k"], format), _packed(pages["v"], format)), table_B1, whole


def _packed(stored: SiteRecord, format: Format) -> Packed:
    """A cache's codes as kernels take them."""
    factor = None if stored.global_scale is None else format.decode_scale(stored.global_scale)
    return Packed(codes=stored.bits, scales=stored.scales, factor=factor, format=format)


def read(cache: Any, layer: Array) -> Any:
    """One layer's leaves (B, C, J, ...)."""
    return jax.tree.map(lambda c: jax.lax.dynamic_index_in_dim(c, layer, 0, keepdims=False), cache)
