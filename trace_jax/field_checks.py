"""Types and bounds of the fields of a configuration section."""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args, get_origin

from trace_jax.checks import require


def is_a(value: object, annotation: object) -> bool:
    """Whether `value` has the declared type. A float is finite and may be written as an int."""
    if isinstance(annotation, types.UnionType):
        return any(is_a(value, choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis:
            return all(is_a(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(is_a, value, items))
    if isinstance(value, bool):
        return annotation is bool
    if annotation is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, cast(type, annotation))


def type_name(annotation: object) -> str:
    """The declared type as the source writes it: `int`, `float | None`."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def check(
    section: Any,
    where: str,
    *,
    choices: Mapping[str, tuple[Any, ...]] | None = None,
    least: Mapping[str, int | float] | None = None,
    above: Mapping[str, int | float] | None = None,
    most: Mapping[str, int | float] | None = None,
    below: Mapping[str, int | float] | None = None,
) -> None:
    """Every field has its declared type, and where one is given its choices and bounds."""
    for field in dataclasses.fields(section):
        value, at = getattr(section, field.name), f"{where}.{field.name}"
        need = type_name(field.type)
        need = f"{need} (finite)" if "float" in need else need
        require(is_a(value, field.type), at, repr(value), need)
        if field.type in (float, float | None) and type(value) is int:
            object.__setattr__(section, field.name, float(value))  # frozen, but not yet seen

    def bound(
        limits: Mapping[str, Any] | None, holds: Callable[[Any, Any], bool], need: str
    ) -> None:
        for name, limit in (limits or {}).items():
            value = getattr(section, name)
            good = value is None or holds(value, limit)
            require(good, f"{where}.{name}", value, need.format(limit))

    bound(choices, lambda value, limit: value in limit, "one of {}")
    bound(least, lambda value, limit: value >= limit, ">= {}")
    bound(above, lambda value, limit: value > limit, "> {}")
    bound(most, lambda value, limit: value <= limit, "<= {}")
    bound(below, lambda value, limit: value < limit, "< {}")
