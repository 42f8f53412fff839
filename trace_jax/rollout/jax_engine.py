"""The embedded rollout engine: FP4 prefill and decode under one jit, returning trajectories.

    prefill (P prompts)  ->  cache grown to P*G sequences  ->  decode until all have stopped

Right padding: slot c of a sequence is its position c, so padding never shifts a rotary angle, and
the state of Gated DeltaNet after prefill is that after a prompt's own last token.
Lengths and batch sizes are padded to buckets, so they never recompile. Each sequence has its own
random key and its own rows everywhere; finished and padding rows reach no expert. The
log-probability of a token is log softmax(logits / temperature) over the full vocabulary, in
float32, of the policy that sampled.
"""

import collections
import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.common.debug import checked
from trace_jax import config as cfg
from trace_jax import stacks
from trace_jax.checks import require
from trace_jax.guidance.record import GuidanceSpec
from trace_jax.models import kv_cache, transformer
from trace_jax.qat import plan as qat_plan
from trace_jax.rollout import layers, unpad
from trace_jax.types import Prompt, Trajectory
from trace_jax.weight_sync import SamplerWeights

# (logits_BV, keys_B, step) -> (ids_B, log-probs_B)
Draw = Callable[[Array, Array, Array], tuple[Array, Array]]
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
    caches: tuple[layers.Cache, ...]  # per segment, leaves (L, B, ...)
    routes: tuple[Array, ...]  # per segment (L, B, R, X); row r: the processing of token r
    records: tuple[Any, ...]  # per segment by site, leaves (L, B, R, ...)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """What decoding starts from and never changes, and what it changes."""

    prompt_B: Int[Array, " B"]  # tokens of each sequence's prompt; 0: padding row
    keys_B: Array  # random keys
    prompt_routes: tuple[Array, ...]  # per segment (L, P, T, X)
    prompt_records: tuple[Any, ...]  # per segment by site, leaves (L, P, T, ...)
    state: Decoded | None  # None: kept apart, to be donated


