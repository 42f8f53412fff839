"""Block scales by their low bits: the trainer supplies the rest, and a check says if that worked.

The trainer computes its own scale of every block, and it is a few codes away from the rollout's. So
of each scale byte only the lowest b bits are kept; the byte is the one with those bits that is
nearest to the trainer's. It is right if the two differ by less than 2^(b-1) (or by 2^(b-1) upwards
from the rollout to the trainer).

A wrong byte is off by a multiple of 2^b, so only its high bits h can be wrong. Each group of up to
64 blocks keeps one check byte, sum_i w_i h_i mod 251 with the weights w_i = 1..64. A single block
off by one period gives the syndrome +-w_i, which names the block and the direction: it is repaired
if that block's second-nearest candidate is close. What no repair explains is a *failure*: its row
keeps the nearest bytes and is counted. Undetected is only what has two or more wrong blocks in one
group (or one off by several periods) and by chance looks repairable or right: of such groups about
(1 + candidates) / 251, candidates being the blocks whose second choice is close.

The check byte 255 marks a group with a NaN scale: there, blocks with all low bits set come out as
NaN. So a NaN always survives; others may join it, in a row that is NaN anyway.
Source: trace.md, section 2 ("Beyond the paper").
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt8

from trace_jax.formats import e2m1

GROUP = 64  # blocks under one check byte
PRIME = 251  # the largest prime below 256
ESCAPE = 255  # check byte of a group with a NaN scale


def coded_bytes(blocks: int, bits: int) -> int:
    """Bytes of the scales of one row: low bits, rounded up to bytes, and the check bytes."""
    return -(-blocks * bits // 8) + _groups(blocks)


def encode(scales: UInt8[Array, "*A S"], bits: int, nan: int) -> UInt8[Array, "*A packed"]:
    """Packs the low `bits` of each byte (lowest first), then a check byte for each group.

    Args: nan: the NaN byte; the bytes below it are finite and in the order of their values.
    """
    high = (scales >> bits).astype(jnp.int32)
    check = jnp.sum(_grouped(high) * _weights(scales.ndim + 1), axis=-1) % PRIME
    escaped = jnp.any(_grouped((scales == nan).astype(jnp.int32)) > 0, axis=-1)
    check = jnp.where(escaped, ESCAPE, check).astype(jnp.uint8)
    shifts = jnp.arange(bits, dtype=jnp.uint8).reshape((1,) * scales.ndim + (bits,))
    spread = ((scales[..., None] >> shifts) & 1).reshape(*scales.shape[:-1], -1)
    spread = jnp.pad(spread, [(0, 0)] * (scales.ndim - 1) + [(0, -spread.shape[-1] % 8)])
    return jnp.concatenate([e2m1.pack_bits(spread), check], axis=-1)


def decode(
    coded: UInt8[Array, "*A packed"], own: UInt8[Array, "*A S"], bits: int, nan: int
) -> tuple[UInt8[Array, "*A S"], Bool[Array, "*A"]]:
    """Inverse of `encode`, given scale bytes that are near: (scale bytes, whether a check failed).

    Math:    period P = 2^b, c = the byte with the low bits that is nearest to own (the lower one if
             two are), c' = the second nearest; a group whose check disagrees takes c' in the one
             block that explains it with |c' - own| <= 3P/4, the nearest such; else it has failed.
    Args:    own: the trainer's scale bytes, of as many blocks as were encoded.
    """
    S = own.shape[-1]
    groups, period, half = _groups(S), 1 << bits, 1 << (bits - 1)
    low = _unpack(coded[..., : coded.shape[-1] - groups], S, bits)
    check = coded[..., coded.shape[-1] - groups :].astype(jnp.int32)
    near = jnp.minimum(own, jnp.uint8(nan - 1)).astype(jnp.int32)
    first = near + ((low - near + half) & (period - 1)) - half
    first = jnp.where(first < 0, first + period, jnp.where(first >= nan, first - period, first))
    sign = jnp.where(first <= near, 1, -1)
    second = first + sign * period
    distance = jnp.abs(second - near)
    usable = (second >= 0) & (second < nan) & (4 * distance <= 3 * period)
    weights = _weights(own.ndim + 1)
    sums = jnp.sum(_grouped(first >> bits) * weights, axis=-1)
    syndrome = (check - sums) % PRIME  # in 0..250
    explains = (_grouped(sign) * weights) % PRIME == syndrome[..., None]
    cost = jnp.where(explains & (_grouped(usable.astype(jnp.int32)) > 0), _grouped(distance), 1024)
    at = jnp.argmin(cost, axis=-1)
    repaired = jnp.min(cost, axis=-1) < 1024
    here = jnp.arange(GROUP).reshape((1,) * own.ndim + (GROUP,)) == at[..., None]
    flat = (*own.shape[:-1], groups * GROUP)
    swap = (here & (repaired & (check < PRIME))[..., None]).reshape(flat)[..., :S]
    escaped = jnp.repeat(check == ESCAPE, GROUP, axis=-1)[..., :S]
    scales = jnp.where(swap, second, first)
    scales = jnp.where(escaped & (low == period - 1), nan, scales).astype(jnp.uint8)
    wrong = (check != ESCAPE) & ((check >= PRIME) | ((syndrome != 0) & ~repaired))
    return scales, jnp.any(wrong, axis=-1)


def _groups(blocks: int) -> int:
    return -(-blocks // GROUP)


def _weights(ndim: int) -> Int[Array, "*one 64"]:
    return jnp.arange(1, GROUP + 1).reshape((1,) * (ndim - 1) + (GROUP,))


def _grouped(a: Int[Array, "*A S"]) -> Int[Array, "*A C 64"]:
    """Splits blocks into groups; zeros fill the last."""
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % GROUP)])
    return a.reshape(*a.shape[:-1], a.shape[-1] // GROUP, GROUP)


def _unpack(packed: UInt8[Array, "*A P"], blocks: int, bits: int) -> Int[Array, "*A S"]:
    flat = e2m1.unpack_bits(packed)[..., : blocks * bits].astype(jnp.int32)
    each = flat.reshape(*packed.shape[:-1], blocks, bits)
    shifts = jnp.arange(bits).reshape((1,) * packed.ndim + (bits,))
    return jnp.sum(each << shifts, axis=-1)
