import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl.correction import (
    effective_sample_fraction,
    importance_metrics,
    importance_weight,
)


@pytest.mark.parametrize(
    ("old", "mu", "cap", "want"),
    [
        (-1.0, -1.0, 5.0, 1.0),
        (-1.0, -2.0, 5.0, math.e),  # cap inactive
        (-1.0, -3.0, 5.0, 5.0),  # e^2 > 5: cap active
        (-3.0, -1.0, 5.0, math.exp(-2)),  # the cap never raises a small weight
        (-3.0, -1.0, 0.01, 0.01),
        (0.0, -1000.0, 5.0, 5.0),  # exp(1000) would overflow
        (-1000.0, 0.0, 5.0, math.exp(-20)),  # the exponent is clamped
        (-1.0, -3.0, None, 1.0),  # no correction
    ],
)
def test_importance_weight_is_the_capped_ratio(old, mu, cap, want):
    got = importance_weight(jnp.full((1, 2), old), jnp.full((1, 2), mu), cap)
    np.testing.assert_allclose(got, np.full((1, 2), want), rtol=1e-6)


@pytest.mark.parametrize("cap", [1.2, 10.0])
def test_importance_weight_has_no_gradient(cap):
    def total(old):
        return jnp.sum(importance_weight(old, jnp.full((3,), -1.5), cap))

    np.testing.assert_array_equal(jax.grad(total)(jnp.array([-1.0, -1.5, -2.0])), np.zeros(3))


def test_importance_metrics_count_trained_tokens_only():
    weights = jnp.array([[0.5, 5.0, jnp.nan], [5.0, 2.0, jnp.inf]])
    mask = jnp.array([[True, True, False], [True, True, False]])
    got = importance_metrics(weights, mask, 5.0)
    assert got["loss/importance_weight"].value == 12.5 / 4
    assert got["loss/importance_weight_squared"].value == (0.25 + 25 + 25 + 4) / 4
    assert got["loss/importance_capped_fraction"].value == 2 / 4
    assert importance_metrics(weights, mask, None)["loss/importance_capped_fraction"].value == 0


def test_effective_sample_fraction_is_exact_for_any_split():
    """Kish: one weight of 3 and three of 1 are worth (3 + 3)^2 / 12 = 3 of 4 tokens."""
    weights, mask = jnp.array([3.0, 1.0, 1.0, 1.0]), jnp.ones(4, bool)
    parts = [
        importance_metrics(weights[part], mask[part], 5.0) for part in (slice(0, 1), slice(1, 4))
    ]
    first, second = (
        parts[0][key] + parts[1][key]
        for key in ("loss/importance_weight", "loss/importance_weight_squared")
    )
    assert effective_sample_fraction(first, second) == pytest.approx(3 / 4, rel=1e-6)


def test_effective_sample_fraction_of_nothing_is_zero():
    empty = importance_metrics(jnp.ones(3), jnp.zeros(3, bool), 5.0)
    values = list(empty.values())
    assert effective_sample_fraction(values[0], values[1]) == 0
