"""Oracle: numpy float64 with sorting written out; sampled tokens counted against it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rollout.draws import make_draw

V = 12
LOGITS = np.random.default_rng(0).normal(0, 2, (3, V)).astype(np.float32)


def keys(rows, seed=0):
    return jax.random.split(jax.random.key(seed), rows)


def allowed(row, temperature, top_p, top_k):
    """The tokens that may be drawn and their probabilities, one after the other."""
    logits = row.astype(np.float64) / temperature
    order = sorted(range(V), key=lambda i: (-logits[i], i))
    if top_k is not None:
        order = order[:top_k]
    weights = np.exp(logits[order] - logits.max())
    probabilities = weights / weights.sum()
    kept, total = [], 0.0
    for token, p in zip(order, probabilities, strict=True):
        kept.append(token)
        total += p
        if top_p is not None and total >= top_p:
            break
    chosen = {t: probabilities[order.index(t)] for t in kept}
    whole = sum(chosen.values())
    return {t: p / whole for t, p in chosen.items()}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_p", "top_k"), [(None, None), (0.5, None), (0.9, None), (None, 1), (None, 4), (0.7, 5)]
)
def test_tokens_are_drawn_from_the_truncated_distribution(temperature, top_p, top_k):
    n, row = 20_000, LOGITS[0]
    draw = jax.jit(make_draw(temperature, top_p, top_k))
    token_B, logprob_B = draw(jnp.asarray(np.tile(row, (n, 1))), keys(n), jnp.int32(3))
    expected = allowed(row, temperature, top_p, top_k)
    found = np.bincount(np.asarray(token_B), minlength=V) / n
    assert set(np.nonzero(found)[0]) <= set(expected)
    for token, p in expected.items():
        assert abs(found[token] - p) < 5 * np.sqrt(p * (1 - p) / n) + 1e-9, token
    scaled = row.astype(np.float64) / temperature
    full = scaled - np.log(np.sum(np.exp(scaled)))
    np.testing.assert_allclose(logprob_B, full[np.asarray(token_B)], atol=2e-6)


def test_temperature_zero_takes_the_first_of_the_most_likely():
    logits = LOGITS.copy()
    logits[1, [4, 7]] = 9.0
    token_B, logprob_B = make_draw(0.0, 0.9, 3)(jnp.asarray(logits), keys(3), jnp.int32(0))
    assert token_B.tolist() == np.argmax(logits, axis=1).tolist() and token_B[1] == 4
    exact = logits.astype(np.float64)
    expected = exact.max(1) - np.log(np.exp(exact).sum(1))
    np.testing.assert_allclose(logprob_B, expected, atol=2e-6)


def test_each_row_is_truncated_alone_and_ties_of_the_kth_stay():
    logits = np.zeros((2, V), np.float32)
    logits[0, 3], logits[1, 5] = 30, 20
    draw = make_draw(1.0, 0.9)
    for step in range(5):
        token_B, _ = draw(jnp.asarray(logits), keys(2), jnp.int32(step))
        assert token_B.tolist() == [3, 5]
    n = 3000
    token_B, _ = make_draw(1.0, None, 2)(jnp.zeros((n, V)), keys(n), jnp.int32(0))
    assert set(np.asarray(token_B).tolist()) == set(range(V))


def test_draws_differ_by_step_and_key_and_repeat_for_equal_ones():
    draw, logits = make_draw(1.0), jnp.zeros((64, V))
    first = draw(logits, keys(64), jnp.int32(0))[0].tolist()
    assert first == draw(logits, keys(64), jnp.int32(0))[0].tolist()
    assert first != draw(logits, keys(64), jnp.int32(1))[0].tolist()
    assert first != draw(logits, keys(64, 1), jnp.int32(0))[0].tolist()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((-0.1,), "temperature: got"),
        ((1.0, 0.0), "top_p"),
        ((1.0, 1.5), "top_p"),
        ((1.0, None, 0), "top_k"),
    ],
)
def test_values_out_of_bounds_are_refused(args, says):
    with pytest.raises(ValueError, match=says):
        make_draw(*args)
