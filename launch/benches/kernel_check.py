"""One op in a process of its own, asked line by line by `launch/gpu_check.py`.

    python -m launch.benches.kernel_check <package>

A request is a line of JSON, an answer is one that starts with MARK: whatever else compilers print
is none. What a process dies of is then the failure of one request alone.
"""

import functools
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from launch.benches import ceilings
from launch.benches.device_time import kernel_seconds_per_call, seconds_per_call
from pallas_kernels import catalogue
from pallas_kernels.common import device, impls
from pallas_kernels.common.bench import Bench

MARK = "@answer "
EXPECTED = (ValueError, TypeError, NotImplementedError, RuntimeError)  # the last is XLA's too
_CACHE = 2**29  # bytes: several times the caches of an H200 (50 MB) or B200 (126 MB)
_FLOPS = 2e13  # of a reference that is run: some seconds in float32
_EVERY = dict.fromkeys(("xla", "triton", "mosaic_gpu", "mosaic_tpu"))

Row = dict[str, Any]


def main(package: str) -> None:
    """Answers requests until there are no more."""
    jax.devices()  # takes seconds: before the first request
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _ANSWERS[request.pop("ask")](package, **request)
        except EXPECTED as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            # after an error of the device everything in its process fails: the next item gets a new
            answer["ends"] = isinstance(error, RuntimeError) and not isinstance(
                error, NotImplementedError
            )
        print(MARK + json.dumps(answer), flush=True)
        if isinstance(answer, dict) and answer.get("ends"):
            return


def facts(package: str) -> Row:
    """The device, what it can run and its ceilings."""
    chosen, current = jax.devices()[0], device.current()
    return {
        "jax": jax.__version__,
        "device": chosen.device_kind,
        "platform": current.platform,
        "capability": current.capability,
        "impls": [impl for impl in impls.IMPLS if _runs(impl)],
        "ceilings": ceilings.measure(),
    }


def cases(package: str, op: str) -> list[Row]:
    """What there is to check of an op here."""
    found = []
    for bench in catalogue.benches(op, package):
        names = [here(impl, bench.small) for impl in bench.impls]
        row = {"op": op, "case": bench.case, "small": bench.small, "bytes": bench.cost.bytes}
        found += [row | {"impl": impl} for impl in dict.fromkeys(filter(None, names))]
    return found


def check(package: str, op: str, case: str, impl: str) -> Row:
    """Result, time and shares of the ceilings (those are the asker's) of one case."""
    bench = catalogue.bench(op, case, package)
    call = jax.jit(bench.run(impl))
    arguments = _arguments(package, op, case, 0)
    got = jax.block_until_ready(call(*arguments))
    against, want = _expected(package, op, case)
    if impl == "xla" and against == "xla":
        row: Row = {"against": None, "error": None, "right": None}
    else:
        error = difference(got, want, exact=bench.tolerance == 0)
        right, error = error <= bench.tolerance, error if math.isfinite(error) else None
        row = {"against": against, "error": error, "right": right}
    cost = bench.cost
    row |= {"tolerance": bench.tolerance, "bytes": cost.bytes, "operations": cost.operations}
    row |= {"kind": cost.kind, "baseline_name": bench.baseline_name}
    if impls.interpreted(impl):
        return row
    del got
    seconds, kernel_seconds = _times(package, op, case, call)
    row |= {"seconds": seconds, "kernel_seconds": kernel_seconds}
    others = {"xla": _xla_times, "baseline": _baseline_times}
    for name, times in others.items():
        row[f"{name}_seconds"], row[f"{name}_kernel_seconds"] = times(package, op, case)
    return row


_ANSWERS: dict[str, Callable[..., Any]] = {"facts": facts, "cases": cases, "check": check}


def difference(got: Any, want: Any, *, exact: bool) -> float:
    """The largest |difference| / (rms of what is wanted), of all leaves; inf where NaN differ.

    Args: exact: then 0 if every bit is the same (any NaN is one), else inf.
    """
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max((_leaf_difference(a, b, exact) for a, b in pairs), default=0.0)


