"""The audit as a hand-shake between two sides, and as an alarm after the first step."""

import dataclasses

import pytest

from trace_jax.qat import Audit, Row
from trace_jax.qat.sites import SiteStats
from trace_jax.types import Mean


def row(path, what="weight", format="nvfp4", **options):
    return Row(path=path, what=what, shape=(8, 32), format=format, **options)


ROWS = (
    row("layers/0/up", axis=(-2,), layer=0, rule="layers/*/up"),
    row("layers/1/up", axis=(-2,), layer=1, rule="layers/*/up"),
    row("layers/2/up", format=None, layer=2, why="layer kept as it is"),
    row("layers/0/up/input", "input", layer=0, guide="codes", ste="plain"),
    row("layers/1/up/input", "input", layer=1, guide="codes", ste="plain"),
    row("router", format=None, why="excluded by 'router'"),
)
AUDIT = Audit(rows=ROWS)


def with_row(index, **changes):
    rows = list(ROWS)
    rows[index] = dataclasses.replace(rows[index], **changes)
    return Audit(rows=tuple(rows))


def test_equal_sides_agree_whatever_their_batch_and_their_rules():
    other = with_row(3, shape=(99, 7, 32))
    assert AUDIT.diff(other) == [] and AUDIT.diff(with_row(0, rule="other")) == []
    AUDIT.require_same(other)


@pytest.mark.parametrize(
    ("index", "changes", "text"),
    [
        (0, {"format": None}, r"layers/0/up: weight nvfp4 .* here, not quantised there"),  # F15
        (5, {"format": "nvfp4"}, "router: not quantised here, weight nvfp4"),
        (0, {"format": "mxfp4"}, "layers/0/up: weight nvfp4 .* here, weight mxfp4"),  # F18
        (0, {"axis": (-1,)}, r"along \(-2,\) here, .* along \(-1,\) there"),
        (0, {"shape": (8, 64)}, r"\(8, 32\) along .* here, weight nvfp4 \(8, 64\)"),
        (3, {"format": "nvfp4:global_rule=one"}, "layers/0/up/input: input nvfp4 .* here"),
        (3, {"shape": (2, 64)}, "layers/0/up/input"),
    ],
)
def test_sides_that_differ_are_an_error(index, changes, text):
    with pytest.raises(ValueError, match=text):
        AUDIT.require_same(with_row(index, **changes))


def test_one_kind_of_row_can_be_compared_alone():
    other = with_row(3, format=None)
    assert AUDIT.diff(other, what=["weight"]) == [] and len(AUDIT.diff(other)) == 1


def test_an_audit_survives_json():
    assert Audit.from_json(AUDIT.to_json()) == AUDIT


def test_the_table_has_every_row_with_equal_layers_on_one_line():
    text = str(AUDIT)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == "layers/*/up [0-1] weight 8x32 nvfp4 -2 layers/*/up"
    assert "layers/*/up [2] weight 8x32 - layer kept as it is" in lines
    assert "router weight 8x32 - excluded by 'router'" in lines
    assert lines[-1] == "2 weights and 2 sites quantised, of 6 rows" and len(lines) == 6


def stats(coded):
    return SiteStats(coded=Mean(total=coded, count=64.0), nonfinite=Mean(total=0.0, count=64.0))


def test_check_passes_where_every_site_produced_codes():
    AUDIT.check({"layers/0/up/input": stats(3.0), "layers/1/up/input": stats(1.0)})


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"layers/0/up/input": 3.0}, r"sites without counts: got \['layers/1/up/input'\]"),
        ({}, "is the quantised forward really the one that ran"),  # F16: looks enabled, is not
        ({"layers/0/up/input": 3.0, "layers/1/up/input": 0.0}, r"sites without codes: got \['l"),
        ({"layers/0/up/input": 3.0, "layers/1/up/input": float("nan")}, "without codes"),
        (
            {"layers/0/up/input": 3.0, "layers/1/up/input": 1.0, "head/input": 1.0},
            r"unknown sites: got \['head/input'\]",
        ),
    ],
)
def test_check_raises_where_a_site_is_dead_missing_or_unknown(counts, text):
    with pytest.raises(ValueError, match=text):
        AUDIT.check({path: stats(total) for path, total in counts.items()})


def test_a_path_has_one_row():
    with pytest.raises(ValueError, match=r"got \['router'\], need one row for each path"):
        Audit(rows=(*ROWS, ROWS[-1]))
