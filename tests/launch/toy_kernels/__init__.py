"""Ops that the device check is tried on: each doubles 64 numbers, or fails to."""

import jax.numpy as jnp

from pallas_kernels.common.bench import Bench
from pallas_kernels.common.cost import Cost


def benches(op, kernel):
    """A small and a real case; plain XLA is right, `kernel` is what the op is named for."""
    return tuple(
        Bench(
            op=op,
            case=case,
            impls=("xla", "triton"),
            cost=Cost(read=256, written=256, operations=64),
            make=lambda seed: (jnp.arange(64, dtype=jnp.float32) + jnp.float32(seed),),
            run=lambda impl: _double if impl == "xla" else kernel,
            reference=_double,
            tolerance=1e-6,
            baseline=_double,
            baseline_name="the same",
            small=case == "small",
        )
        for case in ("small", "real")
    )


def _double(x):
    return x * 2
