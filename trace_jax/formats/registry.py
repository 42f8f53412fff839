"""Formats by name: `get("nvfp4")`, `get("nvfp4:global_rule=one")`.

Options may also be keywords: `get("nvfp4", global_rule="one")`. "4over6" is short for
"nvfp4:scale_rule=mse".
"""

import dataclasses
from typing import Any

from trace_jax.checks import require
from trace_jax.formats.base import Format
from trace_jax.formats.hif4 import HiF4
from trace_jax.formats.mxfp4 import MXFP4
from trace_jax.formats.mxfp8 import MXFP8
from trace_jax.formats.nvfp4 import NVFP4

FORMATS: dict[str, type[Format]] = {
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "hif4": HiF4,
}
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {"4over6": ("nvfp4", {"scale_rule": "mse"})}
_WORDS = {"true": True, "false": False}


def get(format: str | Format, **options: Any) -> Format:
    """A format with options, from its name, from "name:option=value,...", or as it is.

    Options in keywords win over those in the text.
    Raises: ValueError for an unknown name, option or value, naming the choices.
    """
    if isinstance(format, Format):
        return dataclasses.replace(format, **options) if options else format
    name, _, text = format.partition(":")
    need = f"one of {sorted([*FORMATS, *ALIASES])}"
    require(name in FORMATS or name in ALIASES, "format", repr(format), need)
    name, alias = ALIASES.get(name, (name, {}))
    kind = FORMATS[name]
    fields = [field.name for field in dataclasses.fields(kind)]
    given: dict[str, Any] = dict(alias)
    for pair in filter(None, text.split(",")):
        option, equals, value = pair.partition("=")
        need = f"option=value with an option of {fields}"
        require(equals == "=" and option in fields, f"format {name}", repr(pair), need)
        given[option] = _WORDS.get(value, int(value) if value.isdigit() else value)
    for option in options:
        require(option in fields, f"format {name}: option", option, f"one of {fields}")
    return kind(**{**given, **options})


def spell(format: Format) -> str:
    """The shortest text that `get` reads back as this format."""
    changed = [
        f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        for field in dataclasses.fields(format)
        if (value := getattr(format, field.name)) != field.default
    ]
    return ":".join(filter(None, (format.name, ",".join(changed))))
