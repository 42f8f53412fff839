"""What shall be quantised, by path: a `Recipe` of `Rule`s, free of any framework.

A path is the way to a module or parameter, joined by "/": `layers/3/mlp/up_proj/kernel`. Patterns
match whole paths: `*` is any part of one segment, `**` any number of whole segments (none too),
`{a,b}` either. So `mlp/gate` never matches `mlp/gate_up_proj`. The input and output of a module go
by the path of the module and have none of their own.

    Recipe(
        rules=(Rule("layers/*/mlp/*_proj", weights="nvfp4", inputs="nvfp4"),),
        exclude=("**/router", "lm_head"),
        layers="layers/*", keep_last=2,
    )
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pallas_kernels.common.impls import IMPLS
from trace_jax import formats
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.guidance import codec
from trace_jax.guidance.record import GLOBAL_BITS, KINDS, SCALE_BITS, Coding
from trace_jax.qat.sites import STE

NO_RULE = "no rule"
_FORMAT_FIELDS = ("weights", "inputs", "outputs", "tensors")

# one alone and lists are taken too, and become tuples
if TYPE_CHECKING:
    Names = tuple[str, ...]
    Rules = tuple["Rule", ...]
else:
    Names = Rules = Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to the modules and parameters that `pattern` matches.

    A pattern that matches a module speaks of the parameters that the module itself owns, of its
    input and output, and of the tensors named inside it; one may also match a parameter or a named
    tensor directly. Formats are given as `formats.get` takes them; None leaves it alone.
    """

    pattern: str
    _: dataclasses.KW_ONLY
    weights: str | Format | None = None  # matrices
    inputs: str | Format | None = None  # the first floating argument, along its last axis
    outputs: str | Format | None = None  # the value, if it is one floating array; likewise
    tensors: str | Format | None = None  # K and V of stock attention, and what `qat.site` names
    guide: str | None = "codes"  # what a rollout records: "codes" | "mantissa"; None: nothing
    scale_bits: int = 8  # low bits that a record keeps of a scale byte: 8 (all), 4, 3 or 2
    global_bits: int = 32  # of a row's global scale: 32, or 16 (exact for BF16 activations)
    ste: str = "plain"  # of inputs, outputs and tensors; "clipped": no gradient where saturated
    axis: int | tuple[int, ...] | None = None  # contracted axes of the weights, negative
    out: int | tuple[int, ...] | None = None  # the matrix's other axes; the rest enumerate matrices
    share_scale: Names = ()  # sibling weights with one global scale, such as gate and up
    bypass: Names = ()  # submodules that still get the input as it was (a router)
    impl: str = "xla"  # what rounds inputs, outputs and tensors, see docs/kernels.md

    def __post_init__(self) -> None:
        where = f"qat.Rule {self.pattern!r}"
        for name in _FORMAT_FIELDS:
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else formats.get(given))
        for name in ("axis", "out"):
            given = getattr(self, name)
            given = (given,) if isinstance(given, int) else given
            ok = given is None or (bool(given) and all(a < 0 for a in given))
            require(ok, f"{where}: {name}", given, "negative axes: layers may be stacked in front")
            object.__setattr__(self, name, given)
        for name in ("share_scale", "bypass"):
            object.__setattr__(self, name, _several(getattr(self, name), str, f"{where}: {name}"))
        require(bool(self.pattern), "qat.Rule: pattern", repr(self.pattern), "a path pattern")
        _regex(self.pattern)
        some = any(getattr(self, name) is not None for name in _FORMAT_FIELDS)
        fix = "name what shall not be quantised in Recipe.exclude"
        require(some, where, "no format", f"one of {list(_FORMAT_FIELDS)}", fix)
        kinds = [*KINDS, None]
        require(self.guide in kinds, f"{where}: guide", self.guide, f"one of {kinds}")
        require(self.ste in STE, f"{where}: ste", self.ste, f"one of {list(STE)}")
        require(self.impl in IMPLS, f"{where}: impl", self.impl, f"one of {list(IMPLS)}")
        for name, choices in (("scale_bits", SCALE_BITS), ("global_bits", GLOBAL_BITS)):
            value = getattr(self, name)
            require(value in choices, f"{where}: {name}", value, f"one of {list(choices)}")
        several = len(self.share_scale) != 1
        require(several, f"{where}: share_scale", self.share_scale, "two names or more")
        used = not self.bypass or self.inputs is not None
        require(used, f"{where}: bypass", self.bypass, "a format for inputs: nothing to bypass")
        self._check_sites(where)

    def _check_sites(self, where: str) -> None:
        """The formats of inputs, outputs and tensors fit what a site does with them."""
        for name in _FORMAT_FIELDS[1:]:
            format = getattr(self, name)
            if format is None:
                continue
            need = "blocks in one row: a tile takes neighbouring tokens, the future included"
            fix = "block_shape=1x16; tiles are for weights"
            require(format.per_row, f"{where}: {name}", formats.spell(format), need, fix)
            if self.guide is not None and self.scale_bits < 8:
                codec.scale_bits(64, format=format, coding=Coding(scale_bits=self.scale_bits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rules by path, first match wins; see the module's text for patterns.

    Rules always speak of single layers, `layers/3/mlp/...`: of a model whose layers are stacked and
    scanned (`scanned=True`, real path `layers/mlp/...`, leading axis = layers) they are read in the
    same way, so one recipe serves both.
    """

    rules: Rules
    exclude: Names = ()  # whole subtrees
    layers: str | None = None  # where layers are: a pattern with one `*` for the number
    scanned: bool = False  # layers are stacked along the leading axis; real paths lack the number
    rows: tuple[tuple[str, tuple[int, ...]], ...] = ()  # paths of stacks of only some layers: which
    keep_first: int = 0  # layers left as they are
    keep_last: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("rules", Rule), ("exclude", str)):
            given = _several(getattr(self, name), kind, f"qat.Recipe: {name}")
            object.__setattr__(self, name, given)
        for pattern in self.exclude:
            _regex(pattern)
        require(bool(self.rules), "qat.Recipe: rules", self.rules, "at least one qat.Rule")
        kept = self.keep_first >= 0 and self.keep_last >= 0
        got = (self.keep_first, self.keep_last)
        require(kept, "qat.Recipe: keep_first, keep_last", got, "numbers of layers")
        needed = bool(self.keep_first or self.keep_last or self.scanned)
        fix = 'layers="layers/*"'
        needed = needed or bool(self.rows)
        require(self.layers is not None or not needed, "qat.Recipe: layers", None, "a pattern", fix)
        if self.layers is not None:
            one = self.layers.count("*") == 1
            require(one, "qat.Recipe: layers", self.layers, "a pattern with one `*`", fix)
            for path, ids in self.rows:
                known = self.in_stack(path) and list(ids) == sorted(set(ids))
                need = f"{self._stack}/..., scanned, with its layers in order"
                require(known, "qat.Recipe: rows", (path, ids), need)
            segment = not self.scanned or self.layers.endswith("/*")
            require(segment, "qat.Recipe: layers", self.layers, "a pattern ending in /*", fix)

    def find(self, *paths: str) -> tuple[Rule | None, str]:
        """The rule for a thing that goes by these paths, or None and why not.

        Args:   paths: of single layers: of a parameter or named tensor its own and its module's, of
                an input or output only its module's.
        """
        for pattern in self.exclude:
            if any(matches(pattern, lead) for path in paths for lead in _leads(path)):
                return None, f"excluded by {pattern!r}"
        for rule in self.rules:
            if any(matches(rule.pattern, path) for path in paths):
                return rule, ""
        return None, NO_RULE

    def in_stack(self, path: str) -> bool:
        """Whether this real path lies in stacked layers."""
        return self.scanned and _under(self._stack, path)

    def layers_in(self, path: str, count: int) -> tuple[int, ...]:
        """The layers that the `count` rows of something stacked belong to."""
        for stack, ids in self.rows:
            if _under(stack, path):
                return ids
        return tuple(range(count))

    def of_layer(self, path: str, layer: int) -> str:
        """The path of one layer of something stacked: layers/mlp, 3 -> layers/3/mlp."""
        return f"{self._stack}/{layer}{path[len(self._stack) :]}"

    def layer_of(self, path: str) -> int | None:
        """The number of the layer that the path of a single layer lies in."""
        found = None if self.layers is None else _number(self.layers).match(path)
        return None if found is None else int(found[1])

    def keeps(self, layer: int | None, total: int) -> bool:
        """Whether this layer of `total` is left as it is."""
        if layer is None:
            return False
        left = total - self.keep_first - self.keep_last
        got = f"{self.keep_first} and {self.keep_last} of {total} layers"
        require(left > 0, "qat.Recipe: keep_first, keep_last", got, "at least one layer left")
        return not self.keep_first <= layer < total - self.keep_last

    @property
    def _stack(self) -> str:
        return (self.layers or "").removesuffix("/*")


def matches(pattern: str, path: str) -> bool:
    """Whether the whole path matches; see the module's text."""
    return _regex(pattern).fullmatch(f"/{path}" if path else "") is not None


def says_which(pattern: str) -> bool:
    """Whether the last segment narrows down which module is meant: not `*` or `**`."""
    return re.fullmatch(_segment(pattern.rpartition("/")[2]), "\0") is None


def _several(given: Any, kind: type, where: str) -> tuple:
    """One or several things of a kind as a tuple."""
    found = (given,) if isinstance(given, kind) else given
    ok = isinstance(found, tuple | list) and all(isinstance(one, kind) for one in found)
    require(ok, where, repr(given), f"a tuple of {kind.__name__}")
    return tuple(found)


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    """Each segment brings the slash before it, so that `**` may stand for none."""
    parts = []
    for segment in pattern.split("/"):
        require(bool(segment), "qat pattern", repr(pattern), "segments between single slashes")
        whole = segment == "**" or "**" not in segment
        require(whole, "qat pattern", repr(pattern), "** as a whole segment")
        parts.append("(?:/[^/]+)*" if segment == "**" else f"/{_segment(segment)}")
    return re.compile("".join(parts))


def _segment(segment: str) -> str:
    """`*` and `{a,b}` as a regular expression, the rest literally."""
    out = ""
    for piece in re.split(r"(\*|\{[^{}]*\})", segment):
        if piece == "*":
            out += "[^/]*"
        elif piece.startswith("{") and piece.endswith("}"):
            out += f"(?:{'|'.join(_segment(choice) for choice in piece[1:-1].split(','))})"
        else:
            out += re.escape(piece)
    return out


@functools.cache
def _number(layers: str) -> re.Pattern[str]:
    """Reads the layer's number off the path of anything in that layer."""
    before, after = layers.split("*")
    return re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}(?=/|$)")


def _leads(path: str) -> Iterator[str]:
    """The path and those of everything it lies in."""
    parts = path.split("/")
    return ("/".join(parts[: i + 1]) for i in range(len(parts)))


def _under(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
