"""What a recipe really does to a model: a table of every parameter and site, free of any framework.

Training and sampling each build one and compare them before the first step; after the first step
`check` looks whether every site of it really produced codes.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.checks import require
from trace_jax.qat.sites import SiteStats
from trace_jax.types import Mean

WEIGHT = "weight"
_COLUMNS = ("path", "what", "shape", "format", "axis", "guide", "rule", "why not")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter or site of one layer."""

    path: str
    what: str  # "weight" | "input" | "output" | "tensor"
    shape: tuple[int, ...] | None  # of one layer; of a site: in the abstract run. None: unknown
    format: str | None  # as `formats.spell` writes it; None: left as it is
    rule: str | None = None  # the pattern that decided
    why: str = ""  # why it is left as it is
    axis: tuple[int, ...] | None = None  # contracted axes of a weight
    guide: str | None = None  # what is recorded at a site
    ste: str | None = None  # of a site
    layer: int | None = None  # number of the layer, if layers are known

    @property
    def identity(self) -> tuple[Any, ...]:
        """What both sides must agree on: not which rule, and not a site's batch shape."""
        shape = self.shape if self.what == WEIGHT else self.shape and self.shape[-1:]
        return (self.what, shape, self.format, self.axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The table. `str(audit)` prints it, layers of equal rows on one line."""

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        seen = collections.Counter(row.path for row in self.rows)
        twice = [path for path, times in seen.items() if times > 1]
        require(not twice, "qat.Audit: rows", twice[:5], "one row for each path")

    @property
    def weights(self) -> tuple[str, ...]:
        """Paths of the quantised parameters."""
        return tuple(r.path for r in self.rows if r.what == WEIGHT and r.format)

    @property
    def sites(self) -> tuple[str, ...]:
        """Paths of the quantised sites."""
        return tuple(r.path for r in self.rows if r.what != WEIGHT and r.format)

    def diff(self, other: "Audit", *, what: Sequence[str] | None = None) -> list[str]:
        """Where two audits disagree about what is quantised, in which format; empty: they agree.

        Args: what: kinds of rows to compare; None: all.
        """
        ours, theirs = ({r.path: r for r in a.rows if r.format} for a in (self, other))
        found = []
        for path in sorted(set(ours) | set(theirs)):
            pair = ours.get(path), theirs.get(path)
            kinds = {row.what for row in pair if row is not None}
            if what is not None and not kinds & set(what):
                continue
            one, two = (None if row is None else row.identity for row in pair)
            if one != two:
                found.append(f"{path}: {_brief(pair[0])} here, {_brief(pair[1])} there")
        return found

    def require_same(self, other: "Audit", *, what: Sequence[str] | None = None) -> None:
        """Raises ValueError unless `diff` is empty: sampler and trainer before the first step."""
        found = self.diff(other, what=what)
        fix = "build both sides from one recipe and one model"
        require(not found, "qat audits of the two sides", "; ".join(found[:5]), "equality", fix)

    def check(self, stats: Mapping[str, SiteStats | Mean]) -> None:
        """Raises ValueError unless every audited site really produced codes other than zero.

        Args: stats: by path of a single layer's site: its counts, or of them only `coded`.

        Call it on the host after the first forward: it reads the numbers.
        """
        expected = set(self.sites)
        fix = "is the quantised forward really the one that ran?"
        missing, extra = sorted(expected - set(stats)), sorted(set(stats) - expected)
        require(not missing, "qat audit: sites without counts", missing[:5], "counts of all", fix)
        require(not extra, "qat audit: counts of unknown sites", extra[:5], "audited sites", fix)
        coded = {p: s if isinstance(s, Mean) else s.coded for p, s in stats.items()}
        dead = [path for path in self.sites if not float(coded[path].total) > 0]
        fix = "an input that is all zero, padding or NaN produces none"
        require(not dead, "qat audit: sites without codes", dead[:5], "codes other than zero", fix)

    def to_json(self) -> str:
        """One text that `from_json` reads back, for the hand-shake and the run directory."""
        return json.dumps([dataclasses.asdict(row) for row in self.rows])

    @staticmethod
    def from_json(text: str) -> "Audit":
        """Inverse of `to_json`."""
        rows = []
        for fields in json.loads(text):
            for name in ("shape", "axis"):
                fields[name] = None if fields[name] is None else tuple(fields[name])
            rows.append(Row(**fields))
        return Audit(rows=tuple(rows))

    def __str__(self) -> str:
        lines = [_COLUMNS, *(_cells(group) for group in _groups(self.rows))]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        count = f"{len(self.weights)} weights and {len(self.sites)} sites quantised"
        return "\n".join([*text, f"{count}, of {len(self.rows)} rows"])


def _brief(row: Row | None) -> str:
    if row is None:
        return "not quantised"
    shape = "" if row.shape is None else f" {row.shape}"
    return f"{row.what} {row.format}{shape}{'' if row.axis is None else f' along {row.axis}'}"


def _general(row: Row) -> Row:
    """The row with its layer's number left out, so that equal layers compare equal."""
    if row.layer is None:
        return row
    parts = row.path.split("/")
    for i, part in enumerate(parts):
        digits = "".join(itertools.dropwhile(lambda c: not c.isdigit(), part))
        if digits == str(row.layer):
            parts[i] = part[: len(part) - len(digits)] + "*"
            break
    return dataclasses.replace(row, path="/".join(parts), layer=None)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ only in the layer, in the order of their first."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(_general(row), []).append(row)
    return list(groups.values())


def _cells(group: list[Row]) -> tuple[str, ...]:
    row = _general(group[0])
    layers = [r.layer for r in group if r.layer is not None]
    path = row.path if not layers else f"{row.path} [{ranges(layers)}]"
    shape = "" if row.shape is None else "x".join(map(str, row.shape))
    axis = "" if row.axis is None else ",".join(map(str, row.axis))
    return (
        path,
        row.what,
        shape,
        row.format or "-",
        axis,
        row.guide or "",
        row.rule or "",
        row.why,
    )


def ranges(numbers: list[int]) -> str:
    """Numbers as text, neighbours joined: 0,1,2,5 -> 0-2,5."""
    out = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        out.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(out)
