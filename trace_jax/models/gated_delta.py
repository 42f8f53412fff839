"""Gated DeltaNet: the linear-attention layer of Qwen3-Next and Qwen3.5.

Source: arXiv 2412.06464; the layer around it as in Qwen3-Next.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from trace_jax import config as cfg
from trace_jax.models import attention

CHUNK = 64  # tokens in parallel


class GatedDelta(nnx.Module):
    """Projections, causal convolution and gates; weights are (in, out), heads flat."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        D, heads, W = model.width, model.linear_value_heads, model.conv_width
        keys = model.linear_key_heads * model.linear_key_dim
        values = heads * model.linear_value_dim
        self.model = model

        def normal(shape: tuple[int, ...], fan_in: int) -> nnx.Param:
            draw = jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param(draw * jnp.float32(fan_in**-0.5))

        self.qkv = normal((D, 2 * keys + values), D)  # q of all heads, then k, then v
        self.z = normal((D, values), D)
        self.b = normal((D, heads), D)
        self.a = normal((D, heads), D)
        self.conv = normal((2 * keys + values, W), W)
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0))
        )
        self.dt_bias = nnx.Param(jnp.ones(heads))
        self.norm = nnx.Param(jnp.ones(model.linear_value_dim))
        self.out = normal((values, D), values * 2 * model.layers)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        state: dict[str, Array] | None = None,
        valid_BT: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Returns y_BTD, zero at invalid tokens, and the state after each row's last valid token.

        Args: state: as `empty_state`; None: before the first token. valid_BT: False is padding,
              wherever it stands; such a token is skipped. None: every token is valid.
        """
        if state is None:
            state = empty_state(self.model, x_BTD.shape[0], x_BTD.dtype)
        if valid_BT is None:
            return self._compact(x_BTD, state, None)
        # Valid tokens move to the front, so that neighbours are neighbours for the convolution, and
        # chunks begin at the same tokens whatever the padding.
        order_BT = jnp.argsort(~valid_BT, axis=1, stable=True)
        x_BTD = jnp.where(valid_BT[..., None], x_BTD, jnp.zeros((), x_BTD.dtype))
        compact = jnp.take_along_axis(x_BTD, order_BT[..., None], axis=1)
        y_BTD, state = self._compact(compact, state, jnp.sum(valid_BT, axis=1))
        rank_BT = jnp.maximum(jnp.cumsum(valid_BT, axis=1) - 1, 0)
        y_BTD = jnp.take_along_axis(y_BTD, rank_BT[..., None], axis=1)
        return jnp.where(valid_BT[..., None], y_BTD, jnp.zeros((), y_BTD.dtype)), state

    def _compact(
        self, x_BTD: Array, state: dict[str, Array], length_B: Int[Array, " B"] | None
    ) -> tuple[Array, dict[str, Array]]:
        """The layer on rows whose first `length` tokens are valid (None: all)."""
        m, dtype = self.model, x_BTD.dtype
        B, T, _ = x_BTD.shape
        mixed = x_BTD @ self.qkv[...].astype(dtype)
        mixed, conv = causal_conv(mixed, self.conv[...].astype(dtype), state["conv"], length_B)
        q, k, v = self._heads(mixed)
        b, a = x_BTD @ self.b[...].astype(dtype), x_BTD @ self.a[...].astype(dtype)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        # In float32 from float32 parameters: exp(A_log) of a BF16 gate is off by up to a percent.
        rate = -jnp.exp(self.A_log[...].astype(jnp.float32))[None, None]
        bias = self.dt_bias[...].astype(jnp.float32)[None, None]
        g = rate * jax.nn.softplus(a.astype(jnp.float32) + bias)
        if length_B is not None:  # a step with g = 0 and beta = 0 leaves the memory as it is
            valid = (jnp.arange(T)[None] < length_B[:, None])[..., None]
            g, beta = jnp.where(valid, g, jnp.float32(0)), jnp.where(valid, beta, jnp.float32(0))
        rule = recurrent_rule if T == 1 else chunked_rule
        o, memory = rule(q, k, v, g, beta, state["memory"])
        z = (x_BTD @ self.z[...].astype(dtype)).reshape(o.shape).astype(jnp.float32)
        o = attention.rms_norm(o, self.norm[...], m.norm_eps) * jax.nn.silu(z)
        y_BTD = o.astype(dtype).reshape(B, T, -1) @ self.out[...].astype(dtype)
        return y_BTD, {"conv": conv, "memory": memory}

    def _heads(self, mixed_BTC: Array) -> tuple[Array, Array, Array]:
        """q, k (B,T,Hv,dk) of unit length, q scaled by dk^-1/2, and v (B,T,Hv,dv); float32."""
        m = self.model
        B, T, _ = mixed_BTC.shape
        keys = m.linear_key_heads * m.linear_key_dim
        q, k, v = jnp.split(mixed_BTC.astype(jnp.float32), (keys, 2 * keys), axis=-1)
        share = m.linear_value_heads // m.linear_key_heads  # value heads of one key head

        def unit(x_BTC: Array) -> Array:
            x = x_BTC.reshape(B, T, m.linear_key_heads, m.linear_key_dim)
            square = jnp.sum(x * x, axis=-1, keepdims=True)
            return jnp.repeat(x * jax.lax.rsqrt(square + jnp.float32(1e-6)), share, axis=2)

        q = unit(q) * jnp.float32(m.linear_key_dim**-0.5)
        return q, unit(k), v.reshape(B, T, m.linear_value_heads, m.linear_value_dim)


def empty_state(model: cfg.Model, sequences: int, dtype: Any) -> dict[str, Array]:
    """State before the first token: {"conv": (B, C, W-1), "memory": (B, Hv, dk, dv) float32}.

    `conv` holds the last W-1 inputs of the convolution, oldest first, in the compute dtype.
    """
    keys = model.linear_key_heads * model.linear_key_dim
    heads, values = model.linear_value_heads, model.linear_value_dim
    return {
        "conv": jnp.zeros((sequences, 2 * keys + heads * values, model.conv_width - 1), dtype),
        "memory": jnp.zeros((sequences, heads, model.linear_key_dim, values), jnp.float32),
    }


def causal_conv(
    x_BTC: Float[Array, "B T C"],
    weight_CW: Float[Array, "C W"],
    state_BCw: Float[Array, "B C w"],
    length_B: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B C w"]]:
    """silu(causal depthwise convolution), and the last W-1 inputs of the valid tokens.

    Products, sum and SiLU are in float32, rounded once to the dtype of x: the inputs are rounded to
    it by the projection before, and decoding has only these to continue from.
    """
    T, W = x_BTC.shape[1], weight_CW.shape[1]
    seen = jnp.concatenate([jnp.swapaxes(state_BCw, 1, 2), x_BTC], axis=1)  # (B, W-1+T, C)
    weight = weight_CW.astype(jnp.float32)
    taps = [seen[:, w : w + T].astype(jnp.float32) * weight[None, None, :, w] for w in range(W)]
    out_BTC = jax.nn.silu(sum(taps[1:], taps[0])).astype(x_BTC.dtype)
    if length_B is None:
        last = seen[:, T:]
    else:
        rows = length_B[:, None] + jnp.arange(W - 1)[None]
        last = jnp.take_along_axis(seen, rows[..., None], axis=1)
    return out_BTC, jnp.swapaxes(last, 1, 2)


def recurrent_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H Z"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    memory: Float[Array, "B H K Z"],
) -> tuple[Float[Array, "B T H Z"], Float[Array, "B H K Z"]]:
    """The gated delta rule, token by token, in float32.

    Math:    S <- e^g S;  u = beta (v - S' k);  S <- S + k u';  o = S' q   (' transposes).
    Returns: o of every token, and S after the last.
    Source:  arXiv 2412.06464, eq. 10.
    """

    def step(S: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = token  # (B, H, ...)
        S = S * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.sum(S * k[..., None], axis=-2))
        S = S + k[..., None] * u[..., None, :]
        return S, jnp.sum(S * q[..., None], axis=-2)

    tokens = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (q, k, v, g, beta))
    memory, o = jax.lax.scan(step, memory, tokens)
    return jnp.swapaxes(o, 0, 1), memory


def chunked_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H Z"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    memory: Float[Array, "B H K Z"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H Z"], Float[Array, "B H K Z"]]:
    """`recurrent_rule` with matmuls: tokens of a chunk in parallel, chunks one after the other.

    Math:    with G the running sum of g in a chunk and S the memory before it,
             (I + A) U = diag(beta) (V - e^G K S),   A_ti = beta_t e^(G_t - G_i) k_t.k_i for i < t,
             o_t = e^G_t S' q_t + sum_{i <= t} e^(G_t - G_i) (q_t.k_i) u_i,
             S <- e^G_last S + sum_i e^(G_last - G_i) k_i u_i'.
    Source:  arXiv 2412.06464, section 3.3 (the extended WY representation).
    """
    B, T, H, _ = q.shape
    # Few lengths: with another one float32 sums round differently, and padding would show more.
    C = min(chunk, max(16, 1 << (T - 1).bit_length()))
    N = -(-T // C)

    def chunks(
        x: Array,
    ) -> Array:  # (B, T, H, ...) -> (N, B, H, C, ...); a step of zeros does nothing
        x = jnp.pad(x, [(0, 0), (0, N * C - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, N, C, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g, beta))
    decay, grown = _decays(g)
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    beta = beta[..., None]
    strict = jnp.tril(jnp.ones((C, C), jnp.float32), -1).reshape((1,) * 3 + (C, C))
    system = strict * beta * decay * product("nbhtk,nbhik->nbhti", k, k)
    # Not by powers of A: they grow binomially where keys repeat, and cancel.
    sides = jnp.concatenate([beta * v, beta * grown[..., None] * k], axis=-1)
    solved = jax.lax.linalg.triangular_solve(
        system, sides, left_side=True, lower=True, unit_diagonal=True
    )
    own, carried = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    within = decay * product("nbhtk,nbhik->nbhti", q, k)
    to_end = decay[..., -1, :, None] * k  # k_i e^(G_last - G_i)

    def step(S: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        own, carried, within, to_end, q, grown = xs
        u = own - product("bhtk,bhkz->bhtz", carried, S)
        o = product("bhtk,bhkz->bhtz", q * grown[..., None], S)
        o = o + product("bhti,bhiz->bhtz", within, u)
        S = S * grown[..., -1, None, None] + product("bhik,bhiz->bhkz", to_end, u)
        return S, o

    memory, o = jax.lax.scan(step, memory, (own, carried, within, to_end, q, grown))
    return jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, N * C, H, -1)[:, :T], memory


def _decays(g: Float[Array, "N B H C"]) -> tuple[Array, Array]:
    """e^(G_t - G_i) for i <= t, else 0: (N, B, H, C, C); and e^G (N, B, H, C).

    Each difference is summed up on its own: that of two running sums loses its digits after a
    strong decay, and overflows for i > t.
    """
    C = g.shape[-1]
    later = jnp.tril(jnp.ones((C, C), bool), -1).reshape((1,) * 3 + (C, C))
    between = jnp.cumsum(jnp.where(later, g[..., None], jnp.float32(0)), axis=-2)
    seen = jnp.tril(jnp.ones((C, C), jnp.float32)).reshape((1,) * 3 + (C, C))
    return seen * jnp.exp(between), jnp.exp(jnp.cumsum(g, axis=-1))
