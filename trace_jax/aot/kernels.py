"""Kernels of `pallas_kernels` as jobs for `compile.py`: one case of an op, as one of its impls."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import catalogue
from trace_jax.aot import targets


def kernel(
    topology: targets.Topology, op: str, case: str, impl: str
) -> tuple[Callable, tuple[Any, ...]]:
    """Builder: a case as `impl`. The process that compiles it describes the device to the op."""
    found = catalogue.bench(op, case)
    return found.run(impl), _placed(topology, jax.eval_shape(lambda: found.make(0)))


def gradient(
    topology: targets.Topology, op: str, case: str, impl: str
) -> tuple[Callable, tuple[Any, ...]]:
    """Builder: forward and backward of a case, to all its arguments of BF16 or float32."""
    found = catalogue.bench(op, case)
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


def _one(x: jax.Array) -> Any:
    """A cotangent: not all ones, which would let XLA fold products."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(x.shape, jax.dtypes.float0)
    return jnp.sin(x)


def _placed(topology: targets.Topology, arguments: Any) -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=topology.sharding), arguments
    )
