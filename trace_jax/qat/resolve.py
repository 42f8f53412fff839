"""Lays a recipe over what a model has: which parameter and site gets what, and the audit of it.

Framework-free: whoever knows a model's parameters (`Weight`) and sites (`Seen`) may ask. Mistakes
are errors here, before anything runs: a rule or exclusion that matches nothing, a weight whose
contracted axis nobody knows, siblings that should share a scale and are not all there.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from trace_jax import formats
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.qat.audit import WEIGHT, Audit, Row
from trace_jax.qat.recipe import NO_RULE, Recipe, Rule, matches, says_which
from trace_jax.qat.sites import Site

FIELD = {WEIGHT: "weights", "input": "inputs", "output": "outputs", "tensor": "tensors"}
_NEVER_CALLED = "never called with a float array; its matrices are used from outside"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Which axes of a weight make a matrix; all others enumerate matrices. Negative, disjoint."""

    axis: tuple[int, ...]  # contracted, together one axis of blocks
    out: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """What is known of a parameter before any recipe."""

    shape: tuple[int, ...]
    owner: str  # path of its module
    layout: Layout | None = None  # None: only a rule can tell
    rank: int | None = None  # the layout is certain only if one layer's weight has this rank
    never: str = ""  # why it is no matrix
    only_by_axis: str = ""  # why it is left alone unless a rule names its axis (an embedding)
    same_as: str = ""  # path by which the model has this very parameter, if that is another


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a site before any recipe."""

    module: str  # path
    what: str  # "input" | "output" | "tensor"
    shape: tuple[int, ...]
    listed: bool = True  # False: no row unless it is quantised
    matrices: bool = True  # False: of a module without matrices; `*` and `**` do not mean it


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """How one parameter is quantised."""

    format: Format
    layout: Layout
    layers: tuple[bool, ...] | None = None  # of a stack with layers left out: which are quantised


@dataclasses.dataclass(frozen=True, kw_only=True)
class SitePlan:
    """How one site is quantised; hashable, static under jit."""

    site: Site
    guided: bool  # recorded, and guided by a record
    bypass: tuple[str, ...] = ()  # submodules that get an input as it was
    stacked: int | None = None  # layers that are scanned over it
    layers: tuple[bool, ...] | None = None  # of a stack with layers left out: which are quantised


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe laid over a model."""

    recipe: Recipe
    weights: dict[str, WeightPlan]  # by real path
    groups: tuple[tuple[str, ...], ...]  # weights that share a global scale
    sites: dict[str, SitePlan]  # by real path: `module/input`, `module/k`, a second call: `...#1`
    rows: tuple[Row, ...]

    @property
    def audit(self) -> Audit:
        """The table for people and for the other side."""
        return Audit(rows=self.rows)


def resolve(
    recipe: Recipe, weights: Mapping[str, Weight], sites: Mapping[str, Seen] | None = None
) -> Plan:
    """Lays the recipe over parameters and sites.

    Args:   sites: None: unknown, and rules about them are not checked.
    Raises: ValueError where the recipe says something that the model does not have; see the module.
    """
    book = _Book(recipe, weights, {} if sites is None else sites)
    for path, weight in weights.items():
        book.weight(path, weight)
    for path, seen in book.sites.items():
        book.site(path, seen)
    if sites is not None:
        book.uncalled()
    book.check_aliases()
    book.check_used(unknown_sites=sites is None)
    groups = _groups(book)
    return Plan(
        recipe=recipe,
        weights=book.weight_plans,
        groups=groups,
        sites=book.site_plans,
        rows=tuple(book.rows),
    )


def join(module: str, name: str, number: int = 0) -> str:
    """The path of something in a module; the root's path is empty; of a second call `...#1`."""
    return f"{module}/{name}".lstrip("/") + (f"#{number}" if number else "")


