"""Oracles: all subsets, and a made-up gap whose best choice is known."""

import itertools

import numpy as np
import pytest

from trace_jax.guidance import probe


def best_by_search(benefit, cost, budget):
    """(largest benefit, fewest bytes of it) over every subset that fits."""
    sets = itertools.chain.from_iterable(
        itertools.combinations(benefit, n) for n in range(len(benefit) + 1)
    )
    fits = [s for s in sets if sum(cost[u] for u in s) <= budget]
    return max((sum(benefit[u] for u in s), -sum(cost[u] for u in s)) for s in fits)


@pytest.mark.parametrize("seed", range(6))
def test_select_is_the_best_of_all_subsets(seed):
    rng = np.random.default_rng(seed)
    units = [(layer, site) for layer in range(3) for site in ("expert_in", "k", "v")]
    benefit = {u: float(b) for u, b in zip(units, rng.integers(-3, 9, 9) / 4, strict=True)}
    cost = {u: int(c) for u, c in zip(units, rng.integers(5, 40, 9), strict=True)}
    for budget in (0, 4, 30, 77, 120, 1000):
        got = probe.select(benefit, cost, budget)
        want_benefit, want_bytes = best_by_search(benefit, cost, budget)
        assert (got.benefit, -got.bytes) == (pytest.approx(want_benefit), want_bytes)
        assert got.bytes == sum(cost[u] for u in got.units) <= budget
        assert got.benefit == pytest.approx(sum(benefit[u] for u in got.units))
        assert list(got.units) == [u for u in units if u in got.units]


def test_select_is_fast_enough_for_forty_layers_of_three_sites():
    rng = np.random.default_rng(0)
    benefit = {i: float(b) for i, b in enumerate(rng.random(120))}
    cost = {i: (290, 37, 37)[i % 3] for i in range(120)}
    got = probe.select(benefit, cost, 7000)
    assert 6900 < got.bytes <= 7000


def test_select_refuses_a_unit_without_bytes():
    with pytest.raises(ValueError, match=r"probe: cost: got none for \['b'\], need bytes > 0"):
        probe.select({"a": 1.0, "b": 1.0}, {"a": 3}, 9)
    with pytest.raises(ValueError, match="budget: got -1"):
        probe.select({"a": 1.0}, {"a": 3}, -1)


def test_measure_leaves_out_one_unit_at_a_time():
    weights, asked = {0: 0.5, 1: 0.25, 2: 1.0}, []

    def gap(kept):
        asked.append(kept)
        return 0.125 + sum(w for unit, w in weights.items() if unit not in kept)

    found = probe.measure([0, 1, 2], gap)
    assert found.benefit == weights and (found.gap_all, found.gap_none) == (0.125, 1.875)
    assert len(asked) == 5 and asked[0] == {0, 1, 2} and asked[-1] == set()
    with pytest.raises(ValueError, match=r"units: got \[0, 0\], need at least one, each once"):
        probe.measure([0, 0], gap)


def test_refine_repairs_a_choice_that_additive_benefits_get_wrong():
    """Guiding 1 and 2 together is worth more than their leave-one-out benefits say."""
    cost, budget = dict.fromkeys(range(4), 10), 20
    sensitivity = probe.Sensitivity(
        benefit={0: 0.3, 1: 0.2, 2: 0.25, 3: 0.1}, gap_all=0.0, gap_none=2.0
    )
    asked = []

    def gap(kept):
        asked.append(kept)
        return 2.0 - 0.3 * len(kept) - (1.0 if {1, 2} <= kept else 0.0)

    first = probe.select(sensitivity.benefit, cost, budget)
    assert first.units == (0, 2)
    got = probe.refine(first, sensitivity, cost, budget, gap, tries=20)
    assert got.units == (1, 2) and got.gap == pytest.approx(0.4) and got.bytes == 20
    asked.clear()
    probe.refine(first, sensitivity, cost, budget, gap, tries=2)
    assert len(asked) == 2
    assert all(sum(cost[u] for u in kept) <= budget for kept in asked)


def test_compare_says_what_is_closed_and_saved():
    arms = {"compact": (8640, 0.02), "probe": (6480, 0.02), "none": (0, 0.1)}
    rows = probe.compare(arms, gap_none=0.1, gap_all=0.0)
    assert [r.fewer for r in rows] == [0.0, 0.25, 1.0]
    assert [r.closed for r in rows] == [pytest.approx(0.8), pytest.approx(0.8), 0.0]
    assert len(probe.table(rows).splitlines()) == 4
