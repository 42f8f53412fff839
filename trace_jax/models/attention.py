"""Grouped-query attention, RMSNorm and rotary positions, shared by the trainer and the sampler."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trace_jax import config as cfg


def rms_norm(
    x: Float[Array, "*A D"], weight_D: Float[Array, " D"], eps: float, *, zero_centred: bool = False
) -> Float[Array, "*A D"]:
    """x / rms(x) * weight (1 + weight if zero-centred) in float32, returned in the dtype of x."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    weight = weight_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    weight = jnp.float32(1) + weight if zero_centred else weight
    return (wide * scale * weight).astype(x.dtype)


def rotary_frequencies(model: cfg.Model) -> Float[Array, " half"]:
    """Radians a position turns each pair of dimensions by, float32.

    Math:    f_i = theta ** (-i / half) over the rotated part of a head. With `rope_llama3`
             (factor, low, high, context), pairs that turn fewer than `low` times in the old
             context turn `factor` times slower, those that turn more than `high` times stay, and
             between them the two are mixed linearly in the number of turns.
    Source:  Llama 3.1's `rope_type: llama3`.
    """
    half = int(model.head_dim * model.rotary_fraction) // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / jnp.float32(half)
    frequency = jnp.float32(model.rope_theta) ** -exponent
    if model.rope_llama3 is None:
        return frequency
    factor, low, high, context = model.rope_llama3
    turns = frequency * jnp.float32(context / (2 * math.pi))
    kept = jnp.clip((turns - jnp.float32(low)) / jnp.float32(high - low), 0, 1)
    return frequency * (kept + (1 - kept) / jnp.float32(factor))


def rotary(
    model: cfg.Model, position_BT: Int[Array, "B T"]
) -> Callable[[Float[Array, "B T H K"]], Float[Array, "B T H K"]]:
    """Rotary positions, rotate-half form, of the first `rotary_fraction` of a head, in float32."""
    frequency = rotary_frequencies(model)
    rotated = 2 * frequency.shape[0]
    angle = position_BT.astype(jnp.float32)[..., None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def turn(x_BTHK: Array) -> Array:
        head, rest = x_BTHK[..., :rotated], x_BTHK[..., rotated:]
        first, second = jnp.split(head.astype(jnp.float32), 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        turned = jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)
        return jnp.concatenate([turned, rest], axis=-1)

    return turn


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BCJK: Float[Array, "B C J K"],
    v_BCJK: Float[Array, "B C J K"],
    visible_BTC: Bool[Array, "B T C"],
) -> Float[Array, "B T H K"]:
    """softmax(q k / sqrt(K)) v over the visible slots; scores and softmax in float32.

    A query that sees nothing (padding) gets the mean of nothing: zeros.
    """
    B, T, H, K = q_BTHK.shape
    J = k_BCJK.shape[2]
    q = q_BTHK.reshape(B, T, J, H // J, K).astype(jnp.float32)
    score = jnp.einsum("btjgk,bcjk->bjgtc", q, k_BCJK.astype(jnp.float32)) * jnp.float32(K**-0.5)
    visible = visible_BTC[:, None, None]
    score = jnp.where(visible, score, jnp.float32(-1e30))
    weight = jnp.where(visible, jax.nn.softmax(score, axis=-1), jnp.float32(0))
    weight = weight.astype(q_BTHK.dtype).astype(jnp.float32)
    out = jnp.einsum("bjgtc,bcjk->btjgk", weight, v_BCJK.astype(jnp.float32))
    return out.reshape(B, T, H, K).astype(q_BTHK.dtype)
