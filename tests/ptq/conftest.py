"""A model with experts, a dense layer and a hybrid mixer less; batches with padding."""

import jax
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax.models import transformer

MODEL = cfg.Model(
    vocab_size=64,
    width=32,
    layers=4,
    head_dim=16,
    experts=8,
    experts_per_token=2,
    expert_ffn=32,
    dense_ffn=48,
    dense_layers=(1,),
    compute_dtype="float32",
)


def batches(seed: int, count: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        valid = np.ones((2, 9), bool)
        valid[0, :3] = False
        valid[1, 7:] = False
        found.append((rng.integers(0, 64, (2, 9)).astype(np.int32), valid))
    return found


@pytest.fixture(scope="session")
def params():
    return transformer.init(MODEL, 64, jax.random.key(0))
