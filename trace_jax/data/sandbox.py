"""jinja2 for templates that nobody has read: no way into Python, and bounds on size and steps.

jinja2's own sandbox keeps templates from attributes that lead into Python. It does not keep
`'x' * 10**10`, doubling in a loop, or nested loops from filling memory or running for ever, so
everything that a template can grow with is counted here against a budget of its rendering.
"""

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.exceptions import SecurityError

CHARACTERS = 2**20  # of one string, beside 16 times the input
EMITTED = 4 * 2**20  # of all output, captured output too, beside 16 times the input
STEPS = 3 * 10**5  # loop iterations, calls and filters, beside 16 times the input
INTEGER_BITS = 10**4
GLOBALS = ("range", "dict", "namespace")  # of jinja2's own; no template needs the others
_WIDE = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "wordwrap")
_WIDE += ("batch", "slice", "truncate", "urlize")  # as many characters or items as a number says


class Budget:
    """What one rendering may still use."""

    def __init__(self, characters: int):
        self.size = CHARACTERS + 16 * characters
        self._emitted, self._steps = EMITTED + 16 * characters, STEPS + 16 * characters

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise SecurityError("more loop iterations and calls than a chat template needs")

    def emit(self, count: int) -> None:
        self._emitted -= count
        if self._emitted < 0:
            raise SecurityError(f"more than {EMITTED} characters of output")

    def require(self, size: int) -> None:
        """Raises SecurityError if one value is too large."""
        if size > self.size:
            raise SecurityError(f"a value larger than {self.size} characters or items")

    def size_of(self, value: object) -> int:
        """Characters and items of a value and all in it, shared ones as often as they are there.

        Raises: SecurityError if that is too large.
        """
        total, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, Mapping):
                total += 1
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                total += 1
                waiting += item
            else:
                total += 1
            if total + len(waiting) > self.size:  # here, not at the end: sharing can double it
                self.require(total + len(waiting))
        return total


_BUDGET: contextvars.ContextVar[Budget] = contextvars.ContextVar("budget")


@contextlib.contextmanager
def budget(characters: int) -> Iterator[None]:
    """Renders inside of this may use what suits an input of so many characters."""
    token = _BUDGET.set(Budget(characters))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class _Code(jinja2.compiler.CodeGenerator):
    """Joins with `~` through the environment."""

    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Renders under a `budget` only."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any):
        # with a finalizer that takes the context nothing is computed when a template is compiled
        super().__init__(optimized=False, finalize=_finalize, cache_size=0, **options)
        for name in set(self.globals) - set(GLOBALS):
            del self.globals[name]
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(name, function)
        self.filters["_counted"] = _counted

    def bounded(self, name: str, function: Callable[..., Any]) -> None:
        """Sets a filter."""
        self.filters[name] = _bounded_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = _filter(loop.iter, "_counted")
        for output in tree.find_all(jinja2.nodes.Output):
            # text of the template is counted like everything else that is written
            output.nodes = [_constant(node) for node in output.nodes]
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        uses = _BUDGET.get()
        uses.step()
        sizes = [len(x) if isinstance(x, str | list | tuple) else None for x in (left, right)]
        if operator == "+" and None not in sizes:
            uses.require(sum(size or 0 for size in sizes))
        elif operator == "*" and sizes != [None, None]:
            uses.require(max(1, sizes[0] or sizes[1] or 0) * max(0, _number(left, right)))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
            if bits > INTEGER_BITS:
                raise SecurityError(f"an integer of more than {INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            _require_format(left, values)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        bare = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
        owner, name = getattr(bare, "__self__", None), getattr(bare, "__name__", "")
        if isinstance(owner, str):
            args = _require_text_function(name, owner, args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, range):
            _BUDGET.get().step(len(result))
        return _sized(result)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        """What `~` means."""
        _BUDGET.get().step()
        _BUDGET.get().size_of(parts)
        return "".join(map(str, parts))


def _constant(node: Any) -> Any:
    if isinstance(node, jinja2.nodes.TemplateData):
        return jinja2.nodes.Const(node.data, lineno=node.lineno, environment=node.environment)
    return node


def _filter(node: Any, name: str) -> Any:
    found = jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    return found.set_environment(node.environment)


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    del context
    uses = _BUDGET.get()
    uses.emit(uses.size_of(value))
    return value


def _counted(value: Any) -> Any:
    """What a loop runs over, its items paid for."""
    if not hasattr(value, "__len__"):
        value = list(value)
    _BUDGET.get().step(len(value))
    return value


def _sized(result: Any) -> Any:
    if isinstance(result, str | list | tuple | dict):
        uses = _BUDGET.get()
        uses.require(len(result))
        uses.step(len(result) // 64)  # the time it took
    return result


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose input and output are bounded."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        known = (jinja2.runtime.Context, jinja2.nodes.EvalContext, jinja2.Environment)
        first = next(i for i, arg in enumerate(args) if not isinstance(arg, known))
        value, rest = args[first], args[first + 1 :]
        if name == "join":
            value = list(value)
        _BUDGET.get().size_of((value, rest, kwargs))
        rest = _require_text_function(name, value, rest, kwargs)
        return _sized(function(*args[:first], value, *rest, **kwargs))

    return bounded


def _require_text_function(
    name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Checks that the result of a method or filter cannot be large; returns the arguments."""
    uses = _BUDGET.get()
    given = (*args, *kwargs.values())
    if name in _WIDE:
        uses.require(uses.size_of(value) * max(1, _number(*given)))
    elif name == "replace":
        named = dict(zip(("old", "new"), args, strict=False)) | dict(kwargs)
        old, new = str(named.get("old", named.get("s", ""))), str(named.get("new", ""))
        uses.require(len(str(value)) + str(value).count(old) * len(new))
    elif name == "join":
        if isinstance(value, str):  # the method: separator.join(items)
            items = list(args[0])
            args, separator = (items, *args[1:]), value
        else:
            items, separator = value, str(next(iter(given), ""))
        uses.require(uses.size_of(items) + len(items) * len(separator))
    elif name in ("format", "format_map"):
        _require_format(str(value), given)
    return args


def _require_format(text: str, values: tuple[Any, ...]) -> None:
    """Checks the widths of a format string."""
    uses = _BUDGET.get()
    specs = [*re.findall(r"%(?:\([^)]*\))?[-#0 +\d.*]*", text), *re.findall(r"\{[^}]*", text)]
    widths = [int(digits[:9]) for spec in specs for digits in re.findall(r"\d+", spec)]
    if "*" in text or re.search(r"\{[^}]*\{", text):  # widths among the values
        widths.append(_number(*values))
    fields = text.count("%") + text.count("{")
    uses.require(len(text) + fields * (max(widths, default=0) + uses.size_of(values)))


def _number(*values: Any) -> int:
    """The largest integer among them, else 0."""
    found = [
        v for value in values for v in (value.values() if isinstance(value, dict) else [value])
    ]
    return max((value for value in found if isinstance(value, int)), default=0)
