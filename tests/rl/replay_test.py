import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl import replay

# Compiled as a whole: op by op, each shape would be compiled a dozen times.
replayed_gates = jax.jit(replay.replayed_gates, static_argnames="renormalise")
route_mismatch = jax.jit(replay.route_mismatch)
top_k_routes = jax.jit(replay.top_k_routes, static_argnums=1, static_argnames="renormalise")


def gates_by_hand(logits, routes, renormalise=True):
    """softmax over all experts, then renormalised over the recorded ones: the definition."""
    gates = np.zeros(routes.shape)
    for index in np.ndindex(routes.shape[:-1]):
        probs = [math.exp(x) for x in logits[index]]
        probs = [p / sum(probs) for p in probs]
        chosen = [probs[e] if e >= 0 else 0.0 for e in routes[index]]
        total = sum(chosen) if renormalise else 1.0
        gates[index] = [c / total if c else 0.0 for c in chosen]
    return gates


def sample(*leading, experts=6, k=2, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*leading, experts)).astype(np.float32) * 3
    routes = np.argsort(rng.random((*leading, experts)), axis=-1)[..., :k].astype(np.int16)
    return logits, routes


@pytest.mark.parametrize("leading", [(), (5,), (3, 4), (2, 3, 4)])
def test_replayed_gates_are_the_router_probabilities_renormalised(leading):
    logits, routes = sample(*leading)
    got = replayed_gates(jnp.asarray(logits), jnp.asarray(routes))
    np.testing.assert_allclose(got, gates_by_hand(logits, routes), rtol=1e-5)
    assert got.dtype == jnp.float32


def test_replayed_gates_have_the_closed_form_gradient():
    """d g_x / d s_e = g_x (1[e = route_x] - g_e) for recorded experts, 0 for all others (F30)."""
    logits, routes = sample(4, experts=5, k=2)
    cotangent = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)

    def total(s):
        return jnp.sum(replayed_gates(s, jnp.asarray(routes)) * cotangent)

    got = jax.jit(jax.grad(total))(jnp.asarray(logits))
    gates, want = gates_by_hand(logits, routes), np.zeros((4, 5))
    for a in range(4):
        for x in range(2):
            for y in range(2):
                same = float(x == y)
                want[a, routes[a, y]] += cotangent[a, x] * gates[a, x] * (same - gates[a, y])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert np.abs(got).max() > 0.1  # the router learns under replay


@pytest.mark.parametrize("leading", [(), (3, 4)])
def test_raw_gates_are_the_router_probabilities(leading):
    """Of some checkpoints (`norm_topk_prob` false) the gates of a token do not sum to one."""
    logits, routes = sample(*leading)
    got = replayed_gates(jnp.asarray(logits), jnp.asarray(routes), renormalise=False)
    np.testing.assert_allclose(got, gates_by_hand(logits, routes, False), rtol=1e-5)
    own, gates = top_k_routes(jnp.asarray(logits), 2, renormalise=False)
    again = replayed_gates(jnp.asarray(logits), own, renormalise=False)
    np.testing.assert_array_equal(again, gates)
    assert np.all(np.sum(gates, axis=-1) < 0.999)


def test_raw_gates_have_the_closed_form_gradient():
    """d g_x / d s_e = g_x (1[e = route_x] - p_e) for every expert: all of them share the sum."""
    logits, routes = sample(4, experts=5, k=2)
    routes[1] = -1
    routes[2, 1] = -1  # one of two
    cotangent = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)

    def total(s):
        gates = replayed_gates(s, jnp.asarray(routes), renormalise=False)
        return jnp.sum(gates * cotangent)

    got = jax.jit(jax.grad(total))(jnp.asarray(logits))
    wide = np.float64(logits)
    probs = np.exp(wide) / np.exp(wide).sum(axis=-1, keepdims=True)
    want = np.zeros((4, 5))
    for a, x in np.argwhere(routes >= 0):
        chosen = np.arange(5) == routes[a, x]
        want[a] += cotangent[a, x] * probs[a, routes[a, x]] * (chosen - probs[a])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(got[1], 0)
    assert np.all(np.asarray(got)[[0, 2, 3]])  # also experts that nobody recorded


