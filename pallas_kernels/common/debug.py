"""Checks of array values: sizes that do not sum up, lengths out of range, scales that are NaN.

Ops state them with `check`. It adds nothing to a program unless `checked` traces it: JAX's own
`debug_check` would cost each call of a compiled op a tenth of a millisecond.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.experimental import checkify
from jaxtyping import Array, Bool

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ON = jax.make_user_context(default_value=False)  # programs are traced anew where it changes
_SUFFIX = " (`check` failed)"  # what checkify adds to a message


def check(holds: Bool[Array, ""], message: str, **values: Any) -> None:
    """States that `holds` is True, for whoever asks: see `checked`.

    Args: message: of `trace_jax.checks.message`'s form, with `{names}` of scalar `values`.
    """
    if _ON.value:
        checkify.check(holds, message, **values)


def checked(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """`f`, compiled with the value checks of the ops that it calls, in loops and under `jax.grad`.

    JAX loses checks in one place: a loop (`lax.scan`) that is differentiated. Check the forward.

    Returns: a function of the same arguments; call it outside of `jax.jit`, since it waits for the
             device and raises. ValueError: what the first failed check says.
    """
    run = jax.jit(checkify.checkify(f, errors=checkify.user_checks))

    @functools.wraps(f)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _ON(True):
            error, result = run(*args, **kwargs)
        said = error.get()
        if said is not None:
            raise ValueError(said.removesuffix(_SUFFIX))
        return result

    return call
