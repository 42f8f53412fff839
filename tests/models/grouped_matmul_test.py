"""Against dense float64 products, one token and expert at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.models import grouped_matmul as gm

M, X, E, K, N = 37, 2, 5, 13, 7  # odd on purpose; N outputs


def some_routes(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    routes = np.argsort(rng.random((M, E)), axis=1)[:, :X].astype(np.int32)
    if kind == "one_expert":
        routes[:] = 3
    elif kind == "two_experts_empty":
        routes = np.array([0, 4, 2], np.int32)[routes % 3]
    elif kind == "some_dropped":
        routes[::3] = -1
        routes[1::3, 1] = -1
    elif kind == "none":
        routes[:] = -1
    return routes


@functools.partial(jax.jit, static_argnums=4)
def products(x_MK, w_EOK, routes_MX, dy_MXO, experts):
    """(y_MXO, dx_MK, dw_EOK, active), through the whole way there and back."""
    dispatch = gm.make_dispatch(routes_MX, experts)

    def forward(x, w):
        return gm.scatter_pairs(
            gm.grouped_matmul(gm.gather_rows(x, dispatch), w, dispatch), dispatch
        )

    y, pull = jax.vjp(forward, x_MK, w_EOK)
    return y, *pull(dy_MXO), dispatch.active


def products_by_hand(x, w, routes, dy):
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for m, choice in np.ndindex(routes.shape):
        expert = routes[m, choice]
        if expert >= 0:
            y[m, choice] = w[expert] @ x[m]
            dx[m] += w[expert].T @ dy[m, choice]
            dw[expert] += np.outer(dy[m, choice], x[m])
    return y, dx, dw


def draw(tokens, choices, experts, k, o, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    shapes = (tokens, k), (experts, o, k), (tokens, choices, o)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) for shape in shapes]


def float64(*arrays):
    return [np.asarray(a.astype(jnp.float32), np.float64) for a in arrays]


@pytest.mark.parametrize(
    "kind", ["random", "one_expert", "two_experts_empty", "some_dropped", "none"]
)
def test_values_and_both_gradients_are_those_of_dense_products(kind):
    routes = some_routes(kind)
    x, w, dy = draw(M, X, E, K, N)
    *got, _ = products(x, w, jnp.asarray(routes), dy, E)
    for ours, want in zip(got, products_by_hand(*float64(x, w), routes, *float64(dy)), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["one_expert", "two_experts_empty", "none"])
def test_an_expert_without_tokens_gets_exactly_zero_gradient(kind):
    routes = some_routes(kind)
    x, w, dy = draw(M, X, E, K, N)
    dw = np.asarray(products(x, w, jnp.asarray(routes), dy, E)[2])
    for expert in range(E):
        assert np.any(dw[expert] != 0) == (expert in routes), expert


def test_a_dropped_pair_is_exactly_zero_both_ways():
    routes = some_routes("some_dropped")
    x, w, dy = draw(M, X, E, K, N)
    y, dx, _, _ = products(x, w, jnp.asarray(routes), dy, E)
    assert not np.any(np.asarray(y)[routes < 0])
    assert not np.any(np.asarray(dx)[np.all(routes < 0, axis=1)])


def test_one_token_reaches_its_experts():
    x, w, dy = draw(1, 2, 4, 8, 3)
    routes = np.array([[2, 0]], np.int32)
    *got, active = products(x, w, jnp.asarray(routes), dy, 4)
    assert int(active) == 2
    for ours, want in zip(got, products_by_hand(*float64(x, w), routes, *float64(dy)), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


def test_bfloat16_products_accumulate_in_float32_and_round_once():
    """600 rows of one expert over 256 channels: sums in BF16 would be off by whole percents."""
    x, w, dy = draw(600, 1, 2, 256, 4, jnp.bfloat16)
    routes = np.ones((600, 1), np.int32)
    *got, _ = products(x, w, jnp.asarray(routes), dy, 2)
    wanted = products_by_hand(*float64(x, w), routes, *float64(dy))
    for ours, want in zip(got, wanted, strict=True):
        assert ours.dtype == jnp.bfloat16
        # half a unit in the last of 8 bits, and what float32 loses where terms cancel
        np.testing.assert_allclose(*float64(ours), want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("kind", ["random", "one_expert", "some_dropped", "none"])
def test_blocks_in_use_are_just_enough_for_each_experts_rows(kind):
    routes = some_routes(kind)
    dispatch = jax.jit(gm.make_dispatch, static_argnums=1)(jnp.asarray(routes), E)
    counts = np.bincount(routes[routes >= 0], minlength=E)
    assert int(dispatch.active) == sum(-(-count // dispatch.block) for count in counts)
    in_use = np.asarray(dispatch.expert_N)[: int(dispatch.active)]
    np.testing.assert_array_equal(np.unique(in_use), np.flatnonzero(counts))
    pairs = np.asarray(dispatch.pair_R)
    np.testing.assert_array_equal(
        np.sort(pairs[pairs < M * X]), np.flatnonzero(routes.ravel() >= 0)
    )


def test_blocks_not_in_use_are_never_multiplied():
    """What stands in them, NaN here, reaches neither the result nor a gradient: no work is done."""
    dispatch = jax.jit(gm.make_dispatch, static_argnums=1)(
        jnp.asarray(some_routes("one_expert")), E
    )
    active, (blocks, block) = int(dispatch.active), (len(dispatch.expert_N), dispatch.block)
    assert active < blocks
    x = jnp.ones((blocks, block, K)).at[active:].set(jnp.nan)

    @jax.jit
    def run(x, w, dispatch):
        y, pull = jax.vjp(lambda x, w: gm.grouped_matmul(x, w, dispatch), x, w)
        return y, *pull(jnp.ones_like(y))

    y, dx, dw = run(x, jnp.ones((E, N, K)), dispatch)
    assert np.all(np.asarray(y)[:active] == K)
    assert not np.any(np.asarray(y)[active:])
    assert not np.any(np.asarray(dx)[active:])
    np.testing.assert_array_equal(np.asarray(dw)[3], active * block)


def test_rows_of_pairs_go_to_the_layout_and_back():
    routes = jnp.asarray(some_routes("some_dropped"))
    values = jnp.arange(1.0, M * X + 1)[:, None]

    @jax.jit
    def there_and_back(routes, values):
        dispatch = gm.make_dispatch(routes, E)
        return gm.scatter_pairs(gm.gather_rows(values, dispatch, per_pair=True), dispatch)

    got = np.asarray(there_and_back(routes, values))[..., 0].ravel()
    want = np.where(np.asarray(routes).ravel() >= 0, np.arange(1, M * X + 1), 0)
    np.testing.assert_array_equal(got, want)