def seen_sites(
    shapes: Mapping[str, Any], weights: Mapping[str, Weight], recipe: Recipe
) -> dict[str, Seen]:
    """Sites from the shapes that an abstract run met at each path."""
    owners = set()
    for path, weight in weights.items():
        rank = len(weight.shape) - recipe.in_stack(path)
        if rank >= 2 and not weight.never:
            owners.add(weight.owner)
    found = {}
    for path, like in shapes.items():
        module, _, name = path.partition("#")[0].rpartition("/")
        what = name if name in ("input", "output") else "tensor"
        matrices = what == "tensor" or module in owners
        shape, listed = tuple(like.shape), matrices and what != "output"
        found[path] = Seen(module=module, what=what, shape=shape, listed=listed, matrices=matrices)
    return found


class _Book:
    """The state of one `resolve`."""

    def __init__(self, recipe: Recipe, weights: Mapping[str, Weight], sites: Mapping[str, Seen]):
        self.recipe, self.weights, self.sites = recipe, weights, sites
        self.weight_plans: dict[str, WeightPlan] = {}
        self.aliases: dict[str, tuple[WeightPlan | None, str]] = {}  # what was decided, and why not
        self.site_plans: dict[str, SitePlan] = {}
        self.rows: list[Row] = []
        self.rule_of: dict[str, Rule] = {}  # of each quantised weight
        self.used: set[tuple[Rule, str]] = set()  # (rule, kind of thing) that did something
        self.why: dict[tuple[Rule, str], str] = {}  # why a match did nothing
        self.total = self._layers()

    def _layers(self) -> int:
        """How many layers there are."""
        recipe, counts = self.recipe, [0]
        for path, thing in [*self.weights.items(), *self.sites.items()]:
            if recipe.in_stack(path):
                count = thing.shape[0] if thing.shape else 0
                ids = recipe.layers_in(path, count)
                got = f"{count} rows"
                require(count == len(ids), f"qat: {path}", got, f"one for each of layers {ids}")
                counts.append(max(ids, default=-1) + 1)
            elif (layer := recipe.layer_of(path)) is not None:
                counts.append(layer + 1)
        fix = f"paths are {_some([*self.weights, *self.sites])}"
        found = recipe.layers is None or max(counts) > 0
        require(found, "qat.Recipe: layers", repr(recipe.layers), "a pattern of some path", fix)
        recipe.keeps(0 if max(counts) else None, max(counts))
        return max(counts)

    def singles(
        self, path: str, module: str, what: str = WEIGHT
    ) -> list[tuple[str, int | None, Rule | None, str]]:
        """(path, layer, rule, why not) of each single layer of a thing."""
        found, recipe = [], self.recipe
        layers = recipe.layers_in(path, self.total) if recipe.in_stack(path) else [None]
        for stacked in layers:
            own, owner = path, module
            if stacked is not None:
                own = recipe.of_layer(path, stacked)
                owner = recipe.of_layer(module, stacked) if recipe.in_stack(module) else module
            layer = recipe.layer_of(own)
            names = (owner,) if what in ("input", "output") else (own.partition("#")[0], owner)
            rule, why = recipe.find(*names)
            if rule is not None and recipe.keeps(layer, self.total):
                rule, why = None, "layer kept as it is"
            found.append((own, layer, rule, why))
        return found

    def weight(self, path: str, weight: Weight) -> None:
        """Plans one parameter and adds its rows."""
        stacked, chosen, denied = self.recipe.in_stack(path), [], ""
        shape = weight.shape[1:] if stacked else weight.shape
        for own, layer, rule, why in self.singles(path, weight.owner):
            layout = None
            if rule is not None:
                why = self._no_weight(rule, weight, shape)
                if not why:
                    layout = _layout(path, rule, weight, len(shape))
                    if not weight.same_as:
                        self.rule_of[path] = rule
                self._note(rule, WEIGHT, why)
            format = rule and rule.weights
            done = None if layout is None or format is None else (formats.get(format), layout)
            chosen.append(done)
            if rule is None and why != NO_RULE:
                denied = why
            if weight.same_as:
                layout, done, why = None, None, f"same as {weight.same_as}"
            text = None if done is None else formats.spell(done[0])
            row = Row(path=own, what=WEIGHT, shape=shape, format=text, layer=layer, why=why)
            pattern, axis = rule and rule.pattern, layout and layout.axis
            self.rows.append(dataclasses.replace(row, rule=pattern, axis=axis))
        one, mask = _agree(path, chosen)
        plan = one and WeightPlan(format=one[0], layout=one[1], layers=mask)
        if weight.same_as:
            self.aliases[path] = plan, denied
        elif plan is not None:
            self.weight_plans[path] = plan

    def _no_weight(self, rule: Rule, weight: Weight, shape: tuple[int, ...]) -> str:
        """Why the rule does not quantise this parameter; "": it does."""
        if rule.weights is None:
            return "the rule has no format for weights"
        if weight.never or len(shape) < 2:
            return weight.never or "a vector"
        return weight.only_by_axis if rule.axis is None else ""

    def site(self, path: str, seen: Seen) -> None:
        """Plans one site and adds its rows."""
        stacked, chosen = self.recipe.in_stack(path), []
        shape = seen.shape[1:] if stacked else seen.shape
        for own, layer, rule, why in self.singles(path, seen.module, seen.what):
            format = rule and getattr(rule, FIELD[seen.what])
            plan = None
            if rule is not None:
                if format is None:
                    why = f"the rule has no format for {FIELD[seen.what]}"
                elif not (seen.matrices or says_which(rule.pattern)):
                    why, format = "* and ** mean modules that own matrices", None
                self._note(rule, seen.what, why)
            if rule is not None and format is not None:
                site = Site(
                    format=format,
                    kind=rule.guide or "codes",
                    ste=rule.ste,
                    scale_bits=rule.scale_bits,
                    global_bits=rule.global_bits,
                    impl=rule.impl,
                )
                around = rule.bypass if seen.what == "input" else ()
                plan = SitePlan(site=site, guided=rule.guide is not None, bypass=around)
            chosen.append(plan)
            if plan is None and not seen.listed:
                continue
            text = None if plan is None else formats.spell(plan.site.format)
            row = Row(path=own, what=seen.what, shape=shape, format=text, layer=layer, why=why)
            row = dataclasses.replace(row, rule=rule and rule.pattern)
            if plan is not None and rule is not None:
                row = dataclasses.replace(row, guide=rule.guide, ste=rule.ste)
            self.rows.append(row)
        one, mask = _agree(path, chosen)
        if one is not None:
            count = len(chosen) if stacked else None
            self.site_plans[path] = dataclasses.replace(one, stacked=count, layers=mask)

    def uncalled(self) -> None:
        """Adds a row for each module with a matrix whose input a rule means, but that never ran."""
        ran = {seen.module for seen in self.sites.values() if seen.what != "tensor"}
        owners: dict[str, None] = {}
        for path, weight in self.weights.items():
            rank = len(weight.shape) - self.recipe.in_stack(path)
            if rank >= 2 and not weight.never and weight.owner not in ran:
                owners[weight.owner] = None
        for owner in owners:
            for own, layer, rule, _ in self.singles(join(owner, "input"), owner, "input"):
                if rule is not None and rule.inputs is not None:
                    self._note(rule, "input", _NEVER_CALLED)
                    row = Row(path=own, what="input", shape=None, format=None, layer=layer)
                    self.rows.append(dataclasses.replace(row, rule=rule.pattern, why=_NEVER_CALLED))

    def check_aliases(self) -> None:
        """Nothing was decided for a second name of a parameter that does not hold for the first."""
        for path, (plan, denied) in self.aliases.items():
            first = self.weights[path].same_as
            real = self.weight_plans.get(first)
            fix = f"rules and exclusions that name {first} too: it is the same parameter"
            text = f"{denied}, and {first} quantised"
            require(not denied or real is None, f"qat: {path}", text, "one decision", fix)
            text = f"a rule that does not hold for {first}"
            require(plan is None or plan == real, f"qat: {path}", text, "one decision", fix)

    def _note(self, rule: Rule, what: str, why: str) -> None:
        if why:
            self.why[rule, what] = why
        else:
            self.used.add((rule, what))

    def check_used(self, unknown_sites: bool) -> None:
        """Every rule did what it says, and every exclusion excludes something."""
        paths = self._paths()
        for rule in self.recipe.rules:
            for what, field in FIELD.items():
                if getattr(rule, field) is None or (unknown_sites and what != WEIGHT):
                    continue
                where = f"qat.Rule {rule.pattern!r}: {field}"
                got = f"no match ({self.why[rule, what]})" if (rule, what) in self.why else None
                near = f"earlier rules, exclusions and near misses: {_near(rule.pattern, paths)}"
                known = (rule, what) in self.used
                require(known, where, got or "no match", "something to quantise", near)
        about_sites = any(r.inputs or r.outputs or r.tensors for r in self.recipe.rules)
        for pattern in self.recipe.exclude:
            known = any(matches(pattern, path) for path in paths)
            known = known or (unknown_sites and about_sites)  # it may mean a site
            near = f"near misses: {_near(pattern, paths)}"
            where = f"qat.Recipe: exclude {pattern!r}"
            require(known, where, "no match", "something to leave out", near)

    def _paths(self) -> list[str]:
        """Every path a pattern may name: of parameters, sites, and all they lie in."""
        known: dict[str, None] = {}
        things = [(p, w.owner) for p, w in self.weights.items()]
        for path, seen in self.sites.items():
            things.append((path if seen.what == "tensor" else seen.module, seen.module))
        for path, module in things:
            for single, *_ in self.singles(path, module) if path else []:
                parts = single.partition("#")[0].split("/")
                known.update(dict.fromkeys("/".join(parts[:n]) for n in range(1, len(parts) + 1)))
        return list(known)


