"""Linen models under a recipe. Oracles: the NNX twin, the unrolled run, and the plain matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from trace_jax import qat

D, T = 32, 6
ONE = "nvfp4:global_rule=one"


class Mlp(nn.Module):
    """A stock MLP."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(nn.relu(nn.Dense(48, name="up")(x)))


class Block(nn.Module):
    """Stock attention and a stock MLP."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(
            h, mask=nn.make_causal_mask(x[..., 0])
        )
        return x + nn.Dense(D, name="down")(nn.gelu(nn.Dense(48, name="up")(x)))


class Exact(nn.Module):
    """Sums that float32 does not round, whatever their order; see nnx_test.py."""

    @nn.compact
    def __call__(self, x):
        h = qat.site(self, "hidden", nn.relu(nn.Dense(48, name="up")(x)))
        return nn.Einsum((48, D), "btf,fd->btd", name="down")(h)


class Unrolled(nn.Module):
    block: type
    layers: int = 3

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = self.block(name=f"layers_{i}")(x)
        return x


class Scanned(nn.Module):
    block: type
    layers: int = 3
    axes: tuple = ("params", "qat")
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(self.block) if self.remat else self.block
        scan = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes=dict.fromkeys(self.axes, 0),
            split_rngs={"params": True},
            length=self.layers,
        )
        return scan(block(name="layers"), x, None)[0]


RULES = (
    qat.Rule("{a}/{up,down}", weights="nvfp4", inputs="nvfp4"),
    qat.Rule("{a}/attention", tensors=ONE, guide="mantissa"),
    qat.Rule("{a}/attention/*", weights="nvfp4"),
)
EXACT_RULES = (
    qat.Rule("{a}/up", weights=ONE, inputs=ONE),
    qat.Rule("{a}", tensors=ONE, guide="mantissa"),
    qat.Rule("{a}/down", weights=ONE),
)
X = jax.random.normal(jax.random.key(0), (4, T, D))


def recipe(rules, layer, **options):
    rules = [dataclasses.replace(r, pattern=r.pattern.replace("{a}", layer)) for r in rules]
    return qat.Recipe(rules=tuple(rules), layers=layer, **options)


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


def init(model):
    return jax.jit(model.init)(jax.random.key(1), X)


def test_a_stock_mlp_in_a_few_lines():
    model, x = Mlp(), X[0]
    variables = model.init(jax.random.key(0), x)
    rule = qat.Rule("up", weights="nvfp4", inputs="nvfp4")
    q = qat.linen(model, qat.Recipe(rules=(rule,), exclude=("head",)), variables, x)
    out, records = jax.jit(q.record)(q.params, x)
    guided, stats = jax.jit(q.guided)(q.params, records, x)
    same(guided, out)
    q.audit.check(stats)
    assert q.audit.weights == ("up/kernel",) and q.audit.sites == ("up/input",)
    quantised = jax.jit(q.quantize_params)(q.params)
    same(quantised["head"], q.params["head"])
    assert np.any(quantised["up"]["kernel"] != q.params["up"]["kernel"])
    assert np.any(out != model.apply(variables, x))


def test_stock_attention_has_its_k_and_v_quantised_after_projection():
    model = Unrolled(Block, 2)
    variables = init(model)
    before = jax.jit(model.apply)(variables, X)
    q = qat.linen(model, recipe(RULES, "layers_*"), variables, X)
    rows = {row.path: row for row in q.audit.rows}
    assert rows["layers_1/attention/k"].shape == rows["layers_1/attention/v"].shape == (4, T, 2, 16)
    assert rows["layers_0/attention/query/kernel"].axis == (-3,)
    assert rows["layers_0/attention/out/kernel"].axis == (-3, -2)
    out, records = jax.jit(q.record)(q.params, X)
    guided, stats = jax.jit(q.guided)(q.params, records, X)
    same(guided, out)
    q.audit.check(stats)
    assert all(s.agreement.value == 1 for s in stats.values())
    swap = {"layers_0/up/input": "layers_1/up/input"}
    wrong = {path: records[swap.get(path, path)] for path in records}
    other, stats = jax.jit(q.guided)(q.params, wrong, X)
    assert stats["layers_0/up/input"].agreement.value < 0.9 and np.any(other != out)
    same(jax.jit(model.apply)(variables, X), before)  # the module is left as it was


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scanned_layers_do_what_unrolled_layers_do_bit_for_bit(remat):
    unrolled, scanned = Unrolled(Exact), Scanned(Exact, remat=remat)
    variables = init(unrolled)
    q = qat.linen(unrolled, recipe(EXACT_RULES, "layers_*", keep_last=1), variables, X)
    want, want_records = jax.jit(q.record)(q.params, X)
    layers = [q.params[f"layers_{i}"] for i in range(3)]
    params = {"layers": jax.tree.map(lambda *a: jnp.stack(a), *layers)}
    rules = recipe(EXACT_RULES, "layers/*", scanned=True, keep_last=1)
    s = qat.linen(scanned, rules, {"params": params}, X)
    assert {p.replace("layers/", "layers_") for p in s.audit.sites} == set(q.audit.sites)
    out, records = jax.jit(s.record)(params, X)
    same(out, want)
    same(jax.jit(s.apply)(params, X), want)
    for path, one in want_records.items():
        layer, rest = path.removeprefix("layers_").split("/", 1)
        same(jax.tree.map(lambda a, i=int(layer): a[i], records[f"layers/{rest}"]), one)

    def loss(params, records):
        out, stats = s.guided(params, records, X)
        return jnp.sum(out), (out, stats)

    (_, (guided, stats)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        params, records
    )
    same(guided, want)
    s.audit.check(stats)
    plain = jax.jit(jax.grad(lambda p: jnp.sum(q.apply(p, X))))(q.params)
    for i in range(3):
        for one, other in zip(
            jax.tree.leaves(jax.tree.map(lambda a, i=i: a[i], gradient["layers"])),
            jax.tree.leaves(plain[f"layers_{i}"]),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_a_scan_that_hides_the_records_is_an_error_that_says_what_to_add():
    model = Scanned(Exact, axes=("params",))
    rules = recipe(EXACT_RULES, "layers/*", scanned=True)
    with pytest.raises(ValueError, match=r'hides the site.*variable_axes=\{..., "qat": 0\}'):
        qat.linen(model, rules, init(model), X)


class Stateful(nn.Module):
    """Its forward writes a cache and running statistics."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("cache", "count", lambda: jnp.zeros(()))
        count.value += 1
        self.sow("intermediates", "x", x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x) + count.value
        return nn.Dense(8, name="up")(x)


