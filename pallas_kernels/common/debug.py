"""Checks of array values: sizes that do not sum up, lengths out of range, scales that are NaN.

Ops state them with `checkify.debug_check`, which does nothing and costs nothing until it is asked.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.experimental import checkify

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SUFFIX = " (`check` failed)"  # what checkify adds to a message


def checked(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """`f`, compiled with the value checks of the ops that it calls, under `jax.grad` too.

    Returns: a function of the same arguments; call it outside of `jax.jit`, since it waits for the
             device and raises. ValueError: what the first failed check says.
    """
    run = jax.jit(checkify.checkify(f, errors=checkify.user_checks))

    @functools.wraps(f)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        error, result = run(*args, **kwargs)
        said = error.get()
        if said is not None:
            raise ValueError(said.removesuffix(_SUFFIX))
        return result

    return call
