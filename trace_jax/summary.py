"""The few numbers a run ends with."""

from typing import Any

import numpy as np

from trace_jax.metrics import read_metrics
from trace_jax.rundir import RunDir

# metric -> label; means over the GRPO steps
_MEANS = {
    "reward/mean": "reward",
    "parity/logprob_abs_diff_nats": "log-prob gap, mean (nats)",
    "parity/logprob_abs_diff_p99_nats": "log-prob gap, p99 (nats)",
    "parity/kl_nats": "KL of sampler from trainer (nats)",
    "parity/route_mismatch": "route mismatch",
    "guide/agreement": "guide agreement",
    "guide/bytes_per_token": "guidance (bytes per token)",
    "rollout/staleness_versions": "staleness (versions)",
    "rollout/tokens_per_s": "rollout (tokens per s)",
    "update/step_s": "update (s per step)",
    "update/skipped": "updates skipped (fraction)",
    "reward/failed": "verifiers failed (samples per step)",
}


def summarise(run: RunDir, accuracy: dict[str, float], after_step: int = 0) -> dict[str, Any]:
    """Held-out accuracy before and after, and means of the GRPO steps later than `after_step`."""
    rows = [row for row in read_metrics(run.metrics) if row.get("stage", "rl") == "rl"]
    rows = [row for row in rows if row["step"] > after_step]
    result: dict[str, Any] = {f"accuracy/{name}": value for name, value in accuracy.items()}
    for key in _MEANS:
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            result[key] = float(np.mean(values))
    result["run directory"] = str(run.root)
    return result


def labelled(result: dict[str, Any]) -> dict[str, Any]:
    """The summary under names for people, as `report.summary_table` prints it."""
    labels = {
        "accuracy/warm_start_train": "sampled accuracy on training prompts, warm start",
        "accuracy/before": "held-out accuracy before GRPO",
        "accuracy/after": "held-out accuracy after GRPO",
        **_MEANS,
    }
    return {labels.get(key, key): value for key, value in result.items()}
