"""Paired timing: the two sides take turns, so that a drifting machine hits both alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Row = dict[str, Any]


def seconds(call: Callable[[], Any]) -> float:
    """One call, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def in_turn(calls: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each call: A B C, A B C, ... after one warm-up of each."""
    for call in calls:
        seconds(call)
    rounds = [[seconds(call) for call in calls] for _ in range(repeats)]
    return [list(times) for times in zip(*rounds, strict=True)]


def paired(name: str, call: Callable[[], Any], peer: Callable[[], Any], repeats: int) -> Row:
    """A row: medians of both, and the median and range of the ratio, pair by pair."""
    ours, theirs = in_turn([call, peer], repeats)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "name": name,
        "seconds": statistics.median(ours),
        "peer_seconds": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_range": (min(ratios), max(ratios)),
        "repeats": repeats,
    }
