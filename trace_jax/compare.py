"""Several precision modes of one experiment from the same policy, side by side.

All arms of a seed start from one warm start (or from a given run) and differ only in `quant`, so
what differs in the table comes from the rounding. Means are over the steps at the full version lag.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from trace_jax import config as cfg
from trace_jax import loop, summary
from trace_jax.checks import require
from trace_jax.rundir import read_run

_PAPER = {"guide_scale_bits": 8, "guide_global_bits": 32}  # scales and global scales whole
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"rollout": "bf16", "trainer": "bf16"},
    "naive": {"rollout": "fp4", "trainer": "bf16"},
    "qat": {"rollout": "fp4", "trainer": "qat"},
    "trace-full": {"trainer": "trace", "guide": "codes", "guide_layers": "all", **_PAPER},
    "trace-mantissa": {"trainer": "trace", "guide": "mantissa", "guide_layers": "all", **_PAPER},
    "trace-compact": {
        **{"trainer": "trace", "guide": "mantissa", "guide_layers": "latter_half"},
        **_PAPER,
    },
    "trace-lean": {
        **{"trainer": "trace", "guide": "mantissa", "guide_layers": "latter_half"},
        **{"guide_scale_bits": 2, "guide_global_bits": 16},
    },
    "trace-last-1": {
        **{"trainer": "trace", "guide": "mantissa", "guide_layers": "last:1"},
        **_PAPER,
    },
    "trace-hidden": {"trainer": "trace", "guide": "codes", "guide_hidden": True, **_PAPER},
    "configured": {},
}
COLUMNS = (
    "accuracy/before",
    "accuracy/after",
    "parity/logprob_abs_diff_nats",
    "parity/logprob_abs_diff_p99_nats",
    "parity/route_mismatch",
    "guide/agreement",
    "guide/bytes_per_token",
)


def arm(config: cfg.Config, mode: str, lag: int, seed: int, start: str) -> cfg.Config:
    """The experiment of one arm: `config` in another precision, from the policy of run `start`.

    Raises: ValueError for an unknown mode.
    """
    require(mode in MODES, "--modes", mode, f"one of {list(MODES)}")
    return dataclasses.replace(
        config,
        name=f"{config.name}-{mode}",
        seed=seed,
        warm_start=None,
        quant=dataclasses.replace(config.quant, **MODES[mode]),
        rollout=dataclasses.replace(config.rollout, version_lag=lag),
        run=dataclasses.replace(config.run, init_from=start),
    )


def compare(
    config: cfg.Config,
    workdir: str | pathlib.Path,
    *,
    modes: Sequence[str],
    lags: Sequence[int],
    seeds: Sequence[int],
    start: str | None = None,
) -> list[dict[str, Any]]:
    """Runs every (seed, lag, mode), each in its own run directory under `workdir`.

    Args:    start: a run whose policy all arms start from ("{seed}" in it is replaced by the seed);
             None: one warm start per seed.
    Returns: a row per arm: mode, lag, seed and COLUMNS (None where a mode has no such number). Also
             in `<workdir>/comparison.json`. Arms that are finished are not run again.
    """
    require(len(modes) > 0, "--modes", "nothing", f"some of {list(MODES)}")
    mixed = start is not None and len(seeds) > 1 and "{seed}" not in start
    need = 'one run per seed, written with "{seed}"'
    fix = "a seed draws its own held-out prompts, which the policy of another may have trained on"
    require(not mixed, "--start with several seeds", start, need, fix)
    root = pathlib.Path(workdir)
    planned = [(seed, lag, mode) for seed in seeds for lag in lags for mode in modes]
    for _, lag, mode in planned:  # refuse everything wrong before anything runs
        require(config.steps > lag, "--lags", lag, f"< steps={config.steps}", "--set steps=...")
        arm(config, mode, lag, 0, "somewhere")
    rows = []
    for number, (seed, lag, mode) in enumerate(planned, start=1):
        print(f"--- {number}/{len(planned)}: {mode}, lag {lag}, seed {seed}")
        origin = start.replace("{seed}", str(seed)) if start else _warm_start(config, root, seed)
        folder = root / f"{mode}_lag{lag}_seed{seed}"
        finished = loop.run(arm(config, mode, lag, seed, origin), folder, show=False)
        # the first `lag` steps are not that old yet
        result = finished | summary.summarise(read_run(folder), {}, after_step=lag)
        found = {name: result.get(name) for name in COLUMNS}
        rows.append({"mode": mode, "lag": lag, "seed": seed, **found, "run": str(folder)})
        (root / "comparison.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


def _warm_start(config: cfg.Config, root: pathlib.Path, seed: int) -> str:
    """The run that holds this seed's warm start; made once."""
    folder = root / f"warm_start_seed{seed}"
    warm = dataclasses.replace(config, name=f"{config.name}-warm_start", seed=seed, steps=0)
    loop.run(warm, folder, show=False)
    return str(folder)
