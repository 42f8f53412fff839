"""Rollouts beside training: without staleness as in turn; stops lose no prompt."""

import concurrent.futures
import dataclasses
import json

import numpy as np
import pytest

from tests.loop_test import TINY, facts, final_arrays, write_jsonl
from trace_jax import config as cfg
from trace_jax import engines, loop
from trace_jax.interrupt import StopFlag
from trace_jax.metrics import read_metrics
from trace_jax.rollout.engine import JaxEngine

ONLY_ASYNCHRONOUS = ("staleness_max", "staleness_0", "waited_for", "pending")


def experiment(tmp_path, steps: int, asynchrony: cfg.Asynchrony | None) -> cfg.Config:
    """Steps on the user's own file, without a warm start."""
    path = write_jsonl(tmp_path / "data.jsonl")
    data = dataclasses.replace(
        TINY.data, task=None, task_args=(), path=path, train_size=20, eval_size=4
    )
    rollout = dataclasses.replace(TINY.rollout, group_size=2)
    optim = dataclasses.replace(TINY.optim, learning_rate=3e-3)
    return dataclasses.replace(
        TINY,
        steps=steps,
        warm_start=None,
        data=data,
        rollout=rollout,
        optim=optim,
        asynchrony=asynchrony,
    )


def in_common(rows: list[dict]) -> list[dict]:
    return [
        {k: v for k, v in r.items() if not any(w in k for w in ONLY_ASYNCHRONOUS)} for r in rows
    ]


def trained_on(monkeypatch) -> list[list[str]]:
    """Uids of the prompts of every step from now on."""
    seen: list[list[str]] = []
    real = loop.stages.collect

    def collect(built, trajectories, *rest):
        uids = dict.fromkeys(t.prompt.uid for t in trajectories)
        seen.append(list(uids))
        return real(built, trajectories, *rest)

    monkeypatch.setattr(loop.stages, "collect", collect)
    return seen


def test_with_no_staleness_allowed_every_number_is_that_of_the_run_in_turn(tmp_path):
    loop.run(experiment(tmp_path, 3, None), tmp_path / "turns", show=False)
    loop.run(
        experiment(tmp_path, 3, cfg.Asynchrony(max_version_diff=0)), tmp_path / "async", show=False
    )
    assert in_common(facts(tmp_path / "async")) == in_common(facts(tmp_path / "turns"))
    expected = final_arrays(tmp_path / "turns")
    for name, leaf in final_arrays(tmp_path / "async").items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
    rows = read_metrics(tmp_path / "async/metrics.jsonl")[1:]
    assert [row["rollout/staleness_0_fraction"] for row in rows] == [1.0] * 3


class Stopping(StopFlag):
    """As if Ctrl-C was pressed in the second step."""

    def __init__(self, seen: list) -> None:
        super().__init__()
        self.seen = seen

    def __bool__(self) -> bool:
        return len(self.seen) >= 2


def test_a_stopped_run_goes_on_without_losing_or_repeating_a_prompt(tmp_path, monkeypatch):
    config = experiment(tmp_path, 4, cfg.Asynchrony(max_version_diff=2, ahead=3))
    seen = trained_on(monkeypatch)
    real = loop.graceful_stop

    class Stopped:
        def __enter__(self):
            return Stopping(seen)

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(loop, "graceful_stop", Stopped)
    with pytest.raises(KeyboardInterrupt):
        loop.run(config, tmp_path / "run", show=False)
    assert len(seen) == 2
    monkeypatch.setattr(loop, "graceful_stop", real)
    loop.run(config, tmp_path / "run", show=False)
    assert len(seen) == 4
    rows = read_metrics(tmp_path / "run/metrics.jsonl")[1:]
    ages = [[row[f"rollout/staleness_{k}_fraction"] for k in range(3)] for row in rows]
    np.testing.assert_allclose(np.sum(ages, axis=1), 1)
    assert max(row["rollout/staleness_max_versions"] for row in rows) > 0  # it did run ahead

    turns = trained_on(monkeypatch)
    loop.run(experiment(tmp_path, 4, None), tmp_path / "turns", show=False)
    assert seen[:4] == turns[:4]  # every prompt in its turn, across the stop


class Broken(JaxEngine):
    """Answers the evaluation, and no prompt of the training."""

    def submit(self, prompts, samples, key):
        futures = [concurrent.futures.Future() for _ in prompts]
        for future in futures:
            future.set_exception(RuntimeError("the last server is gone"))
        return futures


def test_an_engine_that_fails_ends_the_run_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "JaxEngine", Broken)
    config = experiment(tmp_path, 2, cfg.Asynchrony())
    with pytest.raises(RuntimeError, match="the last server is gone"):
        loop.run(config, tmp_path / "run", show=False)
    assert json.loads((tmp_path / "run/config.json").read_text())["name"] == TINY.name
