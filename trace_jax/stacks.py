"""Stacks of layers: which layer each row belongs to, and a scan over layers of several kinds.

A stack has one row for each layer that has something: parameters of a component, a guidance record,
a cache. A `Segment` is a run of layers that repeats a short period, such as three layers with
Gated DeltaNet and one with full attention; it is one `lax.scan` over the repetitions, with the
period written out in its body, so that compile time does not grow with depth.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax import config as cfg
from trace_jax import layer_kinds
from trace_jax.layer_kinds import COMPONENTS, Kind

NORMS = ("mixer_norm", "ffn_norm")  # every layer has them
_LONGEST_PERIOD = 12  # four layers of a hybrid, with experts in every third one
Rows = tuple[tuple[int, ...], Any]  # absolute ids, ascending, and leaves with a row for each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Layers [start, stop), which repeat `period`."""

    start: int
    stop: int
    period: tuple[Any, ...]  # what each layer of a repetition is; hashable, with a `kind`

    @property
    def repetitions(self) -> int:
        """How often the period is repeated."""
        return (self.stop - self.start) // len(self.period)

    @property
    def layers(self) -> tuple[Any, ...]:
        """What each layer is."""
        return self.period * self.repetitions

    def ids(self, has: Callable[[Any], bool]) -> tuple[int, ...]:
        """The layers of which `has` is true, by absolute id."""
        return tuple(i for i, layer in enumerate(self.layers, self.start) if has(layer))


def segments(layers: Sequence[Any], period: int) -> tuple[Segment, ...]:
    """Cuts layers into runs that repeat a short period, one layer or several.

    Of the periods that are repeated the one that reaches farthest, of equal ones the shortest.

    Args: layers: what each layer is, hashable. period: `full_attention_every` of the model, which
          is tried beside the lengths 1..12.
    """
    found, start = [], 0
    sizes = sorted({*range(1, _LONGEST_PERIOD + 1), period})
    while start < len(layers):
        reach = {size: size * _repeats(layers, start, size) for size in sizes}
        several = {size: end for size, end in reach.items() if end > size}
        size = max(several, key=several.__getitem__, default=1)  # the first of equal ones
        stop = start + reach[size]
        found.append(Segment(start=start, stop=stop, period=tuple(layers[start : start + size])))
        start = stop
    return tuple(found)


