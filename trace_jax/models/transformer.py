"""The decoder in Flax NNX: Qwen3-MoE, Qwen3, Llama, Qwen3-Next and Qwen3.5-MoE by their fields.

The modules hold parameters and the mathematics that both sides share. What differs between trainer
and sampler is passed in: `mix` decides what becomes of K and V (fake-quantised, or written to an
FP4 cache) or of the state of Gated DeltaNet, `feed` how experts and MLPs multiply. So the places
where FP4 enters are visible. Parameters are used as a pytree: `init` returns one, `layer_view`
looks at one layer of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from trace_jax import config as cfg
from trace_jax import layer_kinds
from trace_jax.checks import require
from trace_jax.layer_kinds import Kind
from trace_jax.models import attention, moe
from trace_jax.models.gated_delta import GatedDelta
from trace_jax.rl import replay
from trace_jax.types import Params

# Both return what they computed and anything to hand back.
# Full attention: (q, k, v) after norm and RoPE -> (B,T,H,K). Linear: (module, x_BTD) -> (B,T,D).
Mix = Callable[..., tuple[Array, Any]]
# Experts: (module, x_BTD, routes_BTX, gates_BTX) -> (B,T,D). Dense: (module, x_BTD) -> (B,T,D).
Feed = Callable[..., tuple[Array, Any]]


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    return nnx.Param(
        jax.random.normal(rngs.params(), shape, jnp.float32) * jnp.float32(fan_in**-0.5)
    )


class Attention(nnx.Module):
    """Projections of grouped-query attention; weights are (in, out)."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        D, H, J, K = model.width, model.heads, model.kv_heads, model.head_dim
        self.model = model
        self.q = _normal(rngs, (D, H * K * (2 if model.gated_attention else 1)), D)
        self.k = _normal(rngs, (D, J * K), D)
        self.v = _normal(rngs, (D, J * K), D)
        self.o = _normal(rngs, (H * K, D), H * K * 2 * model.layers)
        if model.qk_norm:
            self.q_norm = nnx.Param(_neutral(model, K))
            self.k_norm = nnx.Param(_neutral(model, K))

    def qkv(self, x_BTD: Array, position_BT: Array) -> tuple[Array, Array, Array, Array | None]:
        """q (B,T,H,K), k and v (B,T,J,K), and the output's gate (B,T,H,K) if there is one.

        q and k are normalised per head, then rotated.
        """
        m, dtype = self.model, x_BTD.dtype

        def heads(w: nnx.Param, n: int) -> Array:
            return (x_BTD @ w[...].astype(dtype)).reshape(*x_BTD.shape[:2], n, -1)

        q, k, v = heads(self.q, m.heads), heads(self.k, m.kv_heads), heads(self.v, m.kv_heads)
        q, gate = jnp.split(q, 2, axis=-1) if m.gated_attention else (q, None)
        if m.qk_norm:
            q, k = norm(m, q, self.q_norm[...]), norm(m, k, self.k_norm[...])
        turn = attention.rotary(m, position_BT)
        return turn(q), turn(k), v, gate

    def output(self, a_BTHK: Array, gate_BTHK: Array | None) -> Array:
        """Back to the residual stream."""
        if gate_BTHK is not None:
            gate = jax.nn.sigmoid(gate_BTHK.astype(jnp.float32))
            a_BTHK = (a_BTHK.astype(jnp.float32) * gate).astype(a_BTHK.dtype)
        return a_BTHK.reshape(*a_BTHK.shape[:2], -1) @ self.o[...].astype(a_BTHK.dtype)


