"""The closing numbers are means over the right steps."""

import json

from trace_jax import rundir, summary


def test_the_summary_averages_grpo_steps_after_the_given_one(tmp_path):
    run = rundir.open_run(tmp_path, {})
    rows = [
        {"step": 1, "stage": "warm_start", "wall_s": 1, "reward/mean": 100.0},
        {"step": 0, "stage": "rl", "wall_s": 2, "eval/accuracy": 0.1},
        {"step": 1, "stage": "rl", "wall_s": 3, "reward/mean": 50.0},
        {"step": 2, "stage": "rl", "wall_s": 4, "reward/mean": 1.0, "guide/agreement": 0.5},
        {"step": 3, "stage": "rl", "wall_s": 5, "reward/mean": 2.0, "guide/agreement": None},
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = summary.summarise(run, {"before": 0.1, "after": 0.3}, after_step=1)
    run.close()
    assert result["reward/mean"] == 1.5
    assert result["guide/agreement"] == 0.5  # what was not finite is left out
    assert (result["accuracy/before"], result["accuracy/after"]) == (0.1, 0.3)
    assert "parity/kl_nats" not in result
    assert summary.labelled(result)["held-out accuracy after GRPO"] == 0.3