def _repeats(layers: Sequence[Any], start: int, size: int) -> int:
    """How often layers [start, start + size) stand there one after another."""
    pairs = zip(layers[start:], itertools.cycle(layers[start : start + size]), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same // size


def ids_by_stack(kinds: Sequence[Kind], first: int = 0) -> dict[str, tuple[int, ...]]:
    """Of each stack of parameters the layers that its rows belong to; `first` is the first layer's.

    For a model: `ids_by_stack(layer_kinds.kinds(model))`.
    """
    every = tuple(range(first, first + len(kinds)))
    has = {
        name: tuple(
            i for i, kind in zip(every, kinds, strict=True) if name in (kind.mixer, kind.ffn)
        )
        for name in COMPONENTS
    }
    return {name: ids for name, ids in has.items() if ids} | dict.fromkeys(NORMS, every)


def ids_in(segment: Segment) -> dict[str, tuple[int, ...]]:
    """The same of the stacks of a segment."""
    return ids_by_stack([layer.kind for layer in segment.layers], segment.start)


def cut(model: cfg.Model, segment: Segment, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Of the stacks of all layers (`params["layers"]`) the rows of a segment."""
    every, inside = ids_by_stack(layer_kinds.kinds(model)), ids_in(segment)
    return {name: rows_of((every[name], layers[name]), ids) for name, ids in inside.items()}


def rows_of(rows: Rows, ids: Sequence[int]) -> Any:
    """The rows of some neighbours among the layers of a stack."""
    every, leaves = rows
    first = every.index(ids[0])
    here = slice(first, first + len(ids))
    assert every[here] == tuple(ids), (every, ids)
    return jax.tree.map(lambda a: a[here], leaves)


def layer_of(segment: Segment, stack: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """One layer's tree out of the stacks of its segment: one dict a component, and the norms."""
    rows = {name: ids.index(layer) for name, ids in ids_in(segment).items() if layer in ids}
    return {
        name: jax.tree.map(lambda a, row=row: a[row], stack[name]) for name, row in rows.items()
    }


def stack_layers(segment: Segment, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Inverse of `layer_of`: the segment's stacks from the trees of its layers, in order."""
    return {
        name: jax.tree.map(lambda *a: jnp.stack(a), *(layers[i - segment.start][name] for i in ids))
        for name, ids in ids_in(segment).items()
    }


def scan(
    segment: Segment,
    body: Callable[[Any, Any, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]],
    carry: Any,
    layers: Mapping[str, Any],
    inputs: Mapping[str, Rows] | None = None,
) -> tuple[Any, dict[str, Rows]]:
    """Runs `body` through the layers of a segment, one after another.

    Args:    body: (carry, what the layer is, its parameters, its inputs) -> (carry, outputs).
             Parameters are one layer's tree; inputs those that this layer has; outputs are by name,
             and a layer need not have what another has.
             layers: the segment's stacks. inputs: by name; rows of other segments are left out.
    Returns: carry, and by name the outputs of the layers that have it, in the order of layers.
    """
    size, times = len(segment.period), segment.repetitions
    given = {("layer", name): (ids, layers[name]) for name, ids in ids_in(segment).items()}
    given |= {("input", name): rows for name, rows in (inputs or {}).items()}
    places, stacked = {}, {}
    for key, rows in given.items():
        inside = [i for i in rows[0] if segment.start <= i < segment.stop]
        if inside:
            places[key] = _places(segment, inside)
            stacked[key] = _fold(rows_of(rows, inside), times, len(places[key]))
    found: dict[str, list[int]] = {}

    def repetition(carry: Any, xs: Any) -> tuple[Any, Any]:
        outputs: dict[str, list[Any]] = {}
        found.clear()
        for place, what in enumerate(segment.period):
            here: dict[str, dict[str, Any]] = {"layer": {}, "input": {}}
            for (group, name), at in places.items():
                if place in at:
                    leaves = xs[group, name]
                    here[group][name] = leaves if len(at) == 1 else _row(leaves, at.index(place))
            carry, out = body(carry, what, here["layer"], here["input"])
            for name, value in out.items():
                outputs.setdefault(name, []).append(value)
                found.setdefault(name, []).append(place)
        return carry, {
            name: some[0] if len(some) == 1 else jax.tree.map(lambda *a: jnp.stack(a), *some)
            for name, some in outputs.items()
        }

    carry, outputs = jax.lax.scan(repetition, carry, stacked, length=times)
    flat = {}
    for name, leaves in outputs.items():
        at = found[name]
        ids = tuple(segment.start + r * size + place for r in range(times) for place in at)
        flat[name] = ids, leaves if len(at) == 1 else jax.tree.map(_flatten, leaves)
    return carry, flat


def join(parts: Sequence[Mapping[str, Rows]]) -> dict[str, Rows]:
    """Outputs of all segments, one after another, by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _join([part[name] for part in parts if name in part]) for name in names}


def _join(rows: Sequence[Rows]) -> Rows:
    ids = tuple(i for some, _ in rows for i in some)
    if len(rows) == 1:
        return ids, rows[0][1]
    return ids, jax.tree.map(lambda *a: jnp.concatenate(a), *(leaves for _, leaves in rows))


def _places(segment: Segment, ids: Sequence[int]) -> tuple[int, ...]:
    """Where in the period the layers stand that have something; all repetitions are alike."""
    size = len(segment.period)
    at = tuple(i - segment.start for i in ids if i < segment.start + size)
    alike = [segment.start + r * size + place for r in range(segment.repetitions) for place in at]
    assert list(ids) == alike, (segment, ids)
    return at


def _fold(leaves: Any, times: int, each: int) -> Any:
    """Rows (times * each, ...) as (times, each, ...); one a repetition stays as it is."""
    if each == 1:
        return leaves
    return jax.tree.map(lambda a: a.reshape(times, each, *a.shape[1:]), leaves)


def _flatten(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(-1, *leaf.shape[2:])


def _row(leaves: Any, row: int) -> Any:
    return jax.tree.map(lambda a: a[row], leaves)