def make_generate(
    model: cfg.Model,
    quant: cfg.Quant,
    rollout: cfg.Rollout,
    kernels: cfg.Kernels = cfg.XLA,
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
    core = Core(model, quant, rollout, tuple(stop_ids), pad_id, kernels=kernels)
    sample = _checked(core) if kernels.debug else jax.jit(core.sample, static_argnames="samples")

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


def _checked(core: "Core") -> Callable[..., unpad.Sampled]:
    """`core.sample` with the ops' checks of values."""
    of = functools.cache(lambda samples: checked(partial(core.sample, samples=samples)))
    return lambda *arrays, samples: of(samples)(*arrays)


@dataclasses.dataclass(frozen=True)
class Core:
    """The traced part of the engine with its static choices."""

    model: cfg.Model
    quant: cfg.Quant
    rollout: cfg.Rollout
    stop_ids: tuple[int, ...]
    pad_id: int
    custom_draw: Draw | None = None  # instead of `draw`, for what is not trained on
    kernels: cfg.Kernels = cfg.XLA

    @property
    def segments(self) -> tuple[stacks.Segment, ...]:
        return qat_plan.side_segments(self.quant, self.model, self.quant.rollout)

    @property
    def spec(self) -> GuidanceSpec | None:
        return qat_plan.guidance_spec(self.quant, self.model)

    def sample(self, params, tokens_PT, length_P, seed_P, key, *, samples: int) -> unpad.Sampled:
        """Prefill and decode."""
        begun = self.begin(params, tokens_PT, length_P, seed_P, key, samples=samples)
        state = self.advance(params, begun, self.rollout.max_new_tokens)
        return unpad.Sampled(
            steps=state.step,
            tokens_BR=state.tokens_BR,
            logprobs_BR=state.logprobs_BR,
            length_B=state.length_B,
            done_B=state.done_B,
            prompt_routes=begun.prompt_routes,
            response_routes=state.routes,
            prompt_records=begun.prompt_records,
            response_records=state.records,
            kv_records=self.kv_records(state.caches),
        )

    def begin(self, params, tokens_PT, length_P, seed_P, key, *, samples: int) -> Begun:
        """Prefill, and the first token of every sequence."""
        slots = tokens_PT.shape[1] + self.rollout.max_new_tokens
        keys_B = sequence_keys(key, seed_P, samples)
        caches, routes, records, logits_PV = self.prefill(params, tokens_PT, length_P)
        length_B = jnp.repeat(length_P, samples)
        first = self.pick(jnp.repeat(logits_PV, samples, axis=0), keys_B, jnp.int32(0))
        caches = tuple(layers.grow(cache, slots, samples) for cache in caches)
        return Begun(
            prompt_B=length_B,
            keys_B=keys_B,
            prompt_routes=routes,
            prompt_records=records,
            state=self.start(caches, routes, records, first, length_B == 0),
        )

    def advance(self, params, begun: Begun, stop: Int[Array, ""] | int) -> Decoded:
        """Decodes until `stop` tokens have been sampled or all sequences have ended."""

        assert begun.state is not None

        def unfinished(state: Decoded) -> Array:
            return (state.step < stop) & ~jnp.all(state.done_B)

        def body(state: Decoded) -> Decoded:
            return self.decode_step(params, state, begun.prompt_B, begun.keys_B)

        return jax.lax.while_loop(unfinished, body, begun.state)

    def kv_records(self, caches: tuple[layers.Cache, ...]) -> tuple[Any, ...]:
        """Of the caches what guidance keeps; the rest never leaves the device."""
        out = []
        for segment, cache in zip(self.segments, caches, strict=True):
            plan = layers.kv_plan(segment)
            if self.spec is None or plan is None or plan.kv is None:
                out.append({})
                continue
            named = {n: cache["attention"][n] for n in ("k", "v") if n in plan.recorded}
            out.append(kv_cache.record(named, plan.kv, self.spec.coding))
        return tuple(out)

    def start(self, caches, routes, records, first, idle_B) -> Decoded:
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
            length_B=(~idle_B).astype(jnp.int32),
            done_B=idle_B | self.stops(token_B),
            token_B=token_B,
            caches=caches,
            routes=tuple(jnp.full((len(ids), B, R, X), -1, jnp.int32) for ids in routes),
            records=tuple(jax.tree.map(empty, r) for r in records),
        )

    def stops(self, token_B: Array) -> Array:
        """True where the token ends the answer."""
        return jnp.any(token_B[:, None] == jnp.asarray(self.stop_ids, jnp.int32)[None, :], axis=1)

    def pick(self, logits_BV, keys_B, step) -> tuple[Array, Array]:
        """The next token of each row and its log-prob."""
        return (self.custom_draw or self.draw)(logits_BV, keys_B, step)

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
        view = transformer.make_layer_view(self.model)

        def body(x, plan, layer, _):
            mix = layers.prefill_mix(self.model, plan, valid_PT)
            feed = layers.make_feed(self.model, plan, self.spec, valid_PT, self.kernels)
            x, kept = view(plan.kind, layer)(x, position_PT, mix, feed)
            return x, {plan.kind.mixer: kept.mix, **_outputs(kept, valid_PT)}

        x = transformer.embed_tokens(params, tokens_PT, jnp.dtype(self.model.compute_dtype))
        caches, routes, records = [], [], []
        for segment, stack in zip(self.segments, params["segments"], strict=True):
            x, out = stacks.scan(segment, body, x, stack)
            leaves = {name: rows for name, (_, rows) in out.items()}
            none = jnp.zeros((0, P, T, self.model.experts_per_token), jnp.int32)
            routes.append(leaves.pop("routes", none))
            mixers = [name for name in ("attention", "linear") if name in leaves]
            caches.append({name: leaves.pop(name) for name in mixers})
            records.append(leaves)
        last = jnp.maximum(length_P - 1, 0)[:, None, None]
        x_P1D = jnp.take_along_axis(x, last, axis=1)
        logits = transformer.head_logits(self.model, params, x_P1D)[:, 0]
        return tuple(caches), tuple(routes), tuple(records), logits

    def decode_step(self, params, state: Decoded, prompt_B, keys_B) -> Decoded:
        """Processes the last sampled token of every unfinished row and samples the next one."""
        r, active_B = state.step - 1, ~state.done_B
        slot_B, active_B1 = prompt_B + r, active_B[:, None]
        view = transformer.make_layer_view(self.model)

        def body(carry, plan, layer, inputs):
            x, cache = carry
            where = (inputs["row"], slot_B, active_B, self.kernels.kv_attention)
            mix = layers.decode_mix(self.model, plan, cache, *where)
            feed = layers.make_feed(self.model, plan, self.spec, active_B1, self.kernels)
            x, kept = view(plan.kind, layer)(x, slot_B[:, None], mix, feed)
            return (x, kept.mix), _outputs(kept, active_B1)

        dtype = jnp.dtype(self.model.compute_dtype)
        x = transformer.embed_tokens(params, state.token_B[:, None], dtype)
        caches, routes, records = list(state.caches), list(state.routes), list(state.records)
        for i, (segment, stack) in enumerate(zip(self.segments, params["segments"], strict=True)):
            inputs = {"row": layers.mixer_rows(segment)}
            (x, caches[i]), out = stacks.scan(segment, body, (x, caches[i]), stack, inputs)
            leaves = {name: rows for name, (_, rows) in out.items()}
            if "routes" in leaves:
                routes[i] = put(routes[i], leaves.pop("routes"), r, axis=2)
            records[i] = jax.tree.map(partial(put, at=r, axis=2), records[i], leaves)
        logits = transformer.head_logits(self.model, params, x)[:, 0]
        token_B, logprob_B = self.pick(logits, keys_B, state.step)
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


def _outputs(kept: transformer.Kept, valid_BT: Array) -> dict[str, Any]:
    """What a layer hands back to be kept: records by site, and the routes of valid tokens."""
    if kept.routes is None:
        return kept.feed
    return {**kept.feed, "routes": jnp.where(valid_BT[..., None], kept.routes, -1)}


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
