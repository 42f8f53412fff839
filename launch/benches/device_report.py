"""What `launch/gpu_check.py` makes of the answers: order, shares of ceilings, targets, text."""

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
_LAUNCHED = 3e7  # bytes: what is smaller takes less time than its launch, and has no bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What the kernels of some cases shall reach."""

    name: str
    op: str
    case: str  # part of the cases' names
    quantity: str  # of a row
    least: float


TARGETS = (
    Target(
        name="quantisers: share of copy bandwidth",
        op="quantize",
        case="",
        quantity="copy_share",
        least=0.8,
    ),
    Target(
        name="fake-quant: share of copy bandwidth",
        op="fake_quant",
        case="",
        quantity="copy_share",
        least=0.8,
    ),
    Target(
        name="W4A16 grouped, 1 to 16 tokens an expert: share of copy bandwidth",
        op="fp4_grouped_matmul",
        case="decode",
        quantity="copy_share",
        least=0.7,
    ),
    Target(
        name="W4A16 grouped, 1 to 16 tokens an expert: times faster than BF16",
        op="fp4_grouped_matmul",
        case="decode",
        quantity="baseline_ratio",
        least=3.0,
    ),
)


def by_importance(items: Sequence[Row]) -> list[Row]:
    """Targets, then other kernels, then plain XLA; within each, ops take turns, and real sizes
    with small ones: these are the odd shapes."""

    def rank(item: Row) -> int:
        if item["impl"] == "xla":
            return 2
        return 0 if any(_concerns(target, item) for target in TARGETS) else 1

    ordered = []
    for wanted in range(3):
        chosen = [item for item in items if rank(item) == wanted]
        queues: dict[tuple[bool, str], list[Row]] = {}
        for item in sorted(chosen, key=lambda item: item["small"]):
            queues.setdefault((item["small"], item["op"]), []).append(item)
        turns = itertools.zip_longest(*queues.values())
        ordered += [item for turn in turns for item in turn if item is not None]
    return ordered


def shares(row: Row, facts: Row) -> Row:
    """Adds how much of the ceilings a timed row reached, and its ratios to XLA and BF16."""
    took = _best(row, "")
    if took is None:
        return row
    found: Row = {"gb_s": row["bytes"] / took / 1e9}
    ceilings = facts.get("ceilings", {})
    if "copy" in ceilings:
        found["copy_share"] = row["bytes"] / took / ceilings["copy"]
    compute = ceilings.get("compute", {}).get(row["kind"])
    if compute:
        found["compute_share"] = row["operations"] / took / compute
    for name in ("xla", "baseline"):
        other = _best(row, f"{name}_")
        if other is not None:
            found[f"{name}_ratio"] = other / took
    return row | found


def targets(report: Row) -> list[Row]:
    """Each target with its verdict: "pass", "fail" or "not measured", and its worst case."""
    found = []
    for target in TARGETS:
        rows = [row for row in report["rows"] if _concerns(target, row) and row["impl"] != "xla"]
        failed = [row for row in rows if not is_right(row)]
        values = {row["case"]: row[target.quantity] for row in rows if row.get(target.quantity)}
        worst = min(values, key=values.__getitem__, default=None)
        verdict = "not measured"
        if report["facts"].get("platform") == "cuda" and (values or failed):
            reached = not failed and min(values.values()) >= target.least
            verdict = "pass" if reached else "fail"
        value = None if worst is None or verdict == "not measured" else values[worst]
        found.append(
            dataclasses.asdict(target) | {"verdict": verdict, "worst": worst, "value": value}
        )
    return found


def is_right(row: Row) -> bool:
    """It ran, and its result is that of the specification (or it is what others are held to)."""
    return "failed" not in row and row.get("right") is not False


def all_right(report: Row) -> bool:
    """Nothing that ran failed, and something ran. Missed targets are no errors."""
    rows = report["rows"]
    return "failed" not in report["facts"] and bool(rows) and all(map(is_right, rows))


def facts(found: Row) -> str:
    """The device and its ceilings in a few lines."""
    if "failed" in found:
        return f"ceilings: FAILED {found['failed']}"
    ceilings = found["ceilings"]
    lines = [f"{found['device']}  jax {found['jax']}  runs {', '.join(found['impls'])}"]
    lines.append(f"copy {ceilings['copy'] / 1e9:.0f} GB/s")
    lines += [f"{kind} {value / 1e12:.1f} T/s" for kind, value in ceilings["compute"].items()]
    lines += [f"{kind} not measured: {why}" for kind, why in ceilings["not_measured"].items()]
    return "\n".join(lines)


def line(row: Row) -> str:
    """One item in one line, or more where it failed."""
    name = f"{row['op']:<24} {row['case']:<28} {row['impl']:<20}"
    if "failed" in row:
        return f"{name} FAILED {row['failed']}"
    verdict = "wrong" if row["right"] is False else "right" if row["right"] else "ran"
    parts = [f"{name} {verdict:<5}"]
    if row["error"] is not None:
        parts.append(f"error {row['error']:.1e} of {row['tolerance']:.1e} ({row['against']})")
    took = _best(row, "")
    if took is not None:
        parts.append(f"{took * 1e6:.0f} us  {row['gb_s']:.0f} GB/s")
        parts += [f"{row[key]:.0%} of {what}" for key, what in _SHARES.items() if key in row]
        parts += [f"{row[key]:.2f}x {what}" for key, what in _RATIOS.items() if key in row]
    return "  ".join(parts)


_SHARES = {"copy_share": "copy", "compute_share": "compute"}
_RATIOS = {"xla_ratio": "XLA", "baseline_ratio": "BF16"}


def summary(report: Row, path: str) -> str:
    """Counts, targets, and what was left out."""
    rows = report["rows"]
    failed = [row for row in rows if not is_right(row)]
    lines = [f"\n{len(rows)} ran, {len(failed)} failed, {len(report['no_time'])} had no time"]
    lines += [f"failed: {row['op']} {row['case']} {row['impl']}" for row in failed]
    lines += [f"no time: {row['op']} {row['case']} {row['impl']}" for row in report["no_time"]]
    for target in report["targets"]:
        value = "" if target["value"] is None else f" {target['value']:.2f} ({target['worst']})"
        lines.append(f"{target['verdict']}: {target['name']} >= {target['least']}{value}")
    return "\n".join([*lines, f"written to {path}"])


def write(report: Row, path: str) -> None:
    """The whole report; a reader never sees half of it."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.part")
    beside.write_text(json.dumps(report, indent=1), encoding="utf-8")
    os.replace(beside, target)


def _concerns(target: Target, row: Row) -> bool:
    large = not row.get("small", True) and row.get("bytes", 0) >= _LAUNCHED
    return large and row["op"] == target.op and target.case in row["case"]


def _best(row: Row, prefix: str) -> float | None:
    """Seconds of the kernels alone if the profiler saw them, else as a caller waits for them."""
    return row.get(f"{prefix}kernel_seconds") or row.get(f"{prefix}seconds")
