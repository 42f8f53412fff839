"""Comparison arms differ in nothing but precision and lag, and rows say what was measured."""

import dataclasses
import json
import pathlib

import pytest

from trace_jax import compare, overrides

TINY = overrides.load(pathlib.Path(__file__).parent.parent / "configs/tiny_cpu.py")


@pytest.mark.parametrize("mode", sorted(compare.MODES))
def test_an_arm_differs_from_the_config_in_precision_start_and_lag_only(mode):
    arm = compare.arm(TINY, mode, lag=2, seed=7, start="somewhere")
    undone = dataclasses.replace(
        arm,
        name=TINY.name,
        seed=TINY.seed,
        quant=TINY.quant,
        warm_start=TINY.warm_start,
        rollout=dataclasses.replace(arm.rollout, version_lag=0),
        run=dataclasses.replace(arm.run, init_from=None),
    )
    assert undone == TINY
    assert (arm.seed, arm.rollout.version_lag, arm.run.init_from) == (7, 2, "somewhere")


def test_modes_mean_what_their_names_say():
    quant = {m: compare.arm(TINY, m, lag=0, seed=0, start="x").quant for m in compare.MODES}
    assert (quant["bf16"].rollout, quant["bf16"].trainer) == ("bf16", "bf16")
    assert (quant["naive"].rollout, quant["naive"].trainer) == ("fp4", "bf16")
    assert (quant["qat"].rollout, quant["qat"].trainer) == ("fp4", "qat")
    full, compact = quant["trace-full"], quant["trace-compact"]
    assert (full.trainer, full.guide, full.guide_layers) == ("trace", "codes", "all")
    assert (compact.guide, compact.guide_layers) == ("mantissa", "latter_half")


def test_an_unknown_mode_or_a_lag_beyond_the_run_is_refused_before_anything_runs(tmp_path):
    ask = {"modes": ["qat"], "lags": [0], "seeds": [0]}
    with pytest.raises(ValueError, match="got tracefull, need one of"):
        compare.compare(TINY, tmp_path / "a", **ask | {"modes": ["qat", "tracefull"]})
    with pytest.raises(ValueError, match="--lags: got 2, need < steps=2"):
        compare.compare(TINY, tmp_path / "a", **ask | {"lags": [0, 2]})
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_comparison_runs_each_arm_once_from_one_warm_start_and_resumes(tmp_path, capsys):
    ask = {"modes": ["trace-full"], "lags": [0, 1], "seeds": [0]}
    rows = compare.compare(TINY, tmp_path, **ask)
    assert [(r["mode"], r["lag"], r["seed"]) for r in rows] == [
        ("trace-full", lag, 0) for lag in (0, 1)
    ]
    assert rows[0]["accuracy/before"] == rows[1]["accuracy/before"]  # the same warm start
    assert rows[0]["guide/bytes_per_token"] == 2 * (64 // 2 + 64 // 16 + 4 + 2 * (16 + 2))
    assert rows[0]["parity/logprob_abs_diff_nats"] >= 0
    assert json.loads((tmp_path / "comparison.json").read_text()) == rows
    lines = (tmp_path / "trace-full_lag0_seed0/metrics.jsonl").read_text()
    assert compare.compare(TINY, tmp_path, **ask) == rows  # finished arms are only read
    assert (tmp_path / "trace-full_lag0_seed0/metrics.jsonl").read_text() == lines
