"""What a step's parts hand to each other, on the tiny experiment."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from trace_jax import overrides, stages, update
from trace_jax.reward.pool import RewardPool

TINY = overrides.load(pathlib.Path(__file__).parent.parent / "configs/tiny_cpu.py")


@pytest.fixture(scope="module")
def built() -> stages.Stages:
    return stages.build(TINY)


@pytest.fixture(scope="module")
def params(built):
    return stages.initial_params(built)


@pytest.fixture(scope="module")
def collected(built, params):
    weights = built.sync(params, 3)
    with RewardPool("exact") as pool:
        return stages.roll_out(built, weights, built.prompts.train[:4], pool, step=0, version=5)


def test_keys_differ_by_purpose_and_step_and_by_nothing_else(built):
    def data(purpose, step):
        return tuple(jax.random.key_data(built.purpose_key(purpose, step)).tolist())

    keys = {(p, s): data(p, s) for p in ("rollout", "evaluation", "parameters") for s in (0, 1)}
    assert len(set(keys.values())) == len(keys)
    assert data("rollout", 1) == keys["rollout", 1]


def test_a_rollout_reports_its_staleness_and_its_real_guidance_bytes(collected):
    metrics = collected.metrics
    assert metrics["rollout/staleness_versions"] == 2  # sampled by version 3, trained at version 5
    # 2 layers x (64 values: 4-bit codes, a scale per 16, a global; K and V of one head of 32)
    assert metrics["guide/bytes_per_token"] == 2 * (32 + 4 + 4 + 2 * (16 + 2))
    assert metrics["reward/groups"] == 4
    assert metrics["rollout/tokens"] == collected.batch.loss_mask_BS.sum()


@pytest.fixture(scope="module")
def two_updates(built):
    optim = dataclasses.replace(TINY.optim, minibatches=2)
    return dataclasses.replace(built, config=dataclasses.replace(TINY, optim=optim))


def test_log_probs_before_the_update_are_compared_and_kept_as_pi_old(
    two_updates, params, collected
):
    batch, metrics = stages.add_log_probs(two_updates, params, None, collected.batch)
    mask = batch.loss_mask_BS
    old, sampler = batch.old_logprobs_BS[mask], batch.sampler_logprobs_BS[mask]
    gap = np.abs(old.astype(np.float64) - sampler)
    assert metrics["parity/logprob_abs_diff_nats"] == pytest.approx(gap.mean(), rel=1e-6)
    assert gap.max() < 0.1  # the same policy: only rounding lies between them
    assert (batch.old_logprobs_BS[~mask] == 0).all()
    assert metrics["guide/agreement"] > 0.99
    assert batch.reference_logprobs_BS is None


def test_training_moves_the_parameters_and_counts_every_token_once(built, params, collected):
    batch, _ = stages.add_log_probs(built, params, None, collected.batch)
    assert batch.old_logprobs_BS is None
    gains = np.where(np.arange(len(batch.tokens_BT)) % 2 == 0, 1.0, -1.0).astype(np.float32)
    batch = dataclasses.replace(batch, advantages_B=gains)
    tx = update.make_optimizer(*stages.policy_optimizer_args(TINY))
    state = update.init_state(stages.copy_params(params), tx)
    state, metrics = stages.train(built, state, batch, step=0)
    assert metrics["update/skipped"] == 0
    assert metrics["update/tokens"] == batch.loss_mask_BS.sum()
    # one update per rollout: the ratio is 1 exactly, in BF16 too, and nothing is clipped
    assert (metrics["loss/ratio"], metrics["loss/clip_fraction"]) == (1.0, 0.0)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), state.params, params)
    assert max(jax.tree.leaves(moved)) > 0