class MoE(nnx.Module):
    """Router, experts and shared expert; matrices are (..., out, in), gate rows before up rows."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        D, E, F, S = model.width, model.experts, model.expert_ffn, model.shared_ffn
        self.router = _normal(rngs, (D, E), D)
        self.gate_up = _normal(rngs, (E, 2 * F, D), D)
        self.down = _normal(rngs, (E, D, F), F * 2 * model.layers)
        if S:
            self.shared_gate_up = _normal(rngs, (2 * S, D), D)
            self.shared_down = _normal(rngs, (D, S), S * 2 * model.layers)
            self.shared_gate = _normal(rngs, (D,), D)

    def router_logits(self, x_BTD: Array) -> Float[Array, "B T E"]:
        """Router scores in float32."""
        return x_BTD.astype(jnp.float32) @ self.router[...]

    def shared(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The shared expert times the sigmoid of its gate; stays in the compute dtype."""
        dtype = x_BTD.dtype
        hidden = moe.swiglu(x_BTD @ self.shared_gate_up[...].T.astype(dtype))
        y_BTD = hidden @ self.shared_down[...].T.astype(dtype)
        gate = x_BTD.astype(jnp.float32) @ self.shared_gate[...].astype(jnp.float32)
        return y_BTD * jax.nn.sigmoid(gate)[..., None].astype(dtype)


class Mlp(nnx.Module):
    """A dense SwiGLU MLP; matrices are (out, in), gate rows before up rows."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        D, F = model.width, model.dense_ffn
        self.gate_up = _normal(rngs, (2 * F, D), D)
        self.down = _normal(rngs, (D, F), F * 2 * model.layers)


_COMPONENTS = {"attention": Attention, "linear": GatedDelta, "moe": MoE, "mlp": Mlp}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What a layer hands back beside x."""

    router_logits: Array | None  # (B, T, E) float32; None of a dense layer
    routes: Array | None  # (B, T, X); None of a dense layer
    mix: Any
    feed: Any


class Block(nnx.Module):
    """One decoder layer of a kind; it has two of the components below."""

    attention: Attention
    linear: GatedDelta
    moe: MoE
    mlp: Mlp

    def __init__(self, model: cfg.Model, kind: Kind, rngs: nnx.Rngs):
        self.model = model
        for name in (kind.mixer, kind.ffn):
            setattr(self, name, _COMPONENTS[name](model, rngs))
        self.mixer_norm = nnx.Param(_neutral(model, model.width))
        self.ffn_norm = nnx.Param(_neutral(model, model.width))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        position_BT: Int[Array, "B T"],
        mix: Mix,
        feed: Feed,
        routes_BTX: Int[Array, "B T X"] | None = None,
    ) -> tuple[Array, Kept]:
        """Returns x after the layer, and what it hands back.

        Args: routes_BTX: experts to use (routing replay); None: the router's own top-k.
        """
        h = norm(self.model, x_BTD, self.mixer_norm[...])
        if hasattr(self, "attention"):
            q, k, v, gate = self.attention.qkv(h, position_BT)
            a_BTHK, kept_mix = mix(q, k, v)
            x_BTD = x_BTD + self.attention.output(a_BTHK, gate)
        else:
            y_BTD, kept_mix = mix(self.linear, h)
            x_BTD = x_BTD + y_BTD
        h = norm(self.model, x_BTD, self.ffn_norm[...])
        if hasattr(self, "mlp"):
            y_BTD, kept_feed = feed(self.mlp, h)
            return x_BTD + y_BTD, Kept(
                router_logits=None, routes=None, mix=kept_mix, feed=kept_feed
            )
        logits = self.moe.router_logits(h)
        renormalise = self.model.renormalise_gates
        if routes_BTX is None:
            k = self.model.experts_per_token
            routes_BTX, gates = replay.top_k_routes(logits, k, renormalise=renormalise)
        else:
            gates = replay.replayed_gates(logits, routes_BTX, renormalise=renormalise)
        y_BTD, kept_feed = feed(self.moe, h, routes_BTX, gates)
        if self.model.shared_ffn:
            y_BTD = y_BTD + self.moe.shared(h)
        kept = Kept(router_logits=logits, routes=routes_BTX, mix=kept_mix, feed=kept_feed)
        return x_BTD + y_BTD, kept


