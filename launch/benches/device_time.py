"""Time of a call on the device: queued back to back, on arguments that no cache still holds."""

import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Call = Callable[..., Any]
_LONG = 0.05  # seconds of one timed round: well above what a clock and a launch cost
_ROUNDS = 3


def seconds_per_call(f: Call, arguments: Sequence[Sequence[Any]]) -> float:
    """The best of some rounds, each of many calls without waiting in between.

    Args: arguments: of one call each, used in turn: together larger than the device's cache.
    """
    for each in arguments:
        jax.block_until_ready(f(*each))
    once = _round(f, arguments, 1)
    times = min(max(1, round(_LONG / max(once, 1e-6))), 200)
    rounds = 1 if once > 10 * _LONG else _ROUNDS
    best = min(_round(f, arguments, times) for _ in range(rounds))
    return best / (times * len(arguments))


def kernel_seconds_per_call(f: Call, arguments: Sequence[Sequence[Any]]) -> float | None:
    """The same without the gaps that launching leaves, from JAX's profiler.

    Returns: seconds in which any kernel ran; None where the profiler does not see the device.
    """
    with tempfile.TemporaryDirectory(prefix="trace_jax_profile_") as folder:
        try:
            with jax.profiler.trace(folder):
                for each in arguments:
                    jax.block_until_ready(f(*each))
        except RuntimeError:  # a driver may keep its counters to itself
            return None
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return None
        busy = busy_seconds(jax.profiler.ProfileData.from_file(str(files[-1])))
    return busy / len(arguments) if busy else None


def busy_seconds(profile: Any) -> float:
    """Seconds in which at least one stream of a GPU was at work."""
    spans = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy * 1e-9


def _round(f: Call, arguments: Sequence[Sequence[Any]], times: int) -> float:
    result = None
    start = time.perf_counter()
    for _ in range(times):
        for each in arguments:
            result = f(*each)
    jax.block_until_ready(result)
    return time.perf_counter() - start
