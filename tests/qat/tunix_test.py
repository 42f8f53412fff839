"""google-tunix's own models under a recipe: the Qwen3-MoE whose experts other tools miss, a Llama.

The wheel is installed without its dependencies (they are 1.6 GB, and a model needs none of them):
`python -m pip install --no-deps -r requirements-peers.lock`.
"""

import functools
import importlib
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trace_jax import formats, qat
from trace_jax.qat import sites

D, T = 32, 6
TOKENS = np.random.default_rng(0).integers(0, 64, (2, T))
INPUTS = (
    jnp.asarray(TOKENS),
    jnp.broadcast_to(jnp.arange(T), (2, T)),
    None,
    jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (2, T, T)),
)


# their imports and ours differ in what they still use of JAX
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@functools.cache
def tunix_folder():
    spec = importlib.util.find_spec("tunix")
    fix = "python -m pip install --no-deps -r requirements-peers.lock"
    assert spec is not None and spec.submodule_search_locations, f"google-tunix is missing: {fix}"
    return spec.submodule_search_locations[0]


def load(kind):
    """tunix.models.<kind>.model, without what its packages' __init__ import besides."""
    root = tunix_folder()
    for name in ("", ".models", f".models.{kind}", ".generate", ".utils"):
        package = types.ModuleType(f"tunix{name}")
        package.__path__ = [root + name.replace(".", "/")]
        sys.modules.setdefault(f"tunix{name}", package)
    return importlib.import_module(f"tunix.models.{kind}.model")


