"""The embedded rollout engine: FP4 prefill and decode under one jit, returning trajectories.

    prefill (P prompts)  ->  cache grown to P*G sequences  ->  decode until all have stopped

Right padding: slot c of a sequence is its position c, so padding never shifts a rotary angle.
Lengths and batch sizes are padded to buckets, so they never recompile. Each sequence has its own
random key and its own rows everywhere; finished and padding rows reach no expert. The
log-probability of a token is log softmax(logits / temperature) over the full vocabulary, in
float32, of the policy that sampled.
"""

import collections
import dataclasses
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.guidance import codec
from trace_jax.guidance.record import GuidanceSpec, SiteRecord
from trace_jax.models import attention, kv_cache, moe, transformer
from trace_jax.qat import plan as qat_plan
from trace_jax.rollout import native, unpad
from trace_jax.types import Prompt, Trajectory
from trace_jax.weight_sync import SamplerWeights

Generate = Callable[[SamplerWeights, Sequence[Prompt], int, jax.Array], list[Trajectory]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """State of the decode loop."""

    step: Int[Array, ""]  # tokens sampled so far
    tokens_BR: Int[Array, "B R"]
    logprobs_BR: Float[Array, "B R"]
    length_B: Int[Array, " B"]  # response tokens, the stop token included
    done_B: Bool[Array, " B"]  # sampled a stop token, or padding row
    token_B: Int[Array, " B"]  # sampled last, not processed yet
    caches: tuple[Any, ...]  # per segment, leaves (L, B, C, J, ...)
    routes: tuple[Array, ...]  # per segment (L, B, R, X); row r: the processing of token r
    records: tuple[Any, ...]  # per segment, leaves (L, B, R, ...)


def make_generate(
    model: cfg.Model,
    quant: cfg.Quant,
    rollout: cfg.Rollout,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Generate:
    """Builds `generate(weights, prompts, samples, key) -> trajectories` (prompt-major order).

    Raises: ValueError for top-p or top-k: a truncated distribution has other log-probabilities.
    """
    require(
        rollout.top_p is None and rollout.top_k is None,
        "rollout: top_p, top_k",
        (rollout.top_p, rollout.top_k),
        "none",
        "sample from the full distribution; the log-probabilities are of that distribution",
    )
    core = _Core(model, quant, rollout, tuple(stop_ids), pad_id)
    sample = jax.jit(core.sample, static_argnames=("samples",))

    def generate(
        weights: SamplerWeights, prompts: Sequence[Prompt], samples: int, key: jax.Array
    ) -> list[Trajectory]:
        tokens_PT, length_P = unpad.pad_prompts(prompts, samples, rollout, pad_id)
        seeds = prompt_seeds(prompts)
        seeds += [0] * (len(length_P) - len(prompts))
        seed_P = np.array(seeds, np.uint32)
        sampled = sample(weights.params, tokens_PT, length_P, seed_P, key, samples=samples)
        return unpad.trajectories(
            prompts, samples, jax.device_get(sampled), core.spec, weights.version
        )

    return generate


@dataclasses.dataclass(frozen=True)
class _Core:
    """The traced part of the engine with its static choices."""

    model: cfg.Model
    quant: cfg.Quant
    rollout: cfg.Rollout
    stop_ids: tuple[int, ...]
    pad_id: int

    @property
    def segments(self) -> tuple[qat_plan.Segment, ...]:
        return qat_plan.side_segments(self.quant, self.model.layers, self.quant.rollout)

    @property
    def spec(self) -> GuidanceSpec | None:
        return qat_plan.guidance_spec(self.quant, self.model.layers)

    def sample(self, params, tokens_PT, length_P, seed_P, key, *, samples: int) -> unpad.Sampled:
        """Prefill and decode."""
        T, R = tokens_PT.shape[1], self.rollout.max_new_tokens
        keys_B = sequence_keys(key, seed_P, samples)
        caches, routes, records, logits_PV = self.prefill(params, tokens_PT, length_P)
        length_B = jnp.repeat(length_P, samples)
        idle_B = length_B == 0
        first = self.draw(jnp.repeat(logits_PV, samples, axis=0), keys_B, jnp.int32(0))
        caches = tuple(kv_cache.extend(cache, T + R, samples) for cache in caches)
        state = self.start(caches, records, first, idle_B)

        def body(state: Decoded) -> Decoded:
            return self.decode_step(params, state, length_B, keys_B)

        def unfinished(state: Decoded) -> Array:
            return (state.step < R) & ~jnp.all(state.done_B)

        state = jax.lax.while_loop(unfinished, body, state)
        return unpad.Sampled(
            steps=state.step,
            tokens_BR=state.tokens_BR,
            logprobs_BR=state.logprobs_BR,
            length_B=state.length_B,
            done_B=state.done_B,
            prompt_routes=routes,
            response_routes=state.routes,
            prompt_records=records,
            response_records=state.records,
            kv_records=self.kv_records(state.caches),
        )

    def kv_records(self, caches: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of the caches what guidance keeps; the rest never leaves the device."""
        out = []
        for segment, cache in zip(self.segments, caches, strict=True):
            format, kept = segment.plan.kv, segment.plan.recorded
            if self.spec is None or format is None:
                out.append({})
                continue
            named = {name: cache[name] for name in ("k", "v") if name in kept}
            out.append(kv_cache.record(named, format, self.spec.coding))
        return tuple(out)

    def start(self, caches, records, first, idle_B) -> Decoded:
        """State after the first token was sampled from the prompt's logits."""
        R, X = self.rollout.max_new_tokens, self.model.experts_per_token
        token_B, logprob_B = first
        B = len(token_B)

        def empty(leaf: Array) -> Array:
            return jnp.zeros((leaf.shape[0], B, R, *leaf.shape[3:]), leaf.dtype)

        tokens_BR = jnp.full((B, R), self.pad_id, jnp.int32).at[:, 0].set(token_B)
        return Decoded(
            step=jnp.int32(1),
            tokens_BR=tokens_BR,
            logprobs_BR=jnp.zeros((B, R), jnp.float32).at[:, 0].set(logprob_B),
            length_B=jnp.where(idle_B, 0, 1),
            done_B=idle_B | self.stops(token_B),
            token_B=token_B,
            caches=caches,
            routes=tuple(
                jnp.full((s.stop - s.start, B, R, X), -1, jnp.int32) for s in self.segments
            ),
            records=tuple(jax.tree.map(empty, r) for r in records),
        )

    def stops(self, token_B: Array) -> Array:
        """True where the token ends the answer."""
        return jnp.any(token_B[:, None] == jnp.asarray(self.stop_ids, jnp.int32)[None, :], axis=1)

    def draw(self, logits_BV, keys_B, step) -> tuple[Array, Array]:
        """Samples one token per row with the row's own key; returns (ids, log-probs in nats)."""
        scaled = logits_BV / jnp.float32(self.rollout.temperature)
        keys = jax.vmap(lambda k: jax.random.fold_in(k, step))(keys_B)
        token_B = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
        chosen = jnp.take_along_axis(scaled, token_B[:, None], axis=1)[:, 0]
        return token_B, chosen - jax.nn.logsumexp(scaled, axis=1)

    def prefill(self, params, tokens_PT, length_P):
        """All prompt tokens at once; returns caches, routes, records and the last logits."""
        P, T = tokens_PT.shape
        valid_PT = jnp.arange(T)[None, :] < length_P[:, None]
        position_PT = jnp.broadcast_to(jnp.arange(T), (P, T))
        visible = jnp.broadcast_to(jnp.tril(jnp.ones((1, T, T), bool)), (P, T, T))
        view = transformer.make_layer_view(self.model)
        x = transformer.embed_tokens(params, tokens_PT, jnp.dtype(self.model.compute_dtype))
        caches, routes, records = [], [], []
        for segment, stack in zip(self.segments, params["segments"], strict=True):
            format = segment.plan.kv

            def attend(q, k, v, format=format):
                stored = {"k": kv_cache.encode(k, format), "v": kv_cache.encode(v, format)}
                return attention.attend(q, *self.seen(stored, format, q.dtype), visible), stored

            def body(x, layer, segment=segment, attend=attend):
                experts = partial(self.experts, segment.plan, valid_PT)
                x, (_, ids, kept, record) = view(layer)(x, position_PT, attend, experts)
                return x, (kept, jnp.where(valid_PT[..., None], ids, -1), record)

            x, (cache, ids, record) = jax.lax.scan(body, x, stack)
            caches.append(cache)
            routes.append(ids)
            records.append(record)
        last = jnp.maximum(length_P - 1, 0)[:, None, None]
        x_P1D = jnp.take_along_axis(x, last, axis=1)
        logits = transformer.head_logits(params, x_P1D, self.model.norm_eps)[:, 0]
        return tuple(caches), tuple(routes), tuple(records), logits

    def decode_step(self, params, state: Decoded, prompt_B, keys_B) -> Decoded:
        """Processes the last sampled token of every unfinished row and samples the next one."""
        r, active_B = state.step - 1, ~state.done_B
        slot_B = prompt_B + r
        C = jax.tree.leaves(state.caches)[0].shape[2]
        visible = (jnp.arange(C)[None, :] <= slot_B[:, None])[:, None, :]
        view = transformer.make_layer_view(self.model)
        dtype = jnp.dtype(self.model.compute_dtype)
        x = transformer.embed_tokens(params, state.token_B[:, None], dtype)
        caches, routes, records = list(state.caches), list(state.routes), list(state.records)
        for i, (segment, stack) in enumerate(zip(self.segments, params["segments"], strict=True)):

            def body(carry, xs, format=segment.plan.kv, segment=segment):
                x, cache = carry
                layer, index = xs

                def attend(q, k, v):
                    new = {"k": kv_cache.encode(k, format), "v": kv_cache.encode(v, format)}
                    grown = kv_cache.write(cache, index, slot_B, new)
                    seen = self.seen(kv_cache.read(grown, index), format, q.dtype)
                    return attention.attend(q, *seen, visible), grown

                experts = partial(self.experts, segment.plan, active_B[:, None])
                x, (_, ids, cache, record) = view(layer)(x, slot_B[:, None], attend, experts)
                return (x, cache), (jnp.where(active_B[:, None, None], ids, -1), record)

            indices = jnp.arange(segment.stop - segment.start)
            (x, caches[i]), (ids, record) = jax.lax.scan(body, (x, caches[i]), (stack, indices))
            routes[i] = put(routes[i], ids, r, axis=2)
            records[i] = jax.tree.map(partial(put, at=r, axis=2), records[i], record)
        logits = transformer.head_logits(params, x, self.model.norm_eps)[:, 0]
        token_B, logprob_B = self.draw(logits, keys_B, state.step)
        token_B = jnp.where(active_B, token_B, self.pad_id)
        logprob_B = jnp.where(active_B, logprob_B, 0)
        return Decoded(
            step=state.step + 1,
            tokens_BR=put(state.tokens_BR, token_B[:, None], state.step, axis=1),
            logprobs_BR=put(state.logprobs_BR, logprob_B[:, None], state.step, axis=1),
            length_B=state.length_B + active_B.astype(jnp.int32),
            done_B=state.done_B | self.stops(token_B),
            token_B=token_B,
            caches=tuple(caches),
            routes=tuple(routes),
            records=tuple(records),
        )

    def seen(self, stored: Any, format: Format | None, dtype: Any) -> tuple[Array, Array]:
        """K and V as attention reads them back from the cache."""
        width = self.model.head_dim
        k, v = (kv_cache.decode(stored[name], format, width, dtype) for name in ("k", "v"))
        return k, v

    def experts(self, plan: qat_plan.LayerPlan, valid_BT, params, x_BTD, routes, gates):
        """The routed experts in native FP4, and the record of their input where it is kept."""
        B, T, D = x_BTD.shape
        routes = jnp.where(valid_BT[..., None], routes, -1)
        x_MD, layout = x_BTD.reshape(B * T, D), {}
        projections = native.Projections(plan.weights, plan.acts, params)

        def down(h, d):
            layout["dispatch"] = d
            return projections.down(h, d)

        gate_up = partial(projections.gate_up, x_MD)
        y = moe.expert_mlp(routes, gates, self.model.experts, gate_up, down)
        records: dict[str, SiteRecord] = {}
        spec, kept = self.spec, projections.kept
        if spec is None or plan.acts is None:
            return y, records
        if "expert_hidden" in plan.recorded:
            hidden = native.to_pairs(kept["expert_hidden"], layout["dispatch"])
            kept["expert_hidden"] = jax.tree.map(lambda a: a.reshape(B, T, *a.shape[1:]), hidden)
        kept["expert_in"] = jax.tree.map(lambda a: a.reshape(B, T, -1), kept["expert_in"])
        for name in ("expert_in", "expert_hidden"):
            if name in plan.recorded:
                records[name] = codec.encode(*kept[name], format=plan.acts, coding=spec.coding)
        return y, records


def put(buffer: Array, new: Array, at: Array, *, axis: int) -> Array:
    """`buffer` with `new` written from index `at` of `axis` on."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, new, at, axis)


def prompt_seeds(prompts: Sequence[Prompt]) -> list[int]:
    """A seed per prompt from its uid; a prompt that stands there again gets another one."""
    seen: collections.Counter[str] = collections.Counter()
    seeds = []
    for prompt in prompts:
        again = seen[prompt.uid]
        seen[prompt.uid] += 1
        name = f"{prompt.uid}#{again}" if again else prompt.uid
        seeds.append(zlib.crc32(name.encode()))
    return seeds


def sequence_keys(key: jax.Array, seed_P: UInt32[Array, " P"], samples: int) -> jax.Array:
    """One key per sequence, from the prompt's own seed and sample number: never from the batch."""

    def one(seed: Array) -> jax.Array:
        prompt_key = jax.random.fold_in(key, seed)
        return jax.vmap(lambda g: jax.random.fold_in(prompt_key, g))(jnp.arange(samples))

    return jax.vmap(one)(seed_P).reshape(-1)
