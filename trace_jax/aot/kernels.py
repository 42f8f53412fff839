"""Kernels of `pallas_kernels` as jobs for `compile.py`: one case of an op, as one of its impls."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.common.bench import Bench
from trace_jax.aot import targets
from trace_jax.checks import require


def ops() -> tuple[str, ...]:
    """Folders of `pallas_kernels` that have a `bench.py`."""
    folders = [found.name for found in pkgutil.iter_modules(pallas_kernels.__path__) if found.ispkg]
    names = (name for name in folders if importlib.util.find_spec(_module(name)) is not None)
    return tuple(sorted(names))


def benches(op: str) -> tuple[Bench, ...]:
    """The cases of an op. Raises: ValueError for an op that has none."""
    require(op in ops(), "kernels: op", op, f"one of {list(ops())}")
    return importlib.import_module(_module(op)).BENCHES


def bench(op: str, case: str) -> Bench:
    """One case of an op by name. Raises: ValueError for an unknown one."""
    found = {bench.case: bench for bench in benches(op)}
    require(case in found, f"kernels: case of {op}", case, f"one of {list(found)}")
    return found[case]


def kernel(
    topology: targets.Topology, op: str, case: str, impl: str
) -> tuple[Callable, tuple[Any, ...]]:
    """Builder: a case as `impl`. The process that compiles it describes the device to the op."""
    found = bench(op, case)
    return found.run(impl), _placed(topology, jax.eval_shape(lambda: found.make(0)))


def gradient(
    topology: targets.Topology, op: str, case: str, impl: str
) -> tuple[Callable, tuple[Any, ...]]:
    """Builder: forward and backward of a case, to all its arguments of BF16 or float32."""
    found = bench(op, case)
    arguments = jax.eval_shape(lambda: found.make(0))
    leaves, tree = jax.tree.flatten(arguments)
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def pull(*arguments: Any) -> Any:
        fixed = jax.tree.leaves(arguments)

        def forward(*some: jax.Array) -> Any:
            mixed = list(fixed)
            for i, leaf in zip(moving, some, strict=True):
                mixed[i] = leaf
            return found.run(impl)(*jax.tree.unflatten(tree, mixed))

        result, back = jax.vjp(forward, *(fixed[i] for i in moving))
        return back(jax.tree.map(_one, result))

    return pull, _placed(topology, arguments)


def _module(op: str) -> str:
    return f"pallas_kernels.{op}.bench"


def _one(x: jax.Array) -> Any:
    """A cotangent: not all ones, which would let XLA fold products."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(x.shape, jax.dtypes.float0)
    return jnp.sin(x)


def _placed(topology: targets.Topology, arguments: Any) -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=topology.sharding), arguments
    )
