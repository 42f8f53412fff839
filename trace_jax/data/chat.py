"""Chat templates: jinja2 from a checkpoint, rendered in a sandbox as Hugging Face renders them.

A template is not trusted code, and text is not trusted markup: literals of added tokens in a text
are cut where a mark stands, and the caller encodes the pieces apart.
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
import jinja2.sandbox

from trace_jax.checks import message, require

ROLES = ("system", "user", "assistant")
# What templates call the switch; DeepSeek's say `thinking`, all others seen `enable_thinking`.
SWITCHES = ("enable_thinking", "thinking")

# Noncharacters: never in valid text files, and no tokenizer knows them. They mark where a literal
# is cut while the template is rendered.
_MARKS = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))


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
    Raises: ValueError if the template has no such switch; jinja2's errors as they are.
    """
    switches = {}
    if thinking is not None:
        name = thinking_switch(template)
        fix = "data.thinking=none (no --thinking or --nothinking): its one way"
        where, need = "chat template", f"one that reads {' or '.join(SWITCHES)}"
        require(name is not None, where, f"thinking={thinking} and no switch", need, fix)
        switches = {str(name): thinking}
    values = {"messages": [dict(m) for m in messages], "tools": None, "documents": None}
    values |= {"add_generation_prompt": generation_prompt, **special, **switches}
    return _compiled(template).render(values)


def thinking_switch(template: str) -> str | None:
    """The variable by which the template turns thinking on and off; None if it reads none."""
    variables = jinja2.meta.find_undeclared_variables(_environment().parse(template))
    return next((name for name in SWITCHES if name in variables), None)


def turn_end(template: str, special: Mapping[str, str]) -> str:
    """What the template writes after the words of an answer; "" if it renders no answer."""
    answer = "\ufdee answer \ufdef"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = render(template, messages, special, generation_prompt=False)
    except (jinja2.TemplateError, TypeError):  # it wants other conversations than this one
        return ""
    _, found, after = text.rpartition(answer[-1])
    return after if found else ""


def check_syntax(template: str, where: str) -> str:
    """The template itself. Raises: ValueError if jinja2 cannot read it."""
    try:
        _environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(message(where, f"line {error.lineno}: {error}", "jinja2")) from error
    return template


def free_mark(texts: Sequence[str]) -> str:
    """A mark that is in none of the texts."""
    mark = next((c for c in _MARKS if not any(c in text for text in texts)), "")
    assert mark, "texts that hold all 32 noncharacters"
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


def read_template(directory: pathlib.Path, config: Mapping[str, object]) -> str:
    """The template of a checkpoint: of `chat_template.jinja`, else .json, else the config.

    Raises: ValueError if there is none, or jinja2 cannot read it.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        return check_syntax(path.read_text(encoding="utf-8"), str(path))
    path = directory / "chat_template.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    else:
        path = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {t["name"]: t["template"] for t in template}.get("default")
    require(
        isinstance(template, str),
        str(path),
        "no chat_template",
        "one, or a file chat_template.jinja beside it",
        "a base model has none: write a template such as '{{ messages[-1].content }}'",
    )
    return check_syntax(str(template), str(path))


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
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
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
