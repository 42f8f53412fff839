"""Parameters of which only some run by default."""

from collections.abc import Iterable

import pytest


def all_but(names: Iterable[str], slow: Iterable[str]) -> list:
    """The names as parameters; those in `slow` take the time of `make test-slow`."""
    slow = tuple(slow)
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def only(names: Iterable[str], fast: Iterable[str]) -> list:
    """The names as parameters; those not in `fast` take the time of `make test-slow`."""
    names, fast = tuple(names), tuple(fast)
    return all_but(names, [name for name in names if name not in fast])
