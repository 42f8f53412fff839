"""Ops of a sampler have no gradient, and say so: through codes it would be zero, silently."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from trace_jax.checks import message


def refused(op: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """`run(*arguments)`, pytrees of arrays; differentiating it raises NotImplementedError."""
    leaves, tree = jax.tree.flatten(arguments)  # a tangent of codes is no `Packed`
    return _opaque(op, lambda *leaves: run(*jax.tree.unflatten(tree, leaves)), *leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _opaque(op: str, run: Callable[..., Any], *leaves: jax.Array) -> Any:
    del op
    return run(*leaves)


def _refuse(op: str, *_: Any) -> NoReturn:
    raise NotImplementedError(
        message(
            op,
            "a derivative",
            "none: codes have no gradient",
            "train with fake quantisation, and keep sampling outside of jax.grad (or under "
            "jax.lax.stop_gradient on all its inputs)",
        )
    )


_opaque.defjvp(_refuse)
