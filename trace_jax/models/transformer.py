"""Qwen3-MoE in Flax NNX: GQA with QK-norm and RoPE, RMSNorm, SwiGLU experts, renormalised top-k.

The modules hold parameters and the mathematics that both sides share. What differs between trainer
and sampler is passed in: `attend` decides what becomes of K and V (fake-quantised, or written to an
FP4 cache), `experts` how the routed experts multiply. So the places where FP4 enters are visible.
Parameters are used as a pytree: `init` returns one, `layer_view` looks at one scanned layer of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from trace_jax import config as cfg
from trace_jax.models import attention
from trace_jax.rl import replay
from trace_jax.types import Params

# (q, k, v) after norm and RoPE -> (attention output (B,T,H,K), anything to hand back)
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
# (moe parameters, x_BTD, routes_BTX, gates_BTX) -> (y_BTD, anything to hand back)
Experts = Callable[["MoE", Array, Array, Array], tuple[Array, Any]]


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    return nnx.Param(
        jax.random.normal(rngs.params(), shape, jnp.float32) * jnp.float32(fan_in**-0.5)
    )


class Attention(nnx.Module):
    """Projections of grouped-query attention; weights are (in, out)."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        D, H, J, K = model.width, model.heads, model.kv_heads, model.head_dim
        self.model = model
        self.q = _normal(rngs, (D, H * K), D)
        self.k = _normal(rngs, (D, J * K), D)
        self.v = _normal(rngs, (D, J * K), D)
        self.o = _normal(rngs, (H * K, D), H * K * 2 * model.layers)
        self.q_norm = nnx.Param(jnp.ones(K))
        self.k_norm = nnx.Param(jnp.ones(K))

    def qkv(self, x_BTD: Array, position_BT: Array) -> tuple[Array, Array, Array]:
        """q (B,T,H,K), k and v (B,T,J,K); q and k normalised per head, then rotated."""
        m, dtype = self.model, x_BTD.dtype

        def heads(w: nnx.Param, n: int) -> Array:
            return (x_BTD @ w[...].astype(dtype)).reshape(*x_BTD.shape[:2], n, m.head_dim)

        q = attention.rms_norm(heads(self.q, m.heads), self.q_norm[...], m.norm_eps)
        k = attention.rms_norm(heads(self.k, m.kv_heads), self.k_norm[...], m.norm_eps)
        q = attention.rope(q, position_BT, m.rope_theta)
        return q, attention.rope(k, position_BT, m.rope_theta), heads(self.v, m.kv_heads)

    def output(self, a_BTHK: Array) -> Array:
        """Back to the residual stream."""
        return a_BTHK.reshape(*a_BTHK.shape[:2], -1) @ self.o[...].astype(a_BTHK.dtype)


class MoE(nnx.Module):
    """Router and expert weights; expert weights are (E, out, in), gate rows before up rows."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        D, E, F = model.width, model.experts, model.expert_ffn
        self.router = _normal(rngs, (D, E), D)
        self.gate_up = _normal(rngs, (E, 2 * F, D), D)
        self.down = _normal(rngs, (E, D, F), F * 2 * model.layers)

    def router_logits(self, x_BTD: Array) -> Float[Array, "B T E"]:
        """Router scores in float32."""
        return x_BTD.astype(jnp.float32) @ self.router[...]


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        self.model = model
        self.attention = Attention(model, rngs)
        self.moe = MoE(model, rngs)
        self.attention_norm = nnx.Param(jnp.ones(model.width))
        self.moe_norm = nnx.Param(jnp.ones(model.width))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        position_BT: Int[Array, "B T"],
        attend: Attend,
        experts: Experts,
        routes_BTX: Int[Array, "B T X"] | None = None,
    ) -> tuple[Array, tuple[Array, Array, Any, Any]]:
        """Returns x after the layer and (router logits, routes, attend's and experts' hand-backs).

        Args: routes_BTX: experts to use (routing replay); None: the router's own top-k.
        """
        h = attention.rms_norm(x_BTD, self.attention_norm[...], self.model.norm_eps)
        a_BTHK, kept_attend = attend(*self.attention.qkv(h, position_BT))
        x_BTD = x_BTD + self.attention.output(a_BTHK)
        h = attention.rms_norm(x_BTD, self.moe_norm[...], self.model.norm_eps)
        logits = self.moe.router_logits(h)
        if routes_BTX is None:
            routes_BTX, gates = replay.top_k_routes(logits, self.model.experts_per_token)
        else:
            gates = replay.replayed_gates(logits, routes_BTX)
        y_BTD, kept_experts = experts(self.moe, h, routes_BTX, gates)
        return x_BTD + y_BTD, (logits, routes_BTX, kept_attend, kept_experts)


class Transformer(nnx.Module):
    """Embedding, stacked layers, final norm and head."""

    def __init__(self, model: cfg.Model, vocab_size: int, rngs: nnx.Rngs):
        self.model = model
        embed = jax.random.normal(rngs.params(), (vocab_size, model.width)) * jnp.float32(0.02)
        self.embed = nnx.Param(embed)
        stack = nnx.vmap(lambda r: Block(model, r), in_axes=0, out_axes=0)
        self.layers = stack(rngs.split(model.layers))
        self.final_norm = nnx.Param(jnp.ones(model.width))
        self.head = (
            None if model.tie_embeddings else _normal(rngs, (vocab_size, model.width), model.width)
        )


def init(model: cfg.Model, vocab_size: int, key: jax.Array) -> Params:
    """Random float32 parameters as a nested dict; layer leaves have a leading layer axis."""

    @jax.jit  # one program: compiled piece by piece it takes ten times as long
    def build(key: jax.Array) -> Params:
        state = nnx.state(Transformer(model, vocab_size, nnx.Rngs(params=key)), nnx.Param)
        return nnx.to_pure_dict(state)

    return build(key)


def make_layer_view(model: cfg.Model) -> Callable[[Params], Block]:
    """A function from one layer's parameters to the module that computes with them.

    A parameter may be any pytree where the sampler keeps something else than an array (packed FP4).
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(model, nnx.Rngs(0))), nnx.Param)
    variables = tuple(nnx.to_flat_state(state))

    def view(layer: Params) -> Block:
        filled = []
        for path, variable in variables:
            value: Any = layer
            for name in path:
                value = value[name]
            filled.append((path, variable.replace(value)))
        return nnx.merge(graph, nnx.from_flat_state(filled))

    return view


def embed_tokens(params: Params, tokens_BT: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Token embeddings in the compute dtype; gradients add up in the dtype of the parameter."""
    return params["embed"][tokens_BT].astype(dtype)


def head_logits(params: Params, x_BTD: Float[Array, "B T D"], eps: float) -> Float[Array, "B T V"]:
    """Logits: final norm, then the head (or transposed embedding), accumulated in float32."""
    x = attention.rms_norm(x_BTD, params["final_norm"], eps)
    weight = params["head"] if "head" in params else params["embed"]
    weight = weight.astype(x.dtype).astype(jnp.float32)
    return x.astype(jnp.float32) @ weight.T
