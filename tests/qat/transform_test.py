"""Weights by path. Oracle: each matrix cut out with numpy, as (outputs, contracted), one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from trace_jax import config as cfg
from trace_jax import formats
from trace_jax.models import transformer
from trace_jax.qat import Recipe, Rule, quantize_params, sites

NVFP4 = formats.get("nvfp4")


def normal(seed, *shape):
    spread = np.exp(np.random.default_rng(seed + 99).normal(size=(*shape[:-2], 1, 1)))
    draw = np.random.default_rng(seed).normal(size=shape) * spread
    return draw.astype(np.float32)


@jax.jit
def by_itself(w_OK):
    return sites.quantize_weight(w_OK, NVFP4, w_OK.dtype)


def one(w_OK):
    """One matrix on its own."""
    return np.asarray(by_itself(jnp.asarray(w_OK)))


def under(options, recipe_options=None, **leaves):
    """The leaves of module `m` under one rule."""
    recipe = Recipe(rules=(Rule("**", weights="nvfp4", **options),), **(recipe_options or {}))
    tree = {"m": {name: jnp.asarray(leaf) for name, leaf in leaves.items()}}
    return jax.jit(lambda tree: quantize_params(tree, recipe))(tree)["m"]


def test_a_kernel_is_contracted_along_its_inputs():
    w = normal(0, 48, 20)
    got = under({}, kernel=w, bias=w[0])
    np.testing.assert_array_equal(got["kernel"], one(w.T).T)
    np.testing.assert_array_equal(got["bias"], w[0])
    assert np.any(got["kernel"] != one(w))


def test_experts_are_matrices_of_their_own():
    w = normal(1, 3, 32, 20)  # E, in, out
    want = np.stack([one(w[e].T).T for e in range(3)])
    np.testing.assert_array_equal(under({"axis": -2}, w=w)["w"], want)
    w = normal(2, 3, 20, 32)  # E, out, in: the trainer's own
    want = np.stack([one(w[e]) for e in range(3)])
    np.testing.assert_array_equal(under({"axis": -1}, w=w)["w"], want)


def test_heads_are_outputs_of_one_matrix():
    w = normal(3, 32, 2, 5)  # D, heads, head dim; contracted D
    want = one(w.reshape(32, 10).T).T.reshape(32, 2, 5)
    np.testing.assert_array_equal(under({"axis": -3, "out": (-2, -1)}, w=w)["w"], want)


def test_two_contracted_axes_are_one_row_of_blocks():
    w = normal(4, 3, 8, 20)  # heads, head dim, D; blocks of 16 go across heads of 8
    want = one(w.reshape(24, 20).T).T.reshape(3, 8, 20)
    np.testing.assert_array_equal(under({"axis": (-3, -2), "out": -1}, w=w)["w"], want)


def test_gate_and_up_share_one_global_scale_where_the_rule_says_so():
    """F3: alone, gate would have a scale of its own (and of 4 it would be the same values)."""
    gate = normal(5, 2, 32, 20)
    up = np.float32(3.7) * gate
    got = under({"axis": -2, "share_scale": ("gate", "up")}, gate=gate, up=up, down=gate)
    for e in range(2):
        both = one(np.concatenate([gate[e].T, up[e].T]))
        np.testing.assert_array_equal(got["gate"][e], both[:20].T)
        np.testing.assert_array_equal(got["up"][e], both[20:].T)
        np.testing.assert_array_equal(got["down"][e], one(gate[e].T).T)
    assert np.any(got["gate"] != got["down"])


def test_only_the_chosen_layers_of_a_stack_change():
    w = normal(6, 4, 3, 20, 32)  # L, E, out, in
    layers = {"layers": "m/*", "scanned": True, "keep_first": 1, "keep_last": 1}
    got = np.asarray(under({"axis": -1}, layers, w=w)["w"])
    np.testing.assert_array_equal(got[[0, 3]], w[[0, 3]])
    want = [[one(w[i, e]) for e in range(3)] for i in (1, 2)]
    np.testing.assert_array_equal(got[1:3], want)


def test_the_policys_own_tree_is_quantised_as_the_policy_does_it():
    model = cfg.Model(
        width=32, layers=3, heads=2, kv_heads=1, head_dim=16, experts=2, expert_ffn=16
    )
    params = transformer.init(model, 40, jax.random.key(0))
    rule = Rule("layers/*/moe/{gate_up,down}", weights="nvfp4", axis=-1)
    recipe = Recipe(rules=(rule,), layers="layers/*", scanned=True, keep_last=1)
    got = jax.jit(lambda p: quantize_params(p, recipe))(params)
    for name in ("gate_up", "down"):
        w = params["layers"]["moe"][name]
        want = jax.jit(lambda w: sites.quantize_weight(w, NVFP4, jnp.float32))(w[:2])
        np.testing.assert_array_equal(got["layers"]["moe"][name][:2], want)
        np.testing.assert_array_equal(got["layers"]["moe"][name][2], w[2])
        got["layers"]["moe"][name] = w
    jax.tree.map(np.testing.assert_array_equal, got, params)  # and nothing else has moved


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_cotangent_passes_unchanged(dtype):
    options = {"axis": -2, "share_scale": ("gate", "up")}
    tree = {"m": {n: jnp.asarray(normal(7, 2, 32, 20), dtype) for n in ("gate", "up", "norm")}}
    recipe = Recipe(
        rules=(Rule("m/*/{gate,up}", weights="nvfp4", **options),),
        layers="m/*",
        scanned=True,
        keep_first=1,
    )
    cotangent = jax.tree.map(lambda w: jnp.asarray(normal(8, *w.shape), dtype), tree)
    value, pull = jax.vjp(jax.jit(lambda tree: quantize_params(tree, recipe)), tree)
    (back,) = pull(cotangent)
    jax.tree.map(np.testing.assert_array_equal, back, cotangent)
    assert jax.tree.map(lambda w: w.dtype, value) == jax.tree.map(lambda w: w.dtype, tree)


def test_codes_do_not_depend_on_the_layout_over_devices():
    """F6: a maximum taken per shard would change scales; here along both axes of a 2x2 mesh."""
    w = normal(9, 2, 64, 32)
    recipe = Recipe(rules=(Rule("w", weights="nvfp4", axis=-2),))
    quantise = jax.jit(lambda w: quantize_params({"w": w}, recipe)["w"])
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, "a", "b")))
    np.testing.assert_array_equal(quantise(split), quantise(jnp.asarray(w)))


def test_a_tree_of_lists_and_dicts_keeps_its_structure():
    tree = {
        "layers": [{"kernel": jnp.asarray(normal(i, 16, 8))} for i in range(2)],
        "n": jnp.ones(3),
    }
    recipe = Recipe(rules=(Rule("layers/1", weights="nvfp4"),))
    got = quantize_params(tree, recipe)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    np.testing.assert_array_equal(got["layers"][0]["kernel"], tree["layers"][0]["kernel"])
    want = one(np.asarray(tree["layers"][1]["kernel"]).T).T
    np.testing.assert_array_equal(got["layers"][1]["kernel"], want)


def test_a_kernel_of_three_axes_needs_a_rule_that_names_its_axis():
    """Stock attention has such kernels, and so have convolutions: a bare tree cannot tell."""
    with pytest.raises(ValueError, match=r"m/kernel: got shape .* need the contracted axis"):
        under({}, kernel=normal(0, 3, 16, 16))
