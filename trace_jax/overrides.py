"""Configurations from files, from JSON and from the command line.

`load` runs a file of `configs/`; `override` applies `section.field=value` strings by declared type;
`to_dict` and `from_dict` are an exact JSON round trip, for the run directory.
"""

import dataclasses
import importlib.util
import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from trace_jax.checks import message, require
from trace_jax.config import Config
from trace_jax.field_checks import type_name

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def to_dict(config: Config) -> dict[str, Any]:
    """`config` as plain JSON values: dicts, lists, numbers, strings and None."""
    return json.loads(json.dumps(dataclasses.asdict(config), allow_nan=False))


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`. A missing field takes its default.

    Raises:  ValueError for an unknown field or a value that validation refuses.
    """
    return _build(Config, values, "config")


def override(config: Config, assignments: Sequence[str]) -> Config:
    """`config` with every `section.field=value` of `assignments` applied.

    A value is read by the type its field declares; `none` is None where the type allows it, also
    for a whole section (`warm_start=none`); setting a field of a section that is off turns it on.
    All apply at once before validation runs, so their order does not matter.

    Raises:  ValueError for an unknown field, a value of the wrong type, one field set twice, or a
             result that validation refuses.
    """
    values = to_dict(config)
    given: list[str] = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        path = path.strip()
        require(equals == "=", f"--set {assignment}", "no '='", "section.field=value")
        clash = next((old for old in given if f"{old}.".startswith(f"{path}.")), None)
        clash = clash or next((old for old in given if f"{path}.".startswith(f"{old}.")), None)
        require(clash is None, f"--set {path}", f"{clash} as well", "each field once")
        given.append(path)
        _assign(values, path, text)
    if "data.task" in given and "data.task_args" not in given:
        values["data"]["task_args"] = ()  # those of the task that was there before
    return from_dict(values)


def load(path: str | pathlib.Path) -> Config:
    """What `get_config()` of a Python file returns; a bare name means the file in `configs/`.

    Raises:  FileNotFoundError, listing the configurations that exist; ValueError if the file gives
             no `Config`.
    """
    file = pathlib.Path(path)
    if not file.suffix and file.parent == pathlib.Path("."):
        file = CONFIGS / f"{file.name}.py"
    if not file.is_file():
        folder = file.parent if any(file.parent.glob("*.py")) else CONFIGS
        choices = sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")
        raise FileNotFoundError(
            message("--config", f"{path}, which is no file", f"one of {choices} in {folder}")
        )
    require(file.suffix == ".py", "--config", path, "a Python file with get_config()")
    spec = importlib.util.spec_from_file_location(f"trace_jax_config_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # it is a .py file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    require(callable(get_config), f"--config {path}", "no get_config", "def get_config() -> Config")
    config = module.get_config()
    require(
        isinstance(config, Config),
        f"--config {path}",
        f"a {type(config).__name__} from get_config()",
        "a trace_jax.config.Config",
    )
    return config


def _build(cls: Any, values: Any, where: str) -> Any:
    """An instance of the dataclass `cls`, its sections built first."""
    require(isinstance(values, Mapping), where, repr(values), f"the fields of {cls.__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        require(name in fields, where, name, f"one of {list(fields)}")
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING
        has_default |= field.default_factory is not dataclasses.MISSING
        require(name in values or has_default, where, f"no {name}", f"a {type_name(field.type)}")
    built = {}
    for name, value in values.items():
        section = _section(fields[name].type)
        if section is None or value is None:
            built[name] = _tuples(value)
        else:
            built[name] = _build(section, value, f"{where}.{name}")
    return cls(**built)


def _section(annotation: Any) -> Any:
    """The dataclass that `annotation` is, `X | None` included; None for a plain field."""
    choices = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((choice for choice in choices if dataclasses.is_dataclass(choice)), None)


def _tuples(value: Any) -> Any:
    """Lists as tuples, at every depth: JSON has no tuple, and a frozen dataclass has no list."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _assign(values: dict[str, Any], path: str, text: str) -> None:
    """Sets one field of the plain values; `path` is `field`, `section` or `section.field`."""
    cls, here, where = Config, values, f"--set {path}"
    *sections, name = path.split(".")
    for section in sections:
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        inner = {field for field in fields if _section(fields[field]) is not None}
        require(section in inner, where, section, f"one of {sorted(inner)}")
        cls = _section(fields[section])
        if here[section] is None:
            here[section] = {}
        here = here[section]
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    require(name in fields, where, name, f"one of {list(fields)}")
    here[name] = _parse(text.strip(), fields[name], where)


def _parse(text: str, annotation: Any, where: str) -> Any:
    """`text` as a JSON value of the declared type."""
    need = type_name(annotation)
    section = _section(annotation)
    if isinstance(annotation, types.UnionType) and types.NoneType in get_args(annotation):
        if text.lower() == "none":
            return None
        annotation = next(arg for arg in get_args(annotation) if arg is not types.NoneType)
    if section is not None:
        off = "none, or " if annotation is not section or need.endswith("None") else ""
        name = where.removeprefix("--set ")
        require(False, where, repr(text), f"{off}a field of it: {name}.FIELD={text}")
    if annotation is str:
        return text
    if get_origin(annotation) is tuple:
        return _parse_pairs(text, where)
    readers = {bool: {"true": True, "false": False}.__getitem__, int: int, float: float}
    try:
        return readers[annotation](text.lower())
    except (KeyError, ValueError):  # not that type: say so in the house form
        need = "true or false" if annotation is bool else need
        raise ValueError(message(where, repr(text), need)) from None


def _parse_pairs(text: str, where: str) -> Any:
    """`key:value,key:value` or a JSON list; empty text is an empty list."""
    if text.startswith("["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(message(where, repr(text), f"a JSON list ({error})")) from None
    pairs = []
    for item in filter(None, text.split(",")):
        key, colon, value = item.partition(":")
        require(colon == ":", where, repr(item), "key:value,key:value or a JSON list")
        pairs.append([key.strip(), _scalar(value.strip())])
    return pairs


def _scalar(text: str) -> bool | int | float | str:
    """A bool, an int, a float, or failing these a string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for reader in (int, float):
        try:
            return reader(text)
        except ValueError:  # try the next type; every text is a string
            continue
    return text