def _agree(path: str, chosen: list) -> tuple:
    """The one choice of all layers of a thing, and which layers it holds for (None: all)."""
    some = {choice for choice in chosen if choice is not None}
    need = "one format for all layers that are scanned together"
    require(len(some) <= 1, f"qat: {path}", f"{len(some)} different choices", need)
    mask = tuple(choice is not None for choice in chosen)
    return next(iter(some), None), None if all(mask) else mask


def _layout(path: str, rule: Rule, weight: Weight, rank: int) -> Layout:
    """The rule's axes if it names them, else the module's."""
    if rule.axis is None:
        got = f"shape {weight.shape} in a module of unknown kind"
        fix = "qat.Rule(..., axis=-2) names the contracted axis"
        known = weight.layout if weight.rank in (None, rank) else None
        require(known is not None, f"qat: {path}", got, "the contracted axis", fix)
        assert known is not None  # for type checkers
        return known
    axis, out = _axes(rule.axis), _axes(rule.out)
    if not out:
        last = len(axis) == 1 and axis[0] >= -2
        fix = "qat.Rule(..., axis=(-3,), out=(-2, -1)) names all axes of one matrix"
        require(last, f"qat: {path}", f"axis {axis} alone", "out as well", fix)
        out = (-3 - axis[0],)
    every = (*axis, *out)
    ok = len(set(every)) == len(every) and min(every) >= -rank
    require(ok, f"qat: {path}", f"axis {axis}, out {out}", f"different axes of rank {rank}")
    return Layout(axis=axis, out=out)