def test_what_a_forward_writes_into_other_collections_is_dropped():
    model, x = Stateful(), X[0]
    variables = model.init(jax.random.key(0), x)
    recipe = qat.Recipe(rules=qat.Rule("up", weights="nvfp4", inputs="nvfp4"))
    q = qat.linen(model, recipe, variables, x)
    out, records = jax.jit(q.record)(q.params, x)
    guided, stats = jax.jit(q.guided)(q.params, records, x)
    q.audit.check(stats)
    same(guided, out)
    same(jax.jit(q.apply)(q.params, x), out)
    plain, _ = model.apply(variables, x, mutable=["cache", "batch_stats"])
    assert 0 < np.abs(out - plain).max() < 1 and variables["cache"]["count"] == 1


class Moe(nn.Module):
    @nn.compact
    def __call__(self, x):
        gates = jax.nn.softmax(nn.Dense(2, name="router")(x))
        up = self.param("up", nn.initializers.normal(1.0), (2, D, D))
        return jnp.einsum("te,td,edf->tf", gates, x, up), gates


class Around(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Moe(name="moe")(x)


def test_a_router_can_keep_the_input_that_the_experts_get_quantised():
    model, x = Around(), X[0]
    variables = model.init(jax.random.key(0), x)
    rule = qat.Rule("moe", weights="nvfp4", inputs="nvfp4", axis=-2, bypass=("router",))
    q = qat.linen(model, qat.Recipe(rules=(rule,), exclude=("moe/router",)), variables, x)
    (out, gates), stats = jax.jit(q.counted)(q.params, x)
    plain, plain_gates = jax.jit(model.apply)(variables, x)
    np.testing.assert_allclose(gates, plain_gates, rtol=1e-6)
    assert np.any(out != plain) and q.audit.sites == ("moe/input",)
    q.audit.check(stats)
