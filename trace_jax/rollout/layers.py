"""One layer of the sampler: attention over the FP4 cache, Gated DeltaNet's state, FP4 matmuls.

A cache of a segment is a dict by mixer, of those that its layers have: "attention" holds K and V
(`models/kv_cache.py`), "linear" the state {"conv", "memory"} of each sequence; leaves have a
leading axis of the segment's layers with that mixer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from trace_jax import config as cfg
from trace_jax.formats import Format
from trace_jax.guidance import codec
from trace_jax.guidance.record import GuidanceSpec, SiteRecord
from trace_jax.models import attention, kv_cache, moe
from trace_jax.models.grouped_matmul import Dispatch
from trace_jax.models.transformer import Feed, Mix
from trace_jax.qat.plan import LayerPlan
from trace_jax.rollout import native
from trace_jax.stacks import Segment

Cache = dict[str, Any]


def kv_plan(segment: Segment) -> LayerPlan | None:
    """The plan of a segment's layers with full attention; None: it has no such layer."""
    plans = {plan for plan in segment.period if plan.kind.mixer == "attention"}
    assert len({(plan.kv, plan.recorded) for plan in plans}) <= 1, plans
    return next(iter(plans), None)


def mixer_rows(segment: Segment) -> tuple[tuple[int, ...], Array]:
    """For each layer of a segment its row among the layers with the same mixer."""
    seen: dict[str, int] = {}
    rows = []
    for plan in segment.layers:
        rows.append(seen.get(plan.kind.mixer, 0))
        seen[plan.kind.mixer] = rows[-1] + 1
    return tuple(range(segment.start, segment.stop)), jnp.asarray(rows, jnp.int32)


def prefill_mix(model: cfg.Model, plan: LayerPlan, valid_PT: Bool[Array, "P T"]) -> Mix:
    """Mixes whole prompts, right-padded; hands back what the layer adds to the cache."""
    if plan.kind.mixer == "linear":
        return lambda module, x: module(x, None, valid_PT)
    P, T = valid_PT.shape
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((1, T, T), bool)), (P, T, T))

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        stored = _encode(k, v, plan.kv)
        return attention.attend(q, *_seen(model, stored, plan.kv, q.dtype), visible), stored

    return attend


def decode_mix(
    model: cfg.Model,
    plan: LayerPlan,
    cache: Cache,
    row: Int[Array, ""],
    slot_B: Int[Array, " B"],
    active_B: Bool[Array, " B"],
    impl: str = "xla",
) -> Mix:
    """Mixes one token a sequence; hands back the cache with it.

    Args: row: of the layer in the cache. slot_B: where the token stands. active_B: rows that are
          not active leave the state of Gated DeltaNet as it is; what they write into the KV cache
          nobody reads. impl: of attention over a quantised cache and the write to it.
    """
    mine = cache[plan.kind.mixer]

    def linear(module: Any, x: Array) -> tuple[Array, Cache]:
        y, state = module(x, kv_cache.read(mine, row), active_B[:, None])
        return y, {**cache, "linear": jax.tree.map(lambda c, n: c.at[row].set(n), mine, state)}

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
        if plan.kv is not None and impl != "xla":
            grown = kv_cache.write_by_kernel(mine, row, slot_B, k, v, plan.kv, impl)
        else:
            grown = kv_cache.write(mine, row, slot_B, _encode(k, v, plan.kv))
        out = kv_cache.attend(q, grown, row, slot_B + 1, plan.kv, impl)
        return out, {**cache, "attention": grown}

    return linear if plan.kind.mixer == "linear" else attend


def grow(cache: Cache, slots: int, samples: int) -> Cache:
    """From the cache of P prompts to that of P*samples sequences of `slots` tokens."""
    grown = dict(cache)
    if "attention" in cache:
        grown["attention"] = kv_cache.extend(cache["attention"], slots, samples)
    if "linear" in cache:
        repeat = partial(jnp.repeat, repeats=samples, axis=1)
        grown["linear"] = jax.tree.map(repeat, cache["linear"])
    return grown


def make_feed(
    model: cfg.Model,
    plan: LayerPlan,
    spec: GuidanceSpec | None,
    valid_BT: Bool[Array, "B T"],
    kernels: cfg.Kernels = cfg.XLA,
) -> Feed:
    """Experts or dense MLP in native FP4; hands back the records of their inputs that are kept."""

    def experts(params: Any, x_BTD: Array, routes: Array, gates: Array) -> tuple[Array, Any]:
        B, T, D = x_BTD.shape
        routes = jnp.where(valid_BT[..., None], routes, -1)
        x_MD, layout = x_BTD.reshape(B * T, D), {}
        projections = native.Projections(plan.weights, plan.acts, params, "expert", kernels)

        def down(h: Array, d: Dispatch) -> Array:
            layout["dispatch"] = d
            return projections.down(h, d)

        gate_up = partial(projections.gate_up, x_MD)
        y = moe.expert_mlp(routes, gates, model.experts, gate_up, down)
        kept = projections.kept
        if "expert_hidden" in kept and "expert_hidden" in plan.recorded:
            kept["expert_hidden"] = native.to_pairs(kept["expert_hidden"], layout["dispatch"])
        return y, _records(plan, spec, kept, (B, T))

    def mlp(params: Any, x_BTD: Array) -> tuple[Array, Any]:
        B, T, D = x_BTD.shape
        projections = native.Projections(plan.weights, plan.acts, params, "mlp", kernels)
        hidden = moe.swiglu(projections.gate_up(x_BTD.reshape(B * T, D), None))
        y = projections.down(hidden, None).reshape(B, T, D)
        return y, _records(plan, spec, projections.kept, (B, T))

    return experts if plan.kind.ffn == "moe" else mlp


def _records(
    plan: LayerPlan,
    spec: GuidanceSpec | None,
    kept: dict[str, native.Quantised],
    lead: tuple[int, int],
) -> dict[str, SiteRecord]:
    """Records (B, T, ...) of the sites that this layer's plan keeps."""
    records: dict[str, SiteRecord] = {}
    for site, rows in kept.items():
        if spec is not None and plan.acts is not None and site in plan.recorded:
            shaped = jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), rows)
            records[site] = codec.encode_packed(*shaped, format=plan.acts, coding=spec.coding)
    return records


def _encode(k: Array, v: Array, format: Format | None) -> dict[str, Any]:
    return {"k": kv_cache.encode(k, format), "v": kv_cache.encode(v, format)}


def _seen(model: cfg.Model, stored: Any, format: Format | None, dtype: Any) -> tuple[Array, Array]:
    """K and V as attention reads them back from the cache."""
    k, v = (kv_cache.decode(stored[n], format, model.head_dim, dtype) for n in ("k", "v"))
    return k, v