def _axes(given: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else given or ()


def _groups(book: _Book) -> tuple[tuple[str, ...], ...]:
    """Weights that share a global scale: siblings named by their rule."""
    groups: dict[tuple[Rule, str], dict[str, str]] = {}
    for path, rule in book.rule_of.items():
        parts = path.split("/")
        at = max((i for i, part in enumerate(parts) if part in rule.share_scale), default=None)
        if at is not None:
            place = "/".join([*parts[:at], "{}", *parts[at + 1 :]])
            groups.setdefault((rule, place), {})[parts[at]] = path
    for (rule, place), members in groups.items():
        where, names = f"qat: share_scale at {place}", sorted(rule.share_scale)
        require(sorted(members) == names, where, sorted(members), f"all of {names}")
        plans = {book.weight_plans[path] for path in members.values()}
        require(len(plans) == 1, where, f"{len(plans)} different plans", "one format and layout")
    for rule in book.recipe.rules:
        found = not rule.share_scale or any(rule == known for known, _ in groups)
        need = f"parameters named {list(rule.share_scale)}"
        require(found, f"qat.Rule {rule.pattern!r}: share_scale", "no match", need)
    return tuple(tuple(members.values()) for members in groups.values())


def _near(pattern: str, paths: Iterable[str]) -> str:
    return _some(difflib.get_close_matches(pattern, list(paths), n=4, cutoff=0.3) or list(paths))


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "") if paths else "none"