class Layers(nnx.Module):
    """Components stacked over the layers that have them, norms over all layers."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        stream = rngs.split(model.layers)
        for name, component in _COMPONENTS.items():
            ids = layer_kinds.layers_with(model, name)
            if len(ids) == model.layers:  # one stream through all components of a layer
                setattr(self, name, _stacked(component, model)(stream))
            elif ids:
                setattr(self, name, _stacked(component, model)(rngs.split(len(ids))))
        shape = (model.layers, model.width)
        self.mixer_norm = nnx.Param(_neutral(model, *shape))
        self.ffn_norm = nnx.Param(_neutral(model, *shape))


def _stacked(component: Any, model: cfg.Model) -> Callable[[nnx.Rngs], Any]:
    return nnx.vmap(lambda rngs: component(model, rngs), in_axes=0, out_axes=0)


def _neutral(model: cfg.Model, *shape: int) -> Array:
    """Norm weights that multiply by one."""
    return jnp.zeros(shape) if model.zero_centred_norm else jnp.ones(shape)


class Transformer(nnx.Module):
    """Embedding, stacked layers, final norm and head."""

    def __init__(self, model: cfg.Model, vocab_size: int, rngs: nnx.Rngs):
        self.model = model
        embed = jax.random.normal(rngs.params(), (vocab_size, model.width)) * jnp.float32(0.02)
        self.embed = nnx.Param(embed)
        self.layers = Layers(model, rngs)
        self.final_norm = nnx.Param(_neutral(model, model.width))
        self.head = (
            None if model.tie_embeddings else _normal(rngs, (vocab_size, model.width), model.width)
        )


def init(model: cfg.Model, vocab_size: int, key: jax.Array) -> Params:
    """Random float32 parameters as a nested dict; see `layer_kinds` for the stacks of layers.

    Raises: ValueError if the model has another vocabulary size.
    """
    size = model.vocab_size or vocab_size
    fix = "the tokenizer and the model belong together; a checkpoint may pad its vocabulary"
    require(vocab_size <= size, "config.model.vocab_size", size, f">= {vocab_size}, the ids", fix)

    @jax.jit  # one program: compiled piece by piece it takes ten times as long
    def build(key: jax.Array) -> Params:
        state = nnx.state(Transformer(model, size, nnx.Rngs(params=key)), nnx.Param)
        return nnx.to_pure_dict(state)

    return build(key)


def make_layer_view(model: cfg.Model) -> Callable[[Kind, Params], Block]:
    """A function from a kind and one layer's parameters to the module that computes with them.

    The parameters are those of `Block`: one dict for each component, and the two norms. A parameter
    may be any pytree where the sampler keeps something else than an array (packed FP4).
    """
    shells = {}
    for kind in set(layer_kinds.kinds(model)):
        shell = nnx.eval_shape(lambda kind=kind: Block(model, kind, nnx.Rngs(0)))
        graph, state = nnx.split(shell, nnx.Param)
        shells[kind] = (graph, tuple(nnx.to_flat_state(state)))

    def view(kind: Kind, layer: Params) -> Block:
        graph, variables = shells[kind]
        filled = []
        for path, variable in variables:
            value: Any = layer
            for name in path:
                value = value[name]
            filled.append((path, variable.replace(value)))
        return nnx.merge(graph, nnx.from_flat_state(filled))

    return view


def norm(model: cfg.Model, x: Float[Array, "*A D"], weight_D: Float[Array, " D"]) -> Array:
    """The model's RMSNorm."""
    return attention.rms_norm(x, weight_D, model.norm_eps, zero_centred=model.zero_centred_norm)


def embed_tokens(params: Params, tokens_BT: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Token embeddings in the compute dtype; gradients add up in the dtype of the parameter."""
    return params["embed"][tokens_BT].astype(dtype)


def head_logits(
    model: cfg.Model, params: Params, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Logits: final norm, then the head (or transposed embedding), accumulated in float32."""
    x = final_norm(model, params, x_BTD)
    weight = head(params).astype(x.dtype).astype(jnp.float32)
    return x.astype(jnp.float32) @ weight.T


def final_norm(
    model: cfg.Model, params: Params, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """What the head multiplies."""
    return norm(model, x_BTD, params["final_norm"])


def head(params: Params) -> Float[Array, "V D"]:
    """The output matrix: the head, or the embedding where they are tied."""
    return params["head"] if "head" in params else params["embed"]
