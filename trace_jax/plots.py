"""Pictures of a run and of a comparison, drawn from metric rows. Matplotlib is imported on use."""

import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trace_jax import metrics, rundir

# Okabe and Ito: distinguishable with any common colour blindness. Markers and dashes differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

MEAN_GAP = "parity/logprob_abs_diff_nats"
P99_GAP = "parity/logprob_abs_diff_p99_nats"
COMPARED = {  # axis label of each panel of a comparison
    "eval/accuracy": "held-out accuracy",
    MEAN_GAP: "mean |Δ log-prob| [nats]",
    P99_GAP: "p99 |Δ log-prob| [nats]",
    "parity/route_mismatch": "route mismatch [fraction]",
    "guide/agreement": "guide agreement [fraction]",
    "guide/bytes_per_token": "guidance [bytes/token]",
}
Rows = list[dict[str, Any]]


def write_plots(rundir_path: str | pathlib.Path) -> list[pathlib.Path]:
    """Draws plots/{training,parity,speed}.png of a run directory from its metrics.jsonl.

    An asynchronous run has plots/staleness.png too.

    Works at any moment of a run: a panel without data says so.
    """
    run = rundir.read_run(rundir_path)
    rows = metrics.read_metrics(run.metrics) if run.metrics.exists() else []
    title = str(run.config().get("name", run.root.name))
    paths = []
    draws = {"training": _training, "parity": _parity, "speed": _speed}
    if any("rollout/staleness_0_fraction" in row for row in rows):
        draws["staleness"] = _staleness
    for name, draw in draws.items():
        figure = draw(rows)
        figure.suptitle(f"{title}: {name}", fontsize=12)
        paths.append(_save(figure, run.folder("plots") / f"{name}.png"))
    return paths


def comparison_plot(rows: Rows, path: str | pathlib.Path) -> pathlib.Path:
    """Draws one panel a metric of COMPARED: mean over seeds with the standard deviation as a bar.

    Args:    rows: dicts with `mode`, optionally `seed` and `lag` (versions), and metric keys.
             Several lags: lag is the x axis and each mode a line; one lag: modes side by side.
    """
    keys = [key for key in COMPARED if any(_number(row, key) is not None for row in rows)]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lags = sorted({row.get("lag", 0) for row in rows})
    columns = min(3, max(1, len(keys)))
    figure, axes = _figure(math.ceil(len(keys) / columns) or 1, columns, height=3.1, width=3.7)
    for axis, key in zip(axes, keys, strict=False):
        for i, mode in enumerate(modes):
            x = 0.24 * (i / len(modes) - 0.5)  # beside each other, so that bars do not overlap
            places = {lag: lag + x if len(lags) > 1 else i for lag in lags}
            _compare_mode(axis, [row for row in rows if row["mode"] == mode], key, i, places)
        axis.set_ylabel(COMPARED[key])
        if key in (MEAN_GAP, P99_GAP) and _spans_decades(axis):
            axis.set_yscale("log")
        elif key not in (MEAN_GAP, P99_GAP, "eval/accuracy", "guide/agreement"):
            axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])
        if key == "guide/agreement":
            axis.set_ylim(top=min(axis.get_ylim()[1], 1.002))
        if len(lags) > 1:
            axis.set_xlabel("rollout lag [versions]")
            axis.set_xticks(lags)
        else:
            axis.set_xticks(range(len(modes)), modes, rotation=20, ha="right")
            axis.set_xlim(-0.6, len(modes) - 0.4)
    for axis in axes[len(keys) :]:
        axis.set_visible(False)
    if len(lags) > 1 and keys:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
    return _save(figure, pathlib.Path(path))