def _leaf_difference(got: jax.Array, want: jax.Array, exact: bool) -> float:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return math.inf
    if not got.size:
        return 0.0
    floats = jnp.issubdtype(got.dtype, jnp.floating)
    if exact or not floats:
        return 0.0 if bool(_same(got, want, floats)) else math.inf
    return float(_relative(got, want))


@functools.partial(jax.jit, static_argnums=2)
def _same(got: jax.Array, want: jax.Array, floats: bool) -> jax.Array:
    if not floats:
        return jnp.all(got == want)
    a, b = got.astype(jnp.float32), want.astype(jnp.float32)
    bits = [jax.lax.bitcast_convert_type(each, jnp.int32) for each in (a, b)]
    return jnp.all((bits[0] == bits[1]) | (jnp.isnan(a) & jnp.isnan(b)))


@jax.jit
def _relative(got: jax.Array, want: jax.Array) -> jax.Array:
    a, b = got.astype(jnp.float32), want.astype(jnp.float32)
    odd = ~(jnp.isfinite(a) & jnp.isfinite(b))
    same = jnp.all(jnp.where(odd, (a == b) | (jnp.isnan(a) & jnp.isnan(b)), True))
    gap, scale = jnp.where(odd, 0, jnp.abs(a - b)), jnp.where(odd, 0, b * b)
    rms = jnp.sqrt(jnp.mean(scale))
    share = jnp.max(gap) / jnp.where(rms == 0, 1, rms)
    return jnp.where(same, share, jnp.inf)


def _runs(impl: str) -> bool:
    if impls.interpreted(impl):
        return device.current().platform == "cpu"
    try:
        impls.choose("check", impl, _EVERY)
    except NotImplementedError:  # the very question
        return False
    return True


def here(impl: str, small: bool) -> str | None:
    """How a case that has `impl` is run on this device: on CPUs only small ones, interpreted."""
    if device.current().platform == "cpu" and not small:
        return None
    names = (impl, f"{impl}_interpret")
    return next((name for name in names if name in impls.IMPLS and _runs(name)), None)


def _arguments(package: str, op: str, case: str, seed: int) -> Any:
    return catalogue.bench(op, case, package).make(seed)


@functools.lru_cache(maxsize=1)  # the impls of a case come one after the other
def _expected(package: str, op: str, case: str) -> tuple[str, Any]:
    """The specification's result in float32; XLA's where the specification would take too long."""
    bench = catalogue.bench(op, case, package)
    arguments = _arguments(package, op, case, 0)
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(bench.reference).lower(*arguments)
        flops = (lowered.cost_analysis() or {}).get("flops", 0.0)
        if max(flops, bench.cost.operations) <= _FLOPS:
            return "reference", jax.block_until_ready(lowered.compile()(*arguments))
    return "xla", jax.block_until_ready(jax.jit(bench.run("xla"))(*arguments))


def _times(package: str, op: str, case: str, call: Callable[..., Any]) -> Any:
    bench = catalogue.bench(op, case, package)
    return _timed(bench, bench.make, call)


@functools.lru_cache(maxsize=1)
def _xla_times(package: str, op: str, case: str) -> Any:
    bench = catalogue.bench(op, case, package)
    return _timed(bench, bench.make, jax.jit(bench.run("xla")))


@functools.lru_cache(maxsize=1)
def _baseline_times(package: str, op: str, case: str) -> Any:
    bench = catalogue.bench(op, case, package)
    if bench.baseline is None:
        return None, None
    return _timed(bench, bench.baseline_make or bench.make, jax.jit(bench.baseline))


def _timed(bench: Bench, make: Callable[[int], Any], call: Callable[..., Any]) -> Any:
    sets = 1
    if device.current().platform != "cpu" and not bench.small:
        sets = min(8, max(1, math.ceil(_CACHE / max(1, bench.cost.bytes))))
    arguments = [make(seed) for seed in range(sets)]
    return seconds_per_call(call, arguments), kernel_seconds_per_call(call, arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