def test_raw_gates_survive_logits_far_apart():
    logits = jnp.array([[1000.0, 500.0, 1000.0, -500.0]])
    gates = replayed_gates(logits, jnp.array([[2, 3]]), renormalise=False)
    np.testing.assert_array_equal(gates, [[0.5, 0.0]])


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("logit", [0.0, np.nan, np.inf, -np.inf])
def test_padding_routes_give_gate_zero_and_exactly_no_gradient(logit, renormalise):
    logits, routes = sample(3)
    logits[1] = logit
    routes[1] = -1

    def total(s):
        return jnp.sum(replayed_gates(s, jnp.asarray(routes), renormalise=renormalise) ** 2)

    gates = replayed_gates(jnp.asarray(logits), jnp.asarray(routes), renormalise=renormalise)
    grad = jax.jit(jax.grad(total))(jnp.asarray(logits))
    np.testing.assert_array_equal(gates[1], np.zeros(2))
    np.testing.assert_array_equal(grad[1], np.zeros(6))
    assert np.all(np.isfinite(gates)) and np.all(np.isfinite(grad))


def test_replayed_gates_survive_logits_far_apart():
    """exp(500) overflows; the best recorded expert need not be the best of all."""
    logits = jnp.array([[1000.0, 500.0, -500.0, -500.0]])
    gates = replayed_gates(logits, jnp.array([[2, 3]]))
    np.testing.assert_array_equal(gates, [[0.5, 0.5]])
    np.testing.assert_array_equal(replayed_gates(logits, jnp.array([[1, 2]])), [[1.0, 0.0]])


def test_replayed_gates_show_an_impossible_expert_as_nan():
    assert np.all(np.isnan(replayed_gates(jnp.zeros((1, 4)), jnp.array([[0, 4]]))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_replaying_ones_own_routes_changes_nothing(dtype):
    logits = jnp.asarray(sample(7, 5)[0]).astype(dtype)
    routes, gates = top_k_routes(logits, 2)
    np.testing.assert_array_equal(replayed_gates(logits, routes), gates)
    assert routes.dtype == jnp.int32

    weights = jnp.asarray(np.random.default_rng(2).normal(size=gates.shape), jnp.float32)
    own = jax.jit(jax.grad(lambda s: jnp.sum(top_k_routes(s, 2)[1] * weights)))(logits)
    replayed = jax.jit(jax.grad(lambda s: jnp.sum(replayed_gates(s, routes) * weights)))(logits)
    np.testing.assert_array_equal(own, replayed)
    assert float(jnp.max(jnp.abs(own))) > 0


def test_top_k_routes_are_the_largest_logits_best_first():
    logits = sample(20)[0]
    routes, gates = top_k_routes(jnp.asarray(logits), 3)
    np.testing.assert_array_equal(routes, np.argsort(-logits, axis=-1)[:, :3])
    np.testing.assert_allclose(np.sum(gates, axis=-1), 1.0, rtol=1e-6)


def test_route_mismatch_compares_sets_of_valid_tokens():
    logits = jnp.array([[3.0, 2.0, 1.0, 0.0]] * 5)  # own set: {0, 1}
    routes = jnp.array([[0, 1], [1, 0], [0, 2], [2, 3], [-1, -1]], jnp.int16)
    got = route_mismatch(logits, routes, jnp.array([True, True, True, False, True]))
    assert (float(got.total), float(got.count)) == (1.0, 3.0)


def test_route_mismatch_of_layers_is_counted_per_token_and_layer():
    logits, _ = sample(3, 2, 4)  # layers, sequences, positions
    own, _ = top_k_routes(jnp.asarray(logits), 2)
    other = own.at[1].set((own[1] + 1) % 6)
    valid = jnp.ones((3, 2, 4), bool)
    assert route_mismatch(jnp.asarray(logits), own[..., ::-1], valid).value == 0
    want = np.mean(
        [
            set(a) != set(b)
            for a, b in zip(
                np.asarray(own).reshape(-1, 2), np.asarray(other).reshape(-1, 2), strict=True
            )
        ]
    )
    got = route_mismatch(jnp.asarray(logits), other, valid)
    assert float(got.count) == 24
    assert got.value == pytest.approx(want)
    assert want > 0
