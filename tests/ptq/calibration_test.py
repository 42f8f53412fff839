"""Sums of squared inputs against loops in float64 over what the model really fed."""

from functools import partial

import jax
import numpy as np
import pytest

from tests.ptq.conftest import MODEL, batches
from trace_jax.models import forward
from trace_jax.ptq import calibration


@partial(jax.jit, static_argnames=("model",))
def fed(model, params, tokens, valid):
    """Inputs and routes of every feed-forward, by component."""

    def feed(module, x, routes, gates, _):
        y = forward.plain_feed(model, module, x, routes, gates)
        return y, {"mlp": {"x": x}} if routes is None else {"moe": {"x": x, "routes": routes}}

    return forward.observe(model, params, tokens, valid, feed)[1]


def hidden(x: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64) @ x, 2)
    return gate / (1 + np.exp(-gate)) * up


def by_loops(params, data) -> tuple[dict, dict]:
    """The sums and token counts, one token and one expert at a time."""
    layers = jax.tree.map(np.asarray, params["layers"])
    sums = {
        "moe": {"gate_up": np.zeros((3, 8, 32)), "down": np.zeros((3, 8, 32))},
        "mlp": {"gate_up": np.zeros((1, 32)), "down": np.zeros((1, 48))},
    }
    tokens = {"moe": np.zeros((3, 8)), "mlp": np.zeros(1)}
    for tokens_BT, valid_BT in data:
        rows = fed(MODEL, params, tokens_BT, valid_BT)
        for component, (_, leaves) in rows.items():
            leaves = jax.tree.map(np.asarray, leaves)
            for row in range(len(leaves["x"])):
                for b, t in np.argwhere(valid_BT):
                    x = leaves["x"][row, b, t].astype(np.float64)
                    experts = leaves["routes"][row, b, t] if component == "moe" else [None]
                    for e in experts:
                        at = row if e is None else (row, int(e))
                        h = hidden(x, layers[component]["gate_up"][at])
                        sums[component]["gate_up"][at] += x**2
                        sums[component]["down"][at] += h**2
                        tokens[component][at] += 1
    return sums, tokens


def test_sums_are_those_of_loops_over_valid_tokens(params):
    data = batches(0)
    found = calibration.calibrate(MODEL, params, iter(data))
    sums, tokens = by_loops(params, data)
    jax.tree.map(np.testing.assert_array_equal, found.tokens, tokens)
    # a hidden value near 0 is a difference of larger ones: float32 has its absolute digits only
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, found.sums, sums)
    assert found.tokens["mlp"][0] == sum(valid.sum() for _, valid in data)
    assert found.tokens["moe"].sum() == 3 * 2 * found.tokens["mlp"][0]


def test_what_padding_holds_does_not_matter(params):
    data = batches(1, count=1)
    tokens, valid = data[0]
    other = np.where(valid, tokens, 63 - tokens)
    first, second = (calibration.calibrate(MODEL, params, [(t, valid)]) for t in (tokens, other))
    jax.tree.map(np.testing.assert_array_equal, first.sums, second.sums)


def test_batches_add_up(params):
    one, two = batches(2)
    both = calibration.calibrate(MODEL, params, [one, two])
    parts = [calibration.calibrate(MODEL, params, [part]) for part in (one, two)]
    jax.tree.map(
        lambda a, b, c: np.testing.assert_array_equal(a, b + c), both.sums, *(p.sums for p in parts)
    )


def test_an_expert_without_tokens_gets_the_mean_of_its_layer(params):
    found = calibration.calibrate(MODEL, params, batches(3, count=1))
    tokens, sums = found.tokens["moe"].copy(), found.sums["moe"]["down"].copy()
    tokens[1, 4], sums[1, 4] = 0, 0
    changed = calibration.Hessian(sums={"moe": {"down": sums}}, tokens={"moe": tokens})
    assert changed.unseen_experts == 1 + found.unseen_experts - (found.tokens["moe"][1, 4] == 0)
    h = changed.diagonal("moe", "down")
    seen = tokens[1] > 0
    np.testing.assert_allclose(h[1, 4], sums[1, seen].sum(0) / tokens[1, seen].sum(), rtol=1e-6)
    e = int(np.argmax(tokens[1]))
    np.testing.assert_allclose(h[1, e], sums[1, e] / tokens[1, e], rtol=1e-6)
    assert np.all(h > 0) and h.dtype == np.float32


def test_nothing_and_nonfinite_are_refused(params):
    tokens, valid = batches(4, count=1)[0]
    for empty in ([], [(tokens, np.zeros_like(valid))]):
        with pytest.raises(ValueError, match="got no valid token"):
            calibration.calibrate(MODEL, params, empty)
    broken = {**params, "embed": params["embed"].at[int(tokens[0, 5])].set(np.nan)}
    with pytest.raises(ValueError, match="NaN or Inf activations"):
        calibration.calibrate(MODEL, broken, [(tokens, valid)])