def mean_spread(values: Iterable[float | int]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; None for a single value."""
    values = [float(value) for value in values]  # `statistics` is exact: equal values spread by 0
    spread = statistics.stdev(values) if len(values) > 1 else None
    return statistics.fmean(values), spread


def _compare_mode(
    axis: Any, rows: Rows, key: str, index: int, places: Mapping[int, float | int]
) -> None:
    """One mode in one panel; `places` is the x of each lag."""
    xs, means, spreads = [], [], []
    for lag, place in places.items():
        found = [_number(row, key) for row in rows if row.get("lag", 0) == lag]
        values = [value for value in found if value is not None]
        if values:
            mean, spread = mean_spread(values)
            xs.append(place)
            means.append(mean)
            spreads.append(spread or 0.0)
    label = rows[0]["mode"] if rows else ""
    marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]  # pairs repeat late
    style = {"color": COLOURS[index % len(COLOURS)], "marker": marker}
    line = "-" if len(places) > 1 else "none"
    axis.errorbar(
        xs, means, yerr=spreads, label=label, linestyle=line, capsize=3, markersize=5, **style
    )


def _training(rows: Rows) -> Any:
    figure, (warm, rl) = _figure(1, 2, ratios=(1, 2))
    _line(warm, rows, "warm_start/loss", "loss (train)", 0, stage="warm_start")
    warm.set(xlabel="warm-start step", ylabel="cross-entropy [nats/token]", title="warm start")
    if any(_number(row, "eval/accuracy") is not None for row in _of(rows, "warm_start")):
        right = warm.twinx()
        _line(right, rows, "eval/accuracy", "accuracy (held out)", 1, stage="warm_start", dots=True)
        right.set(ylim=(0, 1), ylabel="held-out accuracy")
        right.grid(False)
        _legend(warm, right)
    _line(rl, rows, "reward/mean", "reward (train), moving mean", 0, smooth=True)
    _line(rl, rows, "eval/accuracy", "accuracy (held out)", 1, dots=True)
    start = _baseline(rows)
    if start is not None:
        rl.axhline(start, color="#666666", linestyle="--", linewidth=1)
        rl.plot([], [], color="#666666", linestyle="--", label=f"after warm start: {start:.3f}")
    rl.set(xlabel="GRPO step", ylabel="mean reward, accuracy", title="GRPO", ylim=(0, None))
    _legend(rl)
    _mark_empty(warm, rl)
    return figure


def _parity(rows: Rows) -> Any:
    figure, (gap, codes, routes) = _figure(1, 3, width=4.2)
    _line(gap, rows, P99_GAP, "99th percentile", 1)
    _line(gap, rows, MEAN_GAP, "mean", 0)
    if gap.lines and any((_number(row, MEAN_GAP) or 0) > 0 for row in _of(rows, "rl")):
        gap.set_yscale("log")
    gap.set(xlabel="GRPO step", ylabel="|trainer − sampler| log-prob [nats]", title="log-prob gap")
    _legend(gap)
    _line(codes, rows, "guide/agreement", "guide agreement", 2)
    codes.set(xlabel="GRPO step", ylabel="fraction of guided codes", title="guide agreement")
    codes.set_ylim(top=1.0005)  # a line at exactly 1 stays visible
    _line(routes, rows, "parity/route_mismatch", "route mismatch", 3)
    routes.set(xlabel="GRPO step", ylabel="fraction of routed experts", title="route mismatch")
    routes.set_ylim(bottom=0.0)
    _mark_empty(gap, codes, routes)
    return figure


def _speed(rows: Rows) -> Any:
    figure, (tokens, split) = _figure(1, 2)
    _line(tokens, rows, "rollout/tokens_per_s", "rollout", 0)
    tokens.set(xlabel="GRPO step", ylabel="sampled tokens per second", title="rollout throughput")
    tokens.set_ylim(bottom=0)
    parts = {
        "rollout/step_s": "rollout",
        "reward/step_s": "reward and batch",
        "logprobs/step_s": "log-probs before the update",
        "update/step_s": "update",
        "sync/s": "weight sync",
    }
    timed = [row for row in _of(rows, "rl") if any(_number(row, key) is not None for key in parts)]
    if timed:
        steps = [row["step"] for row in timed]
        heights = [[_number(row, key) or 0.0 for row in timed] for key in parts]
        present = [i for i, values in enumerate(heights) if any(values)]
        split.stackplot(
            steps,
            [heights[i] for i in present],
            labels=[list(parts.values())[i] for i in present],
            colors=[COLOURS[i] for i in present],
            alpha=0.8,
        )
        _legend(split)
        # The first step compiles and would flatten all others.
        usual = np.percentile(np.sum(heights, axis=0), 95)
        split.set_ylim(0, max(1.15 * float(usual), 1e-3))
    split.set(xlabel="GRPO step", ylabel="wall time [s/step]", title="where a step goes")
    _mark_empty(tokens, split)
    return figure


def _staleness(rows: Rows) -> Any:
    """How old the weights were that sampled the tokens: over the steps, and of the whole run."""
    figure, (steps, whole) = _figure(1, 2)
    form = re.compile(r"rollout/staleness_(\d+)_fraction")
    ages = sorted({int(found[1]) for row in rows for key in row if (found := form.fullmatch(key))})
    timed = [row for row in _of(rows, "rl") if "rollout/staleness_0_fraction" in row]
    shares = [
        [row.get(f"rollout/staleness_{age}_fraction") or 0.0 for row in timed] for age in ages
    ]
    tokens = np.asarray([row["rollout/tokens"] for row in timed])
    at = [row["step"] for row in timed]
    below = np.zeros(len(timed))
    for age, share in zip(ages, shares, strict=True):
        colour = COLOURS[age % len(COLOURS)]
        steps.bar(at, share, 0.9, bottom=below, color=colour, label=f"{age} versions")
        below = below + share
        whole.bar(age, np.average(share, weights=tokens), 0.8, color=colour)
    steps.set(xlabel="GRPO step", ylabel="fraction of tokens", title="age of the weights")
    whole.set(
        xlabel="age of the weights [versions]", ylabel="fraction of tokens", title="all steps"
    )
    whole.set_xticks(ages)
    _legend(steps)
    return figure


def _figure(
    rows: int, columns: int, height: float = 3.8, width: float = 5.0, ratios: Any = None
) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(width * columns, height * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"width_ratios": ratios})
    for axis in axes.flat:
        axis.grid(True, alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _of(rows: Rows, stage: str) -> Rows:
    return [row for row in rows if row.get("stage", "rl") == stage]


def _number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _baseline(rows: Rows) -> float | None:
    """Held-out accuracy before GRPO: of RL step 0, or else the last one of the warm start."""
    first = [row for row in _of(rows, "rl") if row["step"] == 0]
    found = [_number(row, "eval/accuracy") for row in (*_of(rows, "warm_start"), *first)]
    return next((value for value in reversed(found) if value is not None), None)


def _line(
    axis: Any,
    rows: Rows,
    key: str,
    label: str,
    colour: int,
    stage: str = "rl",
    dots: bool = False,
    smooth: bool = False,
) -> None:
    points = [(row["step"], _number(row, key)) for row in _of(rows, stage)]
    xy = np.asarray([(x, y) for x, y in points if y is not None], np.float64)
    if not len(xy):
        return
    style: dict[str, Any] = {"color": COLOURS[colour], "linewidth": 1.6}
    if dots or len(xy) == 1:
        style |= {"marker": MARKERS[colour], "markersize": 5}
    if smooth and len(xy) > 8:
        axis.plot(xy[:, 0], xy[:, 1], color=COLOURS[colour], alpha=0.25, linewidth=1)
        window = max(3, len(xy) // 12)
        sums = np.cumsum(np.concatenate(([0.0], xy[:, 1])))
        low = np.maximum(np.arange(len(xy)) + 1 - window, 0)
        high = np.arange(len(xy)) + 1
        xy = np.stack([xy[:, 0], (sums[high] - sums[low]) / (high - low)], axis=1)
    axis.plot(xy[:, 0], xy[:, 1], label=label, **style)


def _legend(*axes: Any) -> None:
    pairs = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    if pairs:
        handles, labels = zip(*pairs, strict=True)
        axes[-1].legend(handles, labels, loc="best", fontsize=8, framealpha=0.85)


def _mark_empty(*axes: Any) -> None:
    for axis in axes:
        if not axis.lines and not axis.collections:
            middle = {"ha": "center", "va": "center", "color": "#666666"}
            axis.text(0.5, 0.5, "no data", transform=axis.transAxes, **middle)
            axis.set(xticks=[], yticks=[])


def _spans_decades(axis: Any) -> bool:
    values = np.concatenate([np.ravel(line.get_ydata()) for line in axis.lines])
    positive = values[values > 0]
    return len(positive) == len(values) > 0 and positive.max() / positive.min() > 10
