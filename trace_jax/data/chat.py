"""Chat templates: jinja2 from a checkpoint, rendered in a sandbox as Hugging Face renders them.

A template is not trusted code (`sandbox.py`), and text is not trusted markup: literals of added
tokens in a text are cut where a mark stands, and the caller encodes the pieces apart.
"""

import datetime
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes

from trace_jax.checks import message, require
from trace_jax.data import sandbox

ROLES = ("system", "user", "assistant")
# What templates call the switch; DeepSeek's say `thinking`, all others seen `enable_thinking`.
SWITCHES = ("enable_thinking", "thinking")

# The 66 noncharacters of Unicode: rare in text, and no tokenizer knows them. One that is not in the
# text marks where a literal is cut while the template is rendered.
_NONCHARACTERS = (
    *range(0xFDD0, 0xFDF0),
    *(plane + end for plane in range(0, 17 << 16, 1 << 16) for end in (0xFFFE, 0xFFFF)),
)
_MARKS = tuple(map(chr, _NONCHARACTERS))


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    special: Mapping[str, str],
    *,
    thinking: bool | None = None,
    generation_prompt: bool = True,
) -> str:
    """The conversation as text, ready for the answer.

    Args:   thinking: switches thinking on or off; None leaves it to the template.
    Raises: ValueError if the template has no such switch, or fails on this conversation, or needs
            more memory or steps than `sandbox` allows.
    """
    switches = {}
    if thinking is not None:
        name = thinking_switch(template)
        fix = "leave the switch out (generate: no --thinking or --nothinking; data.thinking=none)"
        where, need = "chat template", f"one that reads {' or '.join(SWITCHES)}"
        require(name is not None, where, f"thinking={thinking} and no switch", need, fix)
        switches = {str(name): thinking}
    values = {"messages": [dict(m) for m in messages], "tools": None, "documents": None}
    values |= {"add_generation_prompt": generation_prompt, **special, **switches}
    try:
        return _rendered(template, values)
    except Exception as error:  # whatever a template that is not ours makes Python raise
        got = str(error) or type(error).__name__
        need, fix = "a template that renders this conversation", "correct chat_template"
        if messages and messages[0]["role"] == "system" and _renders(template, values):
            got, fix = f"a system prompt, refused with {got!r}", "leave the system prompt out"
        raise ValueError(message("chat template", got, need, fix)) from error


def _renders(template: str, values: Mapping[str, Any]) -> bool:
    """Whether all but the first message would do."""
    try:
        _rendered(template, {**values, "messages": values["messages"][1:]})
    except Exception:  # as above
        return False
    return True


def _rendered(template: str, values: Mapping[str, Any]) -> str:
    with sandbox.budget(sum(len(m["content"]) for m in values["messages"])):
        return _compiled(template).render(values)


def thinking_switch(template: str) -> str | None:
    """The variable by which the template turns thinking on and off; None if it reads none."""
    try:
        variables = jinja2.meta.find_undeclared_variables(_environment().parse(template))
    except Exception as error:  # as in `render`; loading has compiled it, unless it was set by hand
        raise ValueError(message("chat template", error, "jinja2")) from error
    return next((name for name in SWITCHES if name in variables), None)


def turn_end(template: str, special: Mapping[str, str]) -> str:
    """What the template writes after the words of an answer; "" if it renders no answer."""
    answer = "\ufdee answer \ufdef"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = render(template, messages, special, generation_prompt=False)
    except ValueError:  # it wants other conversations than this one
        return ""
    _, found, after = text.rpartition(answer[-1])
    return after if found else ""


def check_syntax(template: str, where: str) -> str:
    """The template itself. Raises: ValueError if jinja2 cannot read or compile it."""
    try:
        _compiled(template)
    except Exception as error:  # jinja2's own, RecursionError, whatever Python's compiler raises
        line = getattr(error, "lineno", None)
        got = f"{'' if line is None else f'line {line}: '}{error or type(error).__name__}"
        raise ValueError(message(where, got, "jinja2")) from error
    return template


def free_mark(texts: Sequence[str]) -> str:
    """A mark that is in none of the texts. Raises: ValueError if they hold them all."""
    mark = next((c for c in _MARKS if not any(c in text for text in texts)), "")
    need = "texts without one of them, to mark places with"
    require(bool(mark), "chat template", f"all {len(_MARKS)} noncharacters of Unicode", need)
    return mark


def break_literals(text: str, literals: Sequence[str]) -> list[str]:
    """Cuts `text` inside every literal, after its first character, so that none survives whole."""
    if not any(literal in text for literal in literals):
        return [text]
    longest_first = sorted((x for x in literals if x), key=len, reverse=True)
    # A lookahead finds overlapping literals too; a one-character literal cannot be cut.
    pattern = re.compile("(?=" + "|".join(map(re.escape, longest_first)) + ")")
    cuts = [found.start() + 1 for found in pattern.finditer(text)]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read_template(directory: pathlib.Path, config: Mapping[str, object]) -> str | None:
    """The template of a checkpoint: of `chat_template.jinja`, else .json, else the config.

    None if there is none: base models come without, and encoding text needs none.

    Raises: ValueError if jinja2 cannot read it, or a file is malformed.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return check_syntax(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise ValueError(message(str(path), error, "UTF-8")) from error
    path = directory / "chat_template.json"
    if path.is_file():
        config = read_object(path)
    else:
        path = directory / "tokenizer_config.json"
    template, need = config.get("chat_template"), 'a string, or a list of {"name", "template"}'
    if isinstance(template, list):  # several named ones
        good = all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in template)
        require(good, f"{path}: chat_template", template, need)
        template = {str(t["name"]): t["template"] for t in template}.get("default")
    if template is None:
        return None
    require(isinstance(template, str), f"{path}: chat_template", template, need)
    return check_syntax(str(template), str(path))


def read_object(path: pathlib.Path) -> dict[str, object]:
    """The JSON object of a file; {} if there is none. Raises: ValueError naming the file."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8
        raise ValueError(message(str(path), error, "a JSON object")) from error
    require(isinstance(loaded, dict), str(path), type(loaded).__name__, "a JSON object")
    return loaded


def require_template(template: str | None, where: str) -> str:
    """The template. Raises: ValueError if there is none."""
    fix = "a base model has none: write a template such as '{{ messages[-1].content }}'"
    need = "one, or a file chat_template.jinja beside it"
    require(template is not None, where, "no chat_template", need, fix)
    return str(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own interface

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict(...)` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _raise_exception(text: str) -> None:
    raise jinja2.TemplateError(text)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(layout: str) -> str:
    """Today; `SOURCE_DATE_EPOCH` (seconds) pins it, so that a run is the same tomorrow."""
    pinned = os.environ.get("SOURCE_DATE_EPOCH")
    if pinned is not None:
        return datetime.datetime.fromtimestamp(int(pinned), datetime.UTC).strftime(layout)
    return datetime.datetime.now().strftime(layout)


@functools.cache
def _environment() -> sandbox.Environment:
    environment = sandbox.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.bounded("tojson", _tojson)
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
    }
    environment.globals.update(helpers)
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)
