"""Flash-decoding: each program attends to one part of one sequence's slots, for one kv head.

Codes and scales are decoded in registers. Of two codes a byte, the low nibbles are the even
dimensions of a head and the high ones the odd: their halves of q k and of the result are apart.
Slots are the rows of both products, the query heads of the kv head (padded to 16) the columns, so
that a tile of decoded slots is the operand that tensor cores take 64 rows of.
Softmax is online, so weights are rounded before they are divided by their sum; XLA joins the parts.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.common import impls, tiles
from pallas_kernels.common.packed import Packed

SLOTS = 64  # of a tile
_PROGRAMS = 4 * 132  # that fill an H200: 132 multiprocessors, four programs each
_ROWS = 16  # fewest columns of a product on tensor cores
_UNSEEN = -1e30


def attention_decode(
    q_BHK: Float[Array, "B H K"],
    k: Packed,
    v: Packed,
    length_B: Int[Array, " B"],
    page_table_BN: Int[Array, "B N"] | None = None,
    *,
    impl: str = "triton",
) -> Float[Array, "B H K"]:
    """See `op.attention_decode`."""
    (B, H, K), J = q_BHK.shape, k.shape[2]
    C = k.shape[1] * (1 if page_table_BN is None else page_table_BN.shape[1])
    G, splits = H // J, _splits(B * J, C)
    parts, P = k.width // k.codes.shape[-1], k.codes.shape[-1]
    P_pad = max(_ROWS, pl.next_power_of_2(P))
    G_pad = max(_ROWS, pl.next_power_of_2(G))
    tables = () if page_table_BN is None else (page_table_BN,)
    stored = [_flat(x) for x in (k, v)]
    body = functools.partial(
        _body, C=C, G=G, K=K, page=None if not tables else k.shape[1], splits=splits, k=k
    )
    q = _query(q_BHK, J, parts, P_pad, G_pad)
    sums, largest, mixed = pl.pallas_call(
        body,
        grid=(J, splits, B),
        in_specs=[
            pl.BlockSpec((None, None, parts, P_pad, G_pad), lambda j, s, b: (b, j, 0, 0, 0)),
            *[pl.BlockSpec()] * (1 + len(tables) + len(jax.tree.leaves(stored))),
        ],
        out_specs=[pl.BlockSpec()] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((B, J, splits, G), jnp.float32),
            jax.ShapeDtypeStruct((B, J, splits, G), jnp.float32),
            jax.ShapeDtypeStruct((B, J, splits, parts, P, G), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=impls.interpreted(impl),
        name="fp4_kv_attention_decode",
    )(q, length_B, *tables, *jax.tree.leaves(stored))
    return _join(sums, largest, mixed)[..., :K].reshape(B, H, K).astype(q_BHK.dtype)


def _splits(heads: int, C: int) -> int:
    """Parts that the slots of each of `heads` kv heads are divided into."""
    return max(1, min(-(-_PROGRAMS // heads), -(-C // (4 * SLOTS))))


def _flat(x: Packed) -> tuple[Array, ...]:
    """Codes, scales (and factors) by (slot of any sequence or page, kv head)."""
    leaves = (x.codes, x.scales) if x.factor is None else (x.codes, x.scales, x.factor[..., 0])
    return tuple(leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves)


def _query(q_BHK: Array, J: int, parts: int, P_pad: int, G_pad: int) -> Array:
    """(B, J, parts, P_pad, G_pad): even and odd dimensions apart, zeros where there is nothing."""
    B, H, K = q_BHK.shape
    q = jnp.pad(q_BHK, [(0, 0), (0, 0), (0, parts * P_pad - K)])
    q = q.reshape(B, J, H // J, P_pad, parts).transpose(0, 1, 4, 3, 2)
    return jnp.pad(q, [(0, 0)] * 4 + [(0, G_pad - H // J)])


def _join(
    sums: Float[Array, "B J N G"],
    largest: Float[Array, "B J N G"],
    mixed: Float[Array, "B J N parts P G"],
) -> Float[Array, "B J G K"]:
    """The parts of the slots as one softmax; zeros where there was no slot."""
    share = jnp.exp(largest - jnp.max(largest, axis=2, keepdims=True))
    total = jnp.sum(sums * share, axis=2)
    out = jnp.sum(mixed * share[:, :, :, None, None], axis=2)
    total = total[:, :, None, None]
    out = jnp.where(total == 0, 0, out / jnp.where(total == 0, 1, total))
    return out.transpose(0, 1, 4, 3, 2).reshape(*out.shape[:2], out.shape[4], -1)


def _body(q_ref, length_ref, *refs, C, G, K, page, splits, k):
    j, split, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    table_ref, refs = (None, refs) if page is None else (refs[0], refs[1:])
    *stored, sums_ref, largest_ref, mixed_ref = refs
    k_refs, v_refs = stored[: len(stored) // 2], stored[len(stored) // 2 :]
    parts, P_pad, G_pad = q_ref.shape
    dtype, length = q_ref.dtype, length_ref[b]
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
    tiles_all = pl.cdiv(length, SLOTS)
    each = pl.cdiv(tiles_all, splits)
    first = jnp.minimum(split * each, tiles_all)
    stop = jnp.minimum(first + each, tiles_all)

    def tile(i, carry):
        largest, sums, mixed = carry
        slot = i * SLOTS + jnp.arange(SLOTS, dtype=jnp.int32)
        seen = slot < length
        row = _rows(slot, seen, b, table_ref, C, page)
        decode = functools.partial(_decode, row, seen, j, P_pad, k.format, dtype)
        score = jnp.zeros((SLOTS, G_pad), jnp.float32)
        for part, value in enumerate(decode(k_refs)):
            score = score + dot(value, q_ref[part])
        score = jnp.where(seen[:, None], score * K**-0.5, _UNSEEN)
        top = jnp.maximum(largest, jnp.max(score, axis=0))
        weight, shrink = jnp.exp(score - top[None, :]), jnp.exp(largest - top)
        sums = sums * shrink + jnp.sum(weight, axis=0)
        weight = weight.astype(dtype)
        mixed = [
            old * shrink[None, :] + dot(value.T, weight)
            for old, value in zip(mixed, decode(v_refs), strict=True)
        ]
        return top, sums, mixed

    largest = jnp.full((G_pad,), _UNSEEN, jnp.float32)
    sums = jnp.zeros((G_pad,), jnp.float32)
    mixed = [jnp.zeros((P_pad, G_pad), jnp.float32)] * parts
    largest, sums, mixed = jax.lax.fori_loop(first, stop, tile, (largest, sums, mixed))
    group, column = jnp.arange(G_pad), jnp.arange(P_pad)
    plt.store(largest_ref.at[b, j, split, group], largest, mask=group < G)
    plt.store(sums_ref.at[b, j, split, group], sums, mask=group < G)
    P = mixed_ref.shape[-2]
    mask = (column < P)[:, None] & (group < G)[None, :]
    for part, value in enumerate(mixed):
        place = mixed_ref.at[b, j, split, part, column[:, None], group[None, :]]
        plt.store(place, value, mask=mask)


def _rows(slot, seen, b, table_ref, C, page):
    """Where the slots of sequence b are: a row of the cache, or of a page of it."""
    if page is None:
        return b * C + slot
    return plt.load(table_ref.at[b, slot // page], mask=seen, other=0) * page + slot % page


def _decode(row, seen, j, P_pad, format, dtype, refs):
    """Tiles (slots, P_pad) of values rounded to `dtype`: of even and odd dimensions, or of all."""
    codes_ref, scales_ref, *factor_ref = refs
    a_byte = 1 if format.name == "mxfp8" else 2
    column = jnp.arange(P_pad, dtype=jnp.int32)[None, :]
    inside = seen[:, None] & (column < codes_ref.shape[-1])
    byte = plt.load(codes_ref.at[row[:, None], j, column], mask=inside, other=0).astype(jnp.int32)
    span = format.block // a_byte
    block = jnp.arange(P_pad // span, dtype=jnp.int32)[None, :]
    inside = seen[:, None] & (block < scales_ref.shape[-1])
    scale = plt.load(scales_ref.at[row[:, None], j, block], mask=inside, other=0)
    step = tiles.scale_value(scale.astype(jnp.int32), format)
    if factor_ref:
        step = step * plt.load(factor_ref[0].at[row, j], mask=seen, other=0.0)[:, None]
    step = jnp.broadcast_to(step[:, :, None], (*step.shape, span)).reshape(byte.shape)
    if a_byte == 1:
        return [(tiles.e4m3_value(byte) * step).astype(dtype)]
    nibbles = (byte & 15, byte >> 4)
    return [(tiles.e2m1_value(nibble) * step).astype(dtype) for nibble in nibbles]
