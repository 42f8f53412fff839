"""Which layer each row belongs to, against layers listed by hand; the scan against a plain loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import layer_kinds, stacks
from trace_jax.qat import plan

LINEAR = {"linear_key_heads": 1, "linear_value_heads": 1}
LINEAR |= {"linear_key_dim": 8, "linear_value_dim": 8}


def hybrid(layers, **changes):
    return cfg.Model(layers=layers, full_attention_every=4, **LINEAR, **changes)


def cuts(model, quant=None):
    quant = quant or cfg.Quant(rollout="bf16", trainer="bf16")
    return [
        (s.start, s.stop, len(s.period)) for s in plan.side_segments(quant, model, quant.rollout)
    ]


def test_rows_of_a_mixed_model_are_the_layers_that_have_the_component():
    model = hybrid(9, dense_layers=(0, 5), dense_ffn=8)
    assert stacks.ids_by_stack(layer_kinds.kinds(model)) == {
        "attention": (3, 7),
        "linear": (0, 1, 2, 4, 5, 6, 8),
        "moe": (1, 2, 3, 4, 6, 7, 8),
        "mlp": (0, 5),
        "mixer_norm": tuple(range(9)),
        "ffn_norm": tuple(range(9)),
    }


@pytest.mark.parametrize(
    ("model", "quant", "want"),
    [
        (cfg.Model(layers=7), None, [(0, 7, 1)]),
        (hybrid(8), None, [(0, 8, 4)]),
        (hybrid(4), None, [(0, 3, 1), (3, 4, 1)]),
        (hybrid(10), None, [(0, 8, 4), (8, 10, 1)]),
        (cfg.Model(layers=6, dense_layers=(0, 1), dense_ffn=8), None, [(0, 2, 1), (2, 6, 1)]),
        (hybrid(48), cfg.Quant(keep_first=2), [(0, 2, 1), (2, 46, 4), (46, 47, 1), (47, 48, 1)]),
    ],
)
def test_segments_repeat_a_period(model, quant, want):
    assert cuts(model, quant) == want


def test_the_number_of_segments_does_not_grow_with_depth():
    for quant in (cfg.Quant(), cfg.Quant(keep_first=1, keep_last=1, guide_layers="latter_half")):
        assert len(cuts(hybrid(24), quant)) == len(cuts(hybrid(96), quant)) <= 9


def one_or_the_interval(layers, period):
    """The first form of the rule, written as a loop: single layers, or `full_attention_every`."""
    found, start = [], 0
    while start < len(layers):
        ends = {}
        for size in (1, period):
            stop = start
            while layers[stop : stop + size] == layers[start : start + size]:
                stop += size
            ends[size] = stop
        size = period if ends[period] > max(ends[1], start + period) else 1
        found.append((start, ends[size], size))
        start = ends[size]
    return found


@pytest.mark.parametrize("interval", [1, 4])
def test_uniform_models_and_hybrids_are_cut_at_single_layers_and_intervals(interval):
    for layers, first, last in itertools.product(
        (1, 2, 3, 4, 7, 8, 10, 24, 48), range(5), range(5)
    ):
        kinds = ["linear" if (i + 1) % interval else "full" for i in range(layers)]
        what = [(kind, first <= i < layers - last) for i, kind in enumerate(kinds)]
        got = [(s.start, s.stop, len(s.period)) for s in stacks.segments(what, interval)]
        assert got == one_or_the_interval(what, interval), (layers, first, last)


@pytest.mark.parametrize(
    ("layers", "period", "want"),
    [
        ("aaaaaaaaa", 4, [(0, 9, 1)]),  # two intervals of four would reach less far
        ("aaaaaaaa", 4, [(0, 8, 1)]),  # as far: the shortest
        ("abababab", 1, [(0, 8, 2)]),
        ("aababaab", 1, [(0, 2, 1), (2, 6, 2), (6, 7, 1), (7, 8, 1)]),
        ("abcabcabca", 4, [(0, 9, 3), (9, 10, 1)]),
        ("aaabaaabaa", 1, [(0, 8, 4), (8, 10, 1)]),
        ("abcdefghijklmn" * 2, 14, [(0, 28, 14)]),
        ("abcd", 1, [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1)]),
        ("", 4, []),
    ],
)
def test_the_period_that_reaches_farthest_is_taken(layers, period, want):
    got = stacks.segments(tuple(layers), period)
    assert [(s.start, s.stop, len(s.period)) for s in got] == want
    assert "".join(layer for segment in got for layer in segment.layers) == layers


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("make", [cfg.Model, hybrid])
def test_models_with_sparse_steps_have_as_many_segments_at_any_depth(make, step):
    """As decoder_sparse_step gives them: experts in every `step`th layer, dense MLPs between."""
    for quant in (None, cfg.Quant(keep_first=1, keep_last=1)):
        counts, bodies = set(), set()
        for layers in (36, 72, 96):
            dense = tuple(i for i in range(layers) if (i + 1) % step)
            cut = cuts(make(layers=layers, dense_layers=dense, dense_ffn=8), quant)
            counts.add(len(cut))
            bodies.add(sum(size for _, _, size in cut))
        assert len(counts) == 1 and counts.pop() <= 12
        assert max(bodies) <= 24


@pytest.mark.parametrize(
    "model",
    [
        cfg.Model(layers=5),
        cfg.Model(layers=7, dense_layers=(0, 2, 4), dense_ffn=8),
        hybrid(10, dense_layers=(2,), dense_ffn=8),
    ],
)
def test_the_scan_is_a_loop_over_layers_with_their_own_rows(model):
    """Every row is its layer's id, so that a wrong row shows; a site that some layers have."""
    kinds = layer_kinds.kinds(model)
    ids = stacks.ids_by_stack(kinds)
    params = {name: {"w": jnp.asarray(rows)} for name, rows in ids.items()}
    site = tuple(range(3, model.layers, 2))
    seen = []

    def body(carry, what, layer, inputs):
        rows = jnp.stack([layer[name]["w"] for name in sorted(layer)])
        assert sorted(layer) == sorted([what.kind.mixer, what.kind.ffn, *stacks.NORMS])
        out = {"rows": rows, what.kind.mixer: carry}
        if "site" in inputs:
            out["site"] = inputs["site"]
        return carry * 2 + rows[0], out

    records = jnp.asarray(site)
    carry, parts = jnp.int32(1), []
    # one plan a layer where the site is, so that it has a period of its own
    every = [plan.LayerPlan(kind=k, weights=None, acts=None, kv=None, recorded=()) for k in kinds]
    for i in site:
        every[i] = plan.LayerPlan(kind=kinds[i], weights=None, acts=None, kv=None, recorded=("k",))
    for segment in stacks.segments(every, model.full_attention_every):
        stack = stacks.cut(model, segment, params)
        for i in range(segment.start, segment.stop):
            seen.append(jax.tree.leaves(stacks.layer_of(segment, stack, i)))
        inputs = {"site": (site, records)}
        carry, out = stacks.scan(segment, body, carry, stack, inputs)
        parts.append(out)
    joined = stacks.join(parts)
    assert {int(v) for one in seen for v in one} == set(range(model.layers))
    assert all(len({int(v) for v in one}) == 1 for one in seen)
    rows_ids, rows = joined["rows"]
    assert rows_ids == tuple(range(model.layers))
    np.testing.assert_array_equal(rows, np.arange(model.layers)[:, None].repeat(4, 1))
    assert joined["site"][0] == site
    np.testing.assert_array_equal(joined["site"][1], site)
    want, carries = 1, []
    for i in range(model.layers):
        carries.append(want)
        want = want * 2 + i
    assert int(carry) == want
    for mixer in {kind.mixer for kind in kinds}:
        at, got = joined[mixer]
        assert at == layer_kinds.layers_with(model, mixer)
        np.testing.assert_array_equal(got, [carries[i] for i in at])


def test_stacks_are_put_together_from_their_layers():
    model = hybrid(8)
    (segment,) = plan.plain_segments(model)
    params = {
        name: {"w": jnp.asarray(rows)}
        for name, rows in stacks.ids_by_stack(layer_kinds.kinds(model)).items()
    }
    stack = stacks.cut(model, segment, params)
    layers = [stacks.layer_of(segment, stack, i) for i in range(8)]
    again = stacks.stack_layers(segment, layers)
    assert again.keys() == stack.keys()
    jax.tree.map(np.testing.assert_array_equal, again, stack)
