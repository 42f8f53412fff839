"""Oracle: the sixteen values written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.formats import s1p2

GRID = np.arange(8) / 4
round_nearest = jax.jit(s1p2.round_nearest)
bracket = jax.jit(s1p2.bracket)


def test_codes_are_the_grid_in_quarters():
    want = np.concatenate([GRID, -GRID])
    np.testing.assert_array_equal(s1p2.decode(jnp.arange(16, dtype=jnp.uint8)), want)


@pytest.mark.parametrize("step", [1.0, 2.0**-48, 1.75 * 2.0**15, 4.0 * 1.5 * 2.0**15])
def test_rounding_is_to_the_nearest_with_ties_away_from_zero(step):
    quarters = np.arange(0, 2.25, 1 / 32)  # every tie among them
    want = np.minimum(np.floor(4 * quarters + 0.5), 7).astype(np.uint8)
    x = (quarters * step).astype(np.float32)
    steps = jnp.full(x.shape, step, jnp.float32)
    np.testing.assert_array_equal(round_nearest(jnp.asarray(x), steps), want)
    np.testing.assert_array_equal(
        round_nearest(jnp.asarray(-x), steps), np.where(want > 0, want | 8, 0)
    )


@pytest.mark.parametrize("step", [1.0, 2.0**-40, 5.0])
def test_bracket_is_the_two_values_around_x(step):
    quarters = np.concatenate([np.arange(0, 2.25, 1 / 32), [1e30]])
    x = (quarters * step).astype(np.float32)
    clipped = np.minimum(4 * quarters, 7)
    floor, ceil = np.floor(clipped), np.ceil(clipped)
    steps = jnp.full(x.shape, step, jnp.float32)
    np.testing.assert_array_equal(bracket(jnp.asarray(x), steps), [floor, ceil])
    np.testing.assert_array_equal(bracket(jnp.asarray(-x), steps), [-ceil, -floor])
