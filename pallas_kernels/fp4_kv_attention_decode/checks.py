"""What the arguments must be: shapes and dtypes at trace time, values in debug mode."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import debug, packed
from pallas_kernels.common.packed import Packed
from trace_jax.checks import require

QUERY_DTYPES = ("bfloat16", "float16", "float32")
NEW_DTYPES = ("bfloat16", "float32")
RECORDS = ("codes", "mantissa", None)


def cache(where: str, k: Packed, v: Packed, page_table: jax.Array | None) -> int:
    """Checks K and V caches against each other; returns the slots that a sequence has."""
    fix = "K and V are cached in one format and one layout"
    for name, x in (("k", k), ("v", v)):
        packed.check(where, name, x)
        need = "(B, C, J, K)" if page_table is None else "(pages, page, J, K)"
        require(len(x.shape) == 4 and min(x.shape) > 0, f"{where}: {name}: shape", x.shape, need)
        full = None if x.factor is None else (*x.shape[:-1], 1)
        got = None if x.factor is None else x.factor.shape
        require(got == full, f"{where}: {name}.factor: shape", got, full, "one factor a vector")
    require(k.format == v.format, f"{where}: format of v", v.format, k.format, fix)
    require(k.shape == v.shape, f"{where}: shape of v", v.shape, k.shape, fix)
    same = (k.factor is None) == (v.factor is None)
    require(same, f"{where}: factors", "one for only one of k and v", "both or none", fix)
    if page_table is None:
        return k.shape[1]
    _whole_numbers(where, "page_table_BN", page_table)
    require(page_table.ndim == 2, f"{where}: page_table_BN: rank", page_table.ndim, 2)
    return page_table.shape[1] * k.shape[1]


def query(
    where: str, q: jax.Array, k: Packed, length: jax.Array, page_table: jax.Array | None
) -> None:
    """Checks a query and lengths against a cache."""
    _dtype(where, "q_BHK", q, QUERY_DTYPES)
    require(q.ndim == 3, f"{where}: q_BHK: rank", q.ndim, "3: (B, H, K)")
    B, H, K = q.shape
    J = k.shape[2]
    require(H % J == 0, f"{where}: heads of q", H, f"a multiple of {J}, the kv heads of the cache")
    _sequences(where, B, k, page_table)
    _width(where, "q_BHK", K, k)
    _whole_numbers(where, "length_B", length)
    require(length.shape == (B,), f"{where}: length_B: shape", length.shape, (B,))


def new(
    where: str,
    k: Packed,
    k_BJK: jax.Array,
    v_BJK: jax.Array,
    slot: jax.Array,
    record: str | None,
    page_table: jax.Array | None,
) -> None:
    """Checks what is to be written against a cache."""
    require(record in RECORDS, f"{where}: record", repr(record), f"one of {list(RECORDS)}")
    for name, x in (("k_BJK", k_BJK), ("v_BJK", v_BJK)):
        _dtype(where, name, x, NEW_DTYPES)
        require(x.ndim == 3, f"{where}: {name}: rank", x.ndim, "3: (B, J, K)")
        J = k.shape[2]
        require(x.shape[1] == J, f"{where}: heads of {name}", x.shape[1], f"{J}, as the cache")
        _width(where, name, x.shape[2], k)
    require(k_BJK.shape == v_BJK.shape, f"{where}: v_BJK: shape", v_BJK.shape, k_BJK.shape)
    _sequences(where, k_BJK.shape[0], k, page_table)
    _whole_numbers(where, "slot_B", slot)
    require(slot.shape == k_BJK.shape[:1], f"{where}: slot_B: shape", slot.shape, k_BJK.shape[:1])
    rows, fix = k.format.per_row, "a format that rounds each vector by itself"
    require(rows, f"{where}: format", k.format, "one scale a row", fix)
    got, need = k.factor is not None, k.format.has_global
    fix = "a cache needs a factor exactly where its format has a global scale"
    require(got == need, f"{where}: cache has factors", got, need, fix)


def debug_lengths(where: str, length: jax.Array, slots: int) -> None:
    """Lengths within 0..slots."""
    debug.check(
        jnp.all((length >= 0) & (length <= slots)),
        f"{where}: length_B: got {{low}} to {{high}}, need 0 to {slots}, the slots of a sequence. "
        "Fix: count the slots that are written, the new one included",
        low=jnp.min(length),
        high=jnp.max(length),
    )


def debug_slots(where: str, slot: jax.Array, slots: int) -> None:
    """Slots within 0..slots-1."""
    debug.check(
        jnp.all((slot >= 0) & (slot < slots)),
        f"{where}: slot_B: got {{low}} to {{high}}, need 0 to {slots - 1}. "
        "Fix: give the cache more slots; a slot that does not exist is not written",
        low=jnp.min(slot),
        high=jnp.max(slot),
    )


def debug_pages(
    where: str,
    upto: jax.Array,
    shape: tuple[int, ...],
    page_table: jax.Array | None,
    *,
    only_last: bool = False,
) -> None:
    """Page ids within 0..pages-1: of slots below a length, or (`only_last`) of one slot."""
    if page_table is None:
        return
    pages, page = shape[:2]
    entry = jnp.arange(page_table.shape[1])[None, :]
    used = entry == upto[:, None] // page if only_last else entry * page < upto[:, None]
    wrong = used & ((page_table < 0) | (page_table >= pages))
    debug.check(
        ~jnp.any(wrong),
        f"{where}: page_table_BN: got page {{page}}, need 0 to {pages - 1}. "
        "Fix: give a sequence its pages before its length reaches them",
        page=jnp.max(jnp.where(wrong, page_table, jnp.iinfo(jnp.int32).min)),
    )


def debug_scales(
    where: str, k: Packed, v: Packed, length: jax.Array, page_table: jax.Array | None
) -> None:
    """No NaN scale in a slot that is attended to."""
    for name, x in (("k", k), ("v", v)):
        bad = jnp.any(jnp.isnan(x.format.steps(x.scales, None)), axis=(-2, -1))
        if page_table is not None:
            bad = bad[page_table].reshape(page_table.shape[0], -1)
        seen = jnp.arange(bad.shape[1])[None, :] < length[:, None]
        debug.check(
            ~jnp.any(bad & seen),
            f"{where}: {name}.scales: got NaN in {{count}} slots below the length, need numbers. "
            "Fix: look for NaN or Inf in what was written there",
            count=jnp.sum(bad & seen),
        )


def _dtype(where: str, name: str, x: jax.Array, choices: tuple[str, ...]) -> None:
    need = f"one of {list(choices)}"
    require(x.dtype.name in choices, f"{where}: {name}: dtype", x.dtype, need, error=TypeError)


def _whole_numbers(where: str, name: str, x: jax.Array) -> None:
    got = x.dtype
    require(got == jnp.int32, f"{where}: {name}: dtype", got, "int32", error=TypeError)


def _sequences(where: str, B: int, k: Packed, page_table: jax.Array | None) -> None:
    have = k.shape[0] if page_table is None else page_table.shape[0]
    source = "cache" if page_table is None else "page_table_BN"
    require(B > 0 and have == B, f"{where}: sequences of the {source}", have, B)


def _width(where: str, name: str, K: int, k: Packed) -> None:
    need = f"a width whose whole blocks are {k.width}, the width of the cache"
    require(K > 0 and k.format.padded(K) == k.width, f"{where}: last axis of {name}", K, need)
