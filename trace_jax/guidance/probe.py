"""Which layers and sites are worth their bytes: measured, instead of "the latter half".

A *unit* is what is kept or left out as a whole, usually (layer, site) or (layer,). Its benefit
is how much the gap between trainer and sampler grows when everything but it is guided. `select`
takes the units with the largest sum of benefits under a byte budget, exactly. Benefits are not
additive (an unguided early layer disturbs all later ones), so `refine` can check the choice with
further measurements, swap by swap. `gap` is the caller's: mean |log-prob difference| on a batch
whose rollout recorded everything, with the trainer guided at the given units only.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from trace_jax.checks import require

Unit = TypeVar("Unit", bound=Hashable)
Gap = Callable[[frozenset[Unit]], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Units to keep, in the order given, and what is known of them."""

    units: tuple
    bytes: int  # per token
    benefit: float  # sum over the units
    gap: float | None = None  # measured with exactly these guided


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What leaving out each unit does."""

    benefit: Mapping  # unit -> gap without it minus gap with all
    gap_all: float  # everything guided
    gap_none: float  # nothing guided


def measure(units: Sequence[Unit], gap: Gap) -> Sensitivity:
    """The benefit of each unit by leaving it out of full guidance: len(units) + 2 measurements.

    Raises: ValueError if there is no unit, or one stands there twice.
    """
    everything = frozenset(units)
    twice = len(everything) == len(units) > 0
    require(twice, "guidance probe: units", list(units), "at least one, each once")
    gap_all = gap(everything)
    benefit = {unit: gap(everything - {unit}) - gap_all for unit in units}
    return Sensitivity(benefit=benefit, gap_all=gap_all, gap_none=gap(frozenset()))


def select(benefit: Mapping[Unit, float], cost: Mapping[Unit, int], budget: int) -> Choice:
    """The units with the largest sum of benefits whose bytes fit the budget, exactly.

    Math:    0/1 knapsack over the Pareto front of (bytes, benefit); units whose benefit is not
             positive are left out. Of equal sums the one of fewer bytes wins.
    Args:    benefit, cost: of each unit, cost in bytes per token. budget: bytes per token.
    Raises:  ValueError for a cost that is not positive, or a unit without one.
    """
    missing = [unit for unit in benefit if cost.get(unit, 0) <= 0]
    require(not missing, "guidance probe: cost", f"none for {missing}", "bytes > 0 for each unit")
    require(budget >= 0, "guidance probe: budget", budget, ">= 0 bytes per token")
    # each entry of the front: (bytes, benefit, chosen units as a linked list)
    front: list[tuple[int, float, tuple | None]] = [(0, 0.0, None)]
    for unit, gain in benefit.items():
        if not gain > 0:
            continue
        with_it = [(b + cost[unit], v + gain, (unit, kept)) for b, v, kept in front]
        merged = sorted([*front, *with_it], key=lambda entry: (entry[0], -entry[1]))
        front = []
        for entry in merged:
            if entry[0] <= budget and (not front or entry[1] > front[-1][1]):
                front.append(entry)
    total, value, kept = front[-1]
    chosen = set()
    while kept is not None:
        chosen.add(kept[0])
        kept = kept[1]
    return Choice(units=tuple(u for u in benefit if u in chosen), bytes=total, benefit=value)


def refine(
    choice: Choice, sensitivity: Sensitivity, cost: Mapping, budget: int, gap: Gap, *, tries: int
) -> Choice:
    """Checks the choice by measuring, and swaps units in or out while that closes the gap.

    Tries, most promising first, to add a unit that fits, or to replace a kept unit of small benefit
    by one left out; keeps a change only if the measured gap is smaller.
    Args:    tries: measurements to spend, the first for the choice itself.
    """
    require(tries >= 1, "guidance probe: tries", tries, "at least 1")
    benefit, kept = sensitivity.benefit, set(choice.units)
    best = gap(frozenset(kept))
    tries -= 1
    changed = True
    while changed and tries > 0:
        changed = False
        for candidate in _neighbours(kept, benefit, cost, budget):
            if tries == 0:
                break
            measured = gap(frozenset(candidate))
            tries -= 1
            if measured < best:
                best, kept, changed = measured, candidate, True
                break
    return Choice(
        units=tuple(unit for unit in benefit if unit in kept),
        bytes=sum(cost[unit] for unit in kept),
        benefit=sum(benefit[unit] for unit in kept),
        gap=best,
    )


def _neighbours(kept: set, benefit: Mapping, cost: Mapping, budget: int) -> Iterable[set]:
    """Sets one addition or one swap away that fit the budget, by growing loss of benefit."""
    spent = sum(cost[unit] for unit in kept)
    outside = [unit for unit in benefit if unit not in kept]
    options = [(benefit[new], {*kept, new}) for new in outside if spent + cost[new] <= budget]
    for old in kept:
        for new in outside:
            if spent - cost[old] + cost[new] <= budget:
                options.append((benefit[new] - benefit[old], (kept - {old}) | {new}))
    return [candidate for _, candidate in sorted(options, key=lambda pair: -pair[0])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison."""

    name: str
    bytes: int  # per token
    gap: float
    closed: float  # share of the gap between nothing and everything guided that this closes
    fewer: float  # bytes saved against the first row, as a fraction


def compare(arms: Mapping[str, tuple[int, float]], *, gap_none: float, gap_all: float) -> list[Row]:
    """A table of (bytes per token, gap) by name; the first arm is what others are held against.

    The paper's compact mode (mantissa bits and scale bytes of the latter half) is a natural first.
    """
    baseline = next(iter(arms.values()))[0]
    span = gap_none - gap_all
    return [
        Row(
            name=name,
            bytes=cost,
            gap=gap,
            closed=(gap_none - gap) / span if span else 0.0,
            fewer=1 - cost / baseline,
        )
        for name, (cost, gap) in arms.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [f"{'guidance':<40} {'bytes/token':>11} {'gap':>10} {'closed':>7} {'fewer bytes':>11}"]
    for r in rows:
        line = f"{r.name:<40} {r.bytes:>11} {r.gap:>10.5f} {r.closed:>7.1%} {r.fewer:>11.1%}"
        lines.append(line)
    return "\n".join(lines)
