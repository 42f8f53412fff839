"""Roofline of every kernel: the least time on each device, and the time measured on this one."""

import functools
import importlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax

from launch.benches import ceilings, kernel_check
from launch.benches.timing import Row, in_turn
from pallas_kernels import catalogue
from pallas_kernels.common import impls
from pallas_kernels.common.bench import Bench
from pallas_kernels.common.cost import CEILINGS

EXPERTS = (8, 32, 128)
DENSE = "dense einsum"  # computes every expert for every row: forward only, it shows
ACTIVE = 8  # experts with rows: the same active work, whatever the number of experts
ROWS = 2048  # sorted by expert
HEADER = "bounds: least us on each device, m: of memory, c: of compute"


def run(repeats: int) -> Iterator[Row]:
    """A row for each case; then our plain XLA path against its peers on grouped matmuls.

    `bounds` are of the makers' peaks. Measured is what this device can run: on a CPU plain XLA, on
    the small cases; None elsewhere. Shares are of this device's measured copy bandwidth.
    """
    copy = ceilings.copy_bandwidth()
    for op in catalogue.OPS:
        for bench in catalogue.benches(op):
            yield _row(bench, repeats, copy)
    for experts in EXPERTS:
        yield from _peers(experts, ACTIVE, repeats)
    yield from _peers(EXPERTS[-1], EXPERTS[-1], repeats)


def line(row: Row) -> str:
    """A case with its bounds, and what was measured below; or a peer's row."""
    if "bounds" not in row:
        return f"{row['name']:<52} {row['seconds'] * 1e3:9.2f} ms  {_ratio(row)} of {row['peer']}"
    bounds = "  ".join(
        f"{name} {1e6 * bound['seconds']:.3g}{bound['by'][0]}"
        for name, bound in row["bounds"].items()
    )
    sizes = f"{row['bytes'] / 1e6:.4g} MB {row['operations'] / 1e9:.4g} Gop {row['kind']}"
    lines = [f"{row['name']:<44} {sizes:<28} {bounds}"]
    for impl, found in row["measured"].items():
        if found is not None:
            text = f"    {impl}: {found['seconds'] * 1e3:.3f} ms, {found['gb_s']:.2f} GB/s"
            text += f", {found['copy_share']:.0%} of copy"
            lines.append(text + (f", {found['ratio']:.2f} of {row['peer']}" if row["peer"] else ""))
    unmeasured = [impl for impl, found in row["measured"].items() if found is None]
    if unmeasured:
        lines.append(f"    not measured: {', '.join(unmeasured)}")
    return "\n".join(lines)


def _peers(experts: int, active: int, repeats: int) -> Iterator[Row]:
    """Our plain XLA path for the trainer's grouped matmul against each peer, call by call."""
    grouped = importlib.import_module("pallas_kernels.fp4_grouped_matmul.bench")
    found = grouped.peers(experts, ROWS, active)
    pulled = {name: (_pull(call), given) for name, (call, given) in found.items() if name != DENSE}
    for what, calls in (("forward", found), ("forward and backward", pulled)):
        jitted = [functools.partial(jax.jit(call), *given) for call, given in calls.values()]
        ours, *others = in_turn(jitted, repeats)
        for name, theirs in zip(list(calls)[1:], others, strict=True):
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            yield {
                "name": f"grouped matmul, {active} of {experts} experts, {what}",
                "seconds": statistics.median(ours),
                "peer": name,
                "peer_seconds": statistics.median(theirs),
                "ratio": statistics.median(ratios),
                "ratio_range": (min(ratios), max(ratios)),
                "repeats": repeats,
            }


def _pull(call: Callable[..., Any]) -> Callable[..., Any]:
    """The result and the gradients to rows and matrices."""

    def pulled(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        y, back = jax.vjp(lambda x, w: call(x, w, sizes), x, w)
        return y, back(y)

    return pulled


def _ratio(row: Row) -> str:
    low, high = row["ratio_range"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _row(bench: Bench, repeats: int, copy: float) -> Row:
    cost = bench.cost
    found: Row = {
        "name": f"{bench.op} {bench.case}",
        "bytes": cost.bytes,
        "operations": cost.operations,
        "kind": cost.kind,
        "bounds": {
            name: dict(zip(("seconds", "by"), ceiling.bound(cost), strict=True))
            for name, ceiling in CEILINGS.items()
        },
        "measured": dict.fromkeys(bench.impls),
        "peer": bench.baseline_name,
        "peer_seconds": None,
        "repeats": repeats,
    }
    timed = [impl for impl in bench.impls if _is_timed(bench, impl)]
    if not timed:
        return found
    arguments = bench.make(0)
    calls = [functools.partial(jax.jit(bench.run(impl)), *arguments) for impl in timed]
    if bench.baseline is not None:
        theirs = (bench.baseline_make or bench.make)(0)
        calls.append(functools.partial(jax.jit(bench.baseline), *theirs))
    times = in_turn(calls, repeats)
    if bench.baseline is not None:
        found["peer_seconds"] = statistics.median(times[-1])
    for impl, ours in zip(timed, times, strict=False):
        took = statistics.median(ours)
        measured = {"seconds": took, "gb_s": cost.bytes / took / 1e9}
        measured["copy_share"] = cost.bytes / took / copy
        if bench.baseline is not None:
            pairs = zip(ours, times[-1], strict=True)
            measured["ratio"] = statistics.median(a / b for a, b in pairs)
        found["measured"][impl] = measured
    return found


def _is_timed(bench: Bench, impl: str) -> bool:
    """A kernel that this device runs as it is, not step by step."""
    here = kernel_check.here(impl, bench.small)
    return here is not None and not impls.interpreted(here)
