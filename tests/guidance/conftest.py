"""Records, trajectories and batches for the tests of the store; `kit` has them all."""

import types

import jax
import numpy as np
import pytest

from trace_jax.data import batching
from trace_jax.guidance.record import Guidance, GuidanceSpec, SiteRecord
from trace_jax.guidance.store import GuidanceStore
from trace_jax.types import Prompt, Scored, Trajectory

SPEC = GuidanceSpec(
    kind="codes",
    layers=((0, 2), (0, 2)),
    sites=("k", "expert_in"),
    formats=("nvfp4:global_rule=one", "nvfp4"),
    global_bits=16,
)


def record(seed, S, spec=SPEC):
    rng = np.random.default_rng(seed)
    lead = (len(spec.layers[0]), S)
    k = SiteRecord(
        bits=rng.integers(1, 256, (*lead, 2, 8), np.uint8),
        scales=rng.integers(1, 256, (*lead, 2, 1), np.uint8),
        global_scale=None,
    )
    expert = SiteRecord(
        bits=rng.integers(1, 256, (*lead, 16), np.uint8),
        scales=rng.integers(1, 256, (*lead, 2), np.uint8),
        global_scale=rng.integers(1, 2**16, (*lead, 1), np.uint16),
    )
    return Guidance(sites={"k": k, "expert_in": expert}, spec=spec)


def trajectory(seed, length, prompt=2, version=4, **fields):
    rng = np.random.default_rng(seed)
    tokens_T = rng.integers(1, 200, length).astype(np.int32)
    ids = tuple(int(t) for t in tokens_T[:prompt])
    values = {
        "prompt": Prompt(uid=f"q{seed}", text="", tokens=ids, answer=None, task="t"),
        "sample": 3,
        "tokens_T": tokens_T,
        "prompt_length": prompt,
        "sampler_logprobs_R": np.full(length - prompt, -1.0, np.float32),
        "routes_SLX": np.zeros((length - 1, 3, 2), np.int16),
        "guidance": record(seed, length - 1),
        "finish_reason": "stop",
        "versions_R": np.full(length - prompt, version, np.int32),
    }
    return Trajectory(**values | fields)


def put(store, t, guidance=None, **changes):
    given = {"spec": SPEC, "name": t.prompt.uid, "tokens_T": t.tokens_T}
    given |= {"prompt_length": t.prompt_length, "version": t.version} | changes
    return store.put(t.guidance if guidance is None else guidance, **given)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


LENGTHS = (7, 3, 9, 5, 4)


def batch(trajectories, rows=6):
    scored = [Scored(trajectory=t, reward=1.0) for t in trajectories]
    advantages_B = np.arange(len(scored), dtype=np.float32)
    args = {"length": None, "bucket_tokens": 4, "pad_id": 0, "rows": rows}
    return batching.collate(scored, advantages_B, **args)


@pytest.fixture
def spilling(tmp_path):
    """A store that keeps nothing in memory, with files of about two records."""
    with GuidanceStore(tmp_path / "guidance", memory_bytes=0, segment_bytes=4000) as store:
        yield store


@pytest.fixture
def kit():
    """What the tests of the store are made of."""
    made = (record, trajectory, put, assert_equal, batch)
    return types.SimpleNamespace(SPEC=SPEC, LENGTHS=LENGTHS, **{f.__name__: f for f in made})
