"""The plain model as one program: no quantisation, no cache, no records.

What a checkpoint computes, for parity tests, inspection and calibration. The trainer's forward is
`policy.py`, the sampler's `rollout/jax_engine.py`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax import config as cfg
from trace_jax import layer_kinds, stacks
from trace_jax.checks import require
from trace_jax.layer_kinds import Kind
from trace_jax.models import attention, moe, transformer
from trace_jax.models.grouped_matmul import Dispatch, gather_rows, grouped_matmul
from trace_jax.types import Params

AnyArray = Array | np.ndarray


def logits(
    model: cfg.Model,
    params: Params,
    tokens_BT: Int[AnyArray, "B T"],
    valid_BT: Bool[AnyArray, "B T"] | None = None,
    routes_LBTX: Int[AnyArray, "Lm B T X"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits of every position, float32; those of invalid tokens mean nothing.

    Args: valid_BT: False is padding, left or right: it takes no position, is attended by nobody
          and changes no logits of valid tokens. None: every token is valid.
          routes_LBTX: experts to use instead of the router's choice, one row an MoE layer.
    Raises: ValueError for tokens that are no (B, T) integers, or ids that have no embedding.
    """
    shape, dtype = np.shape(tokens_BT), getattr(tokens_BT, "dtype", None)
    good = len(shape) == 2 and dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    got, need = f"shape {shape} of {dtype}", "an array (B, T) of integers"
    require(good, "logits: tokens_BT", got, need, "jnp.asarray([[1, 2, 3]])")
    if not isinstance(tokens_BT, jax.core.Tracer):  # a gather clamps ids out of range
        low, high = (int(f(tokens_BT)) if tokens_BT.size else 0 for f in (np.min, np.max))
        rows = int(params["embed"].shape[0])
        got, need = f"ids {low}..{high}", f"0..{rows - 1}: the rows of the embedding"
        require(low >= 0 and high < rows, "logits: tokens_BT", got, need)
    valid_BT = jnp.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
    return _logits(model, params, tokens_BT, valid_BT, routes_LBTX)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """What a layer is to `stacks`: nothing but its kind."""

    kind: Kind


@partial(jax.jit, static_argnames=("model",))
def _logits(
    model: cfg.Model, params: Params, tokens_BT: Array, valid_BT: Array, routes_LBTX: Array | None
) -> Array:
    inputs = {"routes": (layer_kinds.layers_with(model, "moe"), routes_LBTX)}
    inputs = {} if routes_LBTX is None else inputs

    def feed(module: Any, x_BTD: Array, routes: Array | None, gates: Array | None, _: Any) -> Any:
        return plain_feed(model, module, x_BTD, routes, gates), {}

    return observe(model, params, tokens_BT, valid_BT, feed, inputs)[0]


def observe(
    model: cfg.Model,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    valid_BT: Bool[Array, "B T"],
    feed: Callable[..., tuple[Array, dict[str, Any]]],
    inputs: dict[str, stacks.Rows] | None = None,
) -> tuple[Float[Array, "B T V"], dict[str, stacks.Rows]]:
    """Logits, and what `feed` hands back of each layer, by name; to be traced under jit.

    Args: feed: (module, x_BTD, routes_BTX, gates_BTX, inputs of the layer) -> (y_BTD, outputs);
          routes are -1 where a token is invalid, both None of a dense layer. inputs: rows that
          layers get (`stacks.scan`); "routes" replace the router's choice.
    """
    view = transformer.make_layer_view(model)
    position_BT = jnp.maximum(jnp.cumsum(valid_BT, axis=1) - 1, 0)
    T = tokens_BT.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    visible_BTT = causal & valid_BT[:, None, :]

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
        return attention.attend(q, k, v, visible_BTT), None

    def mix_linear(module: Any, x_BTD: Array) -> tuple[Array, None]:
        return module(x_BTD, None, valid_BT)[0], None

    def body(x_BTD: Array, what: _Layer, layer: Params, here: dict[str, Any]) -> Any:
        def fed(module: Any, x_BTD: Array, routes: Any = None, gates: Any = None) -> Any:
            if routes is not None:
                routes = jnp.where(valid_BT[..., None], routes, -1)
            return feed(module, x_BTD, routes, gates, here)

        mix = attend if what.kind.mixer == "attention" else mix_linear
        block = view(what.kind, layer)
        x_BTD, kept = block(x_BTD, position_BT, mix, fed, here.get("routes"))
        return x_BTD, kept.feed

    every, parts = [_Layer(kind=kind) for kind in layer_kinds.kinds(model)], []
    x_BTD = transformer.embed_tokens(params, tokens_BT, jnp.dtype(model.compute_dtype))
    for segment in stacks.segments(every, model.full_attention_every):
        rows = stacks.cut(model, segment, params["layers"])
        x_BTD, outputs = stacks.scan(segment, body, x_BTD, rows, inputs)
        parts.append(outputs)
    return transformer.head_logits(model, params, x_BTD), stacks.join(parts)


def plain_feed(
    model: cfg.Model, module: Any, x_BTD: Array, routes: Array | None, gates: Array | None
) -> Float[Array, "B T D"]:
    """Experts or dense MLP, as the module is; routes and gates are None for a dense one."""
    if routes is None or gates is None:
        return plain_mlp(module, x_BTD)[0]
    return plain_experts(model, module, x_BTD, routes, gates)


def plain_experts(
    model: cfg.Model,
    module: Any,
    x_BTD: Array,
    routes_BTX: Array,
    gates_BTX: Array,
    look: Callable[[Array, Dispatch], None] | None = None,
) -> Float[Array, "B T D"]:
    """The routed experts in the compute dtype; route -1 drops a pair.

    Args: look: is shown the inputs of `down`, as (N, b, F) rows of the blocked layout.
    """
    dtype = x_BTD.dtype
    w_gate_up, w_down = module.gate_up[...].astype(dtype), module.down[...].astype(dtype)
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])

    def down(h_NbF: Array, d: Dispatch) -> Array:
        if look is not None:
            look(h_NbF, d)
        return grouped_matmul(h_NbF, w_down, d)

    def gate_up(d: Dispatch) -> Array:
        return grouped_matmul(gather_rows(x_MD, d), w_gate_up, d)

    return moe.expert_mlp(routes_BTX, gates_BTX, model.experts, gate_up, down)


def plain_mlp(
    module: Any, x_BTD: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T F"]]:
    """A dense MLP in the compute dtype: its output, and the input of `down`."""
    dtype = x_BTD.dtype
    hidden = moe.swiglu(x_BTD @ module.gate_up[...].T.astype(dtype))
    return hidden @ module.down[...].T.astype(dtype), hidden
