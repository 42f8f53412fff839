"""The report of a run: text tables for the terminal and one self-contained HTML page."""

import base64
import html
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax import metrics, plots, rundir
from trace_jax.plots import comparison_plot as comparison_plot
from trace_jax.plots import write_plots as write_plots

_SAMPLES = 8  # decoded answers in the page
_NOT_METRICS = ("step", "wall_s", "stage", "nonfinite")
_TEXT = 2000  # characters of one answer
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}td,th{{border:1px solid #ccc;padding:.25em .6em;text-align:left;
vertical-align:top}}img{{max-width:100%}}pre{{white-space:pre-wrap;overflow-wrap:anywhere;margin:0}}
td.n{{text-align:right;font-variant-numeric:tabular-nums}}</style></head><body>
<h1>{title}</h1>{body}</body></html>
"""


def summary_table(rows: Mapping[str, Any]) -> str:
    """`name  value` lines, aligned; numbers with four significant digits, `-` for what is missing.

    A value may be a pair (before, after), written as `before -> after`.
    """
    width = max((len(name) for name in rows), default=0)
    return "\n".join(f"{name:<{width}}  {_cell(value)}" for name, value in rows.items())


def comparison_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """One line a (mode, lag), one column a metric: mean ± standard deviation over the seeds.

    Args:    rows: dicts with `mode`, optionally `lag` and `seed`, and metric keys; missing and
             non-finite values are left out of the mean. columns: metric keys.
    """
    lagged = len({row.get("lag", 0) for row in rows}) > 1
    groups: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["mode"], row.get("lag", 0)), []).append(row)
    # A key takes two header lines (stage/ above the quantity), since the quantities are long.
    split = [column.rpartition("/") for column in columns]
    blank = [""] * (3 if lagged else 2)
    lines = [
        [*blank, *(stage + slash for stage, slash, _ in split)],
        ["mode", *(["lag"] if lagged else []), "seeds", *(name for _, _, name in split)],
    ]
    for (mode, lag), members in groups.items():
        cells = [_spread([row.get(column) for row in members]) for column in columns]
        seeds = len({row.get("seed", i) for i, row in enumerate(members)})
        lines.append([str(mode), *([str(lag)] if lagged else []), str(seeds), *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = []
    for line in lines:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        out.append("  ".join((first, *rest)).rstrip())
    out.insert(2, "  ".join("-" * width for width in widths))
    return "\n".join(out)


def last_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, int]]:
    """The newest value of every metric of the RL stage, and its step."""
    out: dict[str, tuple[Any, int]] = {}
    for row in rows:
        if row.get("stage", "rl") == "rl":
            out |= {
                key: (value, row["step"]) for key, value in row.items() if key not in _NOT_METRICS
            }
    return out


def write_report(rundir_path: str | pathlib.Path) -> pathlib.Path:
    """Draws the plots and writes report.html: one file, readable without the run directory.

    Everything that a model, a data set or a user wrote is escaped: it is not to be trusted.
    """
    run = rundir.read_run(rundir_path)
    rows = metrics.read_metrics(run.metrics) if run.metrics.exists() else []
    config = run.config()
    title = f"{config.get('name', run.root.name)} (seed {config.get('seed', '?')})"
    images = "".join(_image(path) for path in write_plots(run.root))
    body = (
        f"<p>{html.escape(str(run.root))}: {len(rows)} metric lines.</p>"
        f"<h2>Plots</h2>{images}"
        f"<h2>Last values</h2>{_metrics_table(rows)}"
        f"<h2>Decoded samples</h2>{_samples_table(run)}"
        f"<h2>Configuration</h2>{_config_table(config)}"
    )
    rundir.write_atomic(run.report, _PAGE.format(title=html.escape(title), body=body))
    return run.report


def _metrics_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for key, (value, step) in sorted(last_values(rows).items()):
        unit, text = metrics.describe(key)
        cells = f"<td>{html.escape(key)}</td><td class=n>{html.escape(_cell(value))}</td>"
        lines.append(f"<tr>{cells}<td>{unit}</td><td class=n>{step}</td><td>{text}</td></tr>")
    head = "<tr><th>metric</th><th>value</th><th>unit</th><th>step</th><th>what it is</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>" if lines else "<p>none yet</p>"


def _samples_table(run: rundir.RunDir) -> str:
    """The newest file of samples/, as a table of whatever fields its lines have."""
    files = sorted(run.folder("samples").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        return "<p>none yet</p>"
    samples = [
        json.loads(line) for line in files[-1].read_text(encoding="utf-8").split("\n") if line
    ]
    names = list(dict.fromkeys(name for sample in samples[:_SAMPLES] for name in sample))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = []
    for sample in samples[:_SAMPLES]:
        texts = (_cell(sample.get(name))[:_TEXT] for name in names)
        lines.append("".join(f"<td><pre>{html.escape(text)}</pre></td>" for text in texts))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<p>{html.escape(files[-1].name)}</p><table><tr>{head}</tr>{body}</table>"


def _config_table(config: Mapping[str, Any]) -> str:
    lines = []
    for name, value in config.items():
        fields = value if isinstance(value, dict) else {None: value}
        for field, item in fields.items():
            path = html.escape(name if field is None else f"{name}.{field}")
            lines.append(f"<tr><td>{path}</td><td>{html.escape(json.dumps(item))}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


def _image(path: pathlib.Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{path.stem}" src="data:image/png;base64,{data}"></p>'


def _cell(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2:
        return f"{_cell(value[0])} -> {_cell(value[1])}"
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spread(values: Sequence[Any]) -> str:
    finite = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    if not finite:
        return "-"
    mean, spread = plots.mean_spread(finite)
    return f"{mean:.4g}" if spread is None else f"{mean:.4g} ± {spread:.2g}"
