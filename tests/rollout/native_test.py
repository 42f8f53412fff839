import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trace_jax import formats, weight_sync
from trace_jax.models import grouped_matmul as gm
from trace_jax.qat import sites
from trace_jax.rollout import native

NVFP4 = formats.get("nvfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
M, X, E, K, N = 9, 2, 3, 48, 20  # N outputs; three blocks of 16: no power of two (F39)


def draw():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((M, K)) * np.exp(rng.normal(size=(M, 1)))
    w = rng.standard_normal((E, N, K)) * np.array([0.01, 1, 30])[:, None, None]
    routes = np.argsort(rng.random((M, E)), axis=1)[:, :X]
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), routes.astype(np.int32)


def scale_values(scale_bytes):
    return np.asarray(scale_bytes).view(jnp.float8_e4m3fn).astype(np.float32)


def unpacked(packed):
    pair = np.stack([np.asarray(packed) & 15, np.asarray(packed) >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], -1)


def operands(codes, scale_bytes):
    """code * block scale: exact."""
    return E2M1[np.asarray(codes)] * np.repeat(scale_values(scale_bytes), 16, axis=-1)


@functools.partial(jax.jit, static_argnums=2)
def run(x, routes, rule, weight):
    params = types.SimpleNamespace(gate_up=nnx.Param(weight))
    layer = native.Projections(NVFP4, formats.get("nvfp4", global_rule=rule), params, "expert")
    dispatch = gm.make_dispatch(routes, E)
    y = layer.gate_up(x, dispatch)
    codes, scales, global_ = layer.kept["expert_in"]
    global_ = jnp.ones((len(x), 1)) if global_ is None else global_
    return (codes, scales, global_), gm.scatter_pairs(y, dispatch)


def pack(w):
    return jax.jit(weight_sync.pack_weight, static_argnums=1)(w, NVFP4)


@pytest.mark.parametrize("rule", ["amax", "one"])
def test_products_are_of_codes_and_block_scales_with_each_global_scale_applied_once(rule):
    x, w, routes = draw()
    weight = pack(w)
    (codes, scales, global_), got = run(x, jnp.asarray(routes), rule, weight)
    x_wide = operands(unpacked(codes), scales).astype(np.float64)
    w_wide = operands(unpacked(weight["codes"]), weight["scales"]).astype(np.float64)
    x_global, w_global = np.asarray(global_, np.float64), np.asarray(weight["global"], np.float64)
    for m, choice in np.ndindex(M, X):
        e = routes[m, choice]
        want = (w_wide[e] @ x_wide[m]) * x_global[m] * w_global[e, 0]
        size = (np.abs(w_wide[e]) @ np.abs(x_wide[m])) * x_global[m] * w_global[e, 0]
        assert np.all(np.abs(got[m, choice] - want) <= 1e-6 * size)


def test_products_are_near_those_of_what_was_quantised():
    x, w, routes = draw()
    weight = pack(w)
    _, got = run(x, jnp.asarray(routes), "amax", weight)
    want = np.einsum("mxok,mk->mxo", np.asarray(w)[routes], np.asarray(x))
    ratio = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
    assert 0.05 < ratio < 0.25  # FP4 keeps about one digit


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_weights_are_exactly_the_trainers_fake_quantised_weights(dtype):
    _, w, _ = draw()
    weight = pack(w)
    trained = jax.jit(sites.quantize_weight, static_argnums=(1, 2))(w, NVFP4, dtype)
    step = scale_values(weight["scales"]) * np.asarray(weight["global"])
    values = E2M1[unpacked(weight["codes"])] * np.repeat(step, 16, axis=-1)
    np.testing.assert_array_equal(np.asarray(trained), values.astype(dtype))


def test_a_matrix_has_one_global_scale_whatever_the_other_experts_hold():
    _, w, _ = draw()
    alone = pack(w.at[1:].set(0))
    for name, leaf in pack(w).items():
        np.testing.assert_array_equal(leaf[0], alone[name][0])
    np.testing.assert_array_equal(
        pack(w)["global"][:, 0, 0],
        np.abs(w.astype(jnp.bfloat16).astype(jnp.float32)).max(axis=(1, 2)) * np.float32(1 / 2688),
    )
