"""A tiny MoE and its engines, built and compiled once a session."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import policy, weight_sync
from trace_jax.data import batching
from trace_jax.models import transformer
from trace_jax.rollout import jax_engine
from trace_jax.types import Batch, Prompt, Scored, Trajectory

MODEL = cfg.Model(
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    experts_per_token=2,
    expert_ffn=32,
    compute_dtype="float32",
)
# A temperature other than 1, so that every comparison of log-probs also says which they are (F20).
ROLLOUT = cfg.Rollout(max_new_tokens=6, temperature=0.7, bucket_tokens=8, bucket_batch=8)
BF16 = cfg.Quant(rollout="bf16", trainer="bf16")
VOCAB, PAD, STOPS = 24, 0, (1, 5)
LENGTHS = (
    3,
    5,
    7,
    8,
)  # of the usual prompts: one bucket of tokens, and with two samples one of rows


# Every kind of layer and feed-forward; segments of one layer and of a repeated period.
MODELS = {
    "moe": MODEL,
    "dense": dataclasses.replace(
        MODEL, family="llama", experts=0, dense_ffn=40, qk_norm=False, tie_embeddings=False
    ),
    "moe and dense": dataclasses.replace(
        MODEL, layers=3, dense_layers=(0,), dense_ffn=24, renormalise_gates=False
    ),
    "hybrid": dataclasses.replace(
        MODEL,
        family="qwen3_next",
        layers=5,
        full_attention_every=2,
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=8,
        linear_value_dim=8,
        gated_attention=True,
        zero_centred_norm=True,
        rotary_fraction=0.5,
        shared_ffn=16,
    ),
}


@functools.cache
def rough_params(seed: int = 3, model: cfg.Model = MODEL) -> Any:
    """Random parameters with norms that are not 1, and embeddings so large that logits matter."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init(model, VOCAB, jax.random.key(0)))

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            off = 1 if model.zero_centred_norm and len(path) != 3 else 0
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape) - off, leaf.dtype)
        if name in ("A_log", "dt_bias"):
            return jnp.asarray(rng.uniform(-1.0, 1.0, leaf.shape), leaf.dtype)
        size = 0.4 if name in ("embed", "head") else leaf.shape[-1] ** -0.5
        return jnp.asarray(rng.standard_normal(leaf.shape) * size, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def make_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [
        Prompt(
            uid=f"{seed}-{i}",
            text="",
            tokens=tuple(rng.integers(6, VOCAB, length).tolist()),
            answer=None,
            task="",
        )
        for i, length in enumerate(lengths)
    ]


def collate(trajectories: list[Trajectory], extra: int = 0) -> Batch:
    """One batch, `extra` tokens longer than it need be."""
    longest = max(len(t.tokens_T) for t in trajectories)
    scored = [Scored(trajectory=t, reward=0.0) for t in trajectories]
    length = -(-longest // 8) * 8 + extra
    zeros = np.zeros(len(scored), np.float32)
    return batching.collate(
        scored, zeros, length=length, bucket_tokens=8, pad_id=PAD, rows=len(scored)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A sampler and the trainer that belongs to it."""

    generate: jax_engine.Generate
    log_probs: Callable[..., Any]
    sync: Callable[..., weight_sync.SamplerWeights]
    params: Any

    @functools.cached_property
    def weights(self) -> weight_sync.SamplerWeights:
        return self.sync(self.params, 3)

    def sample(self, prompts: list[Prompt], samples: int = 2, key: int = 0) -> list[Trajectory]:
        return self.generate(self.weights, prompts, samples, jax.random.key(key))


@functools.cache
def make_pair(
    quant: cfg.Quant = BF16, model: cfg.Model = MODEL, rollout: cfg.Rollout = ROLLOUT
) -> Pair:
    log_probs = policy.make_log_probs(model, quant, temperature=rollout.temperature)
    return Pair(
        generate=jax_engine.make_generate(model, quant, rollout, stop_ids=STOPS, pad_id=PAD),
        log_probs=jax.jit(log_probs),
        sync=weight_sync.make_sync(model, quant),
        params=rough_params(model=dataclasses.replace(model, compute_dtype="float32")),
    )


@pytest.fixture(scope="session")
def tiny() -> Any:
    """What is in this file, for tests, which cannot import it."""
    return types.SimpleNamespace(**globals())