@pytest.fixture(autouse=True)
def their_promotions():
    """Their code relies on implicit promotion; ours does not."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def config(module, **options):
    shared = {"num_layers": 2, "vocab_size": 64, "embed_dim": D, "hidden_dim": D, "num_heads": 2}
    shared |= {"head_dim": 16, "num_kv_heads": 1, "rope_theta": 10000, "norm_eps": 1e-6}
    return module.ModelConfig(**(shared | options))


@functools.cache
def moe(**options):
    q3 = load("qwen3")
    defaults = {"num_experts": 4, "num_experts_per_tok": 2, "use_tied_embedding": False}
    defaults["param_dtype"] = jnp.float32
    model = q3.Qwen3(config(q3, **(defaults | options)), rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    for layer in state["layers"].values():  # theirs start so small that no expert matters
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer["mlp"][name].set_value(layer["mlp"][name][...] * 20)
    nnx.update(model, state)
    return model


def rule(**options):
    return qat.Rule("layers/*/mlp", weights="nvfp4", axis=-2, **options)


def recipe(*rules):
    return qat.Recipe(rules=rules, exclude=("**/router", "embedder"), layers="layers/*")


@pytest.mark.slow
def test_the_experts_of_qwen3_moe_are_quantised_matrix_by_matrix():
    """They are three-axis parameters that the code slices: hooks on modules and operations miss
    them, and nothing says so (measured with qwix: the logits do not change at all)."""
    model = moe()
    q = qat.nnx(model, recipe(rule(share_scale=("gate_proj", "up_proj"))), *INPUTS)
    names = ("down_proj", "gate_proj", "up_proj")
    assert q.audit.weights == tuple(f"layers/{i}/mlp/{n}" for i in range(2) for n in names)
    got = jax.jit(q.quantize_params)(q.params)
    one = jax.jit(lambda w: sites.quantize_weight(w, formats.get("nvfp4"), jnp.float32))
    for i in range(2):
        source, found = ({n: s["layers"][i]["mlp"][n][...] for n in names} for s in (q.params, got))
        for e in range(4):
            both = one(jnp.concatenate([source[n][e].T for n in names[1:]]))
            np.testing.assert_array_equal(found["gate_proj"][e], both[:D].T)
            np.testing.assert_array_equal(found["up_proj"][e], both[D:].T)
            np.testing.assert_array_equal(found["down_proj"][e], one(source["down_proj"][e].T).T)
    plain, changed = jax.jit(lambda m: m(*INPUTS)[0])(model), jax.jit(q.apply)(q.params, *INPUTS)[0]
    moved = np.max(np.abs(plain - changed), axis=-1)
    assert moved.shape == (2, T) and np.all(moved > 1e-3)  # the logits of every token


def test_tunix_qwen3_moe_is_recorded_guided_and_trained():
    everything = recipe(
        rule(inputs="nvfp4", bypass=("router",)),
        qat.Rule("layers/*/attn/{q,k,v,o}_proj", weights="nvfp4"),
        qat.Rule("layers/*/attn/k_norm", outputs="nvfp4", guide="mantissa"),
    )
    q = qat.nnx(moe(dtype=jnp.bfloat16, num_layers=1), everything, *INPUTS)
    rows = {row.path: row for row in q.audit.rows}
    assert rows["layers/0/attn/o_proj/w"].axis == (-3, -2)
    assert rows["layers/0/attn/q_proj/w"].axis == (-3,)
    assert rows["layers/0/mlp/router/kernel"].why == "excluded by '**/router'"
    assert len(q.audit.weights) == 7 and len(q.audit.sites) == 2
    (out, _), records = jax.jit(q.record)(q.params, *INPUTS)

    def loss(params, records):
        (logits, _), stats = q.guided(params, records, *INPUTS)
        return jnp.mean(logits**2), (logits, stats)

    (_, (logits, stats)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        q.params, records
    )
    np.testing.assert_array_equal(logits, out)
    q.audit.check(stats)
    assert all(s.agreement.value == 1 for s in stats.values())
    for name in ("gate_proj", "up_proj", "down_proj", "router"):
        leaves = jax.tree.leaves(gradient["layers"][0]["mlp"][name])
        assert all(np.all(np.isfinite(g)) and np.any(g != 0) for g in leaves)


def test_tunix_remat_changes_nothing():
    q3 = load("qwen3")
    rules = recipe(rule(inputs="nvfp4"))
    found = []
    for remat in (q3.RematConfig.NONE, q3.RematConfig.DECODER):
        model = moe(dtype=jnp.bfloat16, num_layers=1, remat_config=remat)
        q = qat.nnx(model, rules, *INPUTS)
        found.append(jax.jit(q.record)(q.params, *INPUTS))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_tied_embeddings_are_left_alone_unless_a_rule_means_them():
    model = moe(num_layers=1, use_tied_embedding=True)
    deliberate = qat.Rule("embedder", weights="nvfp4", axis=-1)
    q = qat.nnx(model, qat.Recipe(rules=(deliberate,)), *INPUTS)
    assert q.audit.weights == ("embedder/input_embedding",)
    plain, changed = jax.jit(lambda m: m(*INPUTS)[0])(model), jax.jit(q.apply)(q.params, *INPUTS)[0]
    assert np.all(np.max(np.abs(plain - changed), axis=-1) > 1e-4)
    kept = qat.nnx(model, recipe(rule()), *INPUTS)
    same = jax.jit(kept.quantize_params)(kept.params)["embedder"]["input_embedding"][...]
    np.testing.assert_array_equal(same, kept.params["embedder"]["input_embedding"][...])


def test_tunix_llama_is_recorded_and_guided():
    """A dense NNX transformer that we did not write."""
    llama = load("llama3")
    model = llama.Llama3(config(llama, weight_tying=False), rngs=nnx.Rngs(0))
    rules = (
        qat.Rule("layers/*/mlp/*_proj", weights="nvfp4", inputs="nvfp4"),
        qat.Rule("layers/*/attn/{q,k,v,o}_proj", weights="mxfp4"),
    )
    q = qat.nnx(model, qat.Recipe(rules=rules, layers="layers/*", keep_last=1), *INPUTS)
    guided = jax.jit(q.guided)
    (_, _), records = (record := jax.jit(q.record))(q.params, *INPUTS)
    with pytest.raises(ValueError, match=r"without codes: got .'layers/0/mlp/down_proj/input'"):
        q.audit.check(guided(q.params, records, *INPUTS)[1])  # their MLPs start at zero
    params = jax.tree.map(
        lambda w: w + 0.1 * jax.random.normal(jax.random.key(1), w.shape), q.params
    )
    (out, _), records = record(params, *INPUTS)
    (again, _), stats = guided(params, records, *INPUTS)
    np.testing.assert_array_equal(again, out)
    q.audit.check(stats)
    assert len(q.audit.weights) == 7 and len(q.audit.sites) == 3
