"""NNX models under a recipe. Oracles: the unrolled or eager run, closed forms, and numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from trace_jax import qat

D, T = 32, 6
ONE = "nvfp4:global_rule=one"


class Block(nnx.Module):
    """Stock modules only, as in Flax's lm1b example."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, D, rngs=rngs, decode=False)
        self.up = nnx.Linear(D, 48, rngs=rngs)
        self.down = nnx.Einsum("btf,fd->btd", (48, D), rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Exact(nnx.Module):
    """Products and sums of FP4 values with scales of few bits: float32 rounds none of them, so any
    order of summation, and any fusion by XLA, gives the same bits."""

    def __init__(self, rngs):
        self.up = nnx.Linear(D, 48, rngs=rngs)
        self.down = nnx.Einsum("btf,fd->btd", (48, D), rngs=rngs)

    def __call__(self, x):
        return self.down(qat.site(self, "hidden", nnx.relu(self.up(x))))


class Unrolled(nnx.Module):
    def __init__(self, rngs, block=Block, layers=3, wrap=None):
        self.embed, self.head = nnx.Embed(24, D, rngs=rngs), block is Block
        self.layers = nnx.List([block(rngs) for _ in range(layers)])
        self.wrap = wrap or (lambda call: call)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.wrap(lambda layer, x: layer(x))(layer, x)
        return self.embed.attend(x) if self.head else x


class Scanned(nnx.Module):
    def __init__(self, rngs, block=Block, layers=3, wrap=None):
        self.embed, self.head = nnx.Embed(24, D, rngs=rngs), block is Block
        self.layers = nnx.vmap(block)(rngs.split(layers))
        self.wrap = wrap or (lambda call: call)

    def __call__(self, tokens):
        body = self.wrap(lambda x, layer: layer(x))
        scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = scan(self.embed(tokens), self.layers)
        return self.embed.attend(x) if self.head else x


RULES = (
    qat.Rule("layers/*/{up,down}", weights="nvfp4", inputs="nvfp4"),
    qat.Rule("layers/*/attention", tensors=ONE, guide="mantissa"),
    qat.Rule("layers/*/attention/*", weights="nvfp4"),
)
EXACT_RULES = (
    qat.Rule("layers/*/up", weights=ONE, inputs=ONE),
    qat.Rule("layers/*", tensors=ONE, guide="mantissa"),
    qat.Rule("layers/*/down", weights=ONE),
)
TOKENS = np.random.default_rng(0).integers(0, 24, (4, T))


def recipe(scanned=False, rules=RULES, **options):
    return qat.Recipe(rules=rules, layers="layers/*", scanned=scanned, **options)


@functools.cache
def unrolled(block=Block, keep_last=0):
    """A model under its recipe, and the model."""
    model = Unrolled(nnx.Rngs(0), block, layers=2 + (keep_last if block is Exact else 0))
    rules = RULES if block is Block else EXACT_RULES
    q = qat.nnx(model, recipe(rules=rules, keep_last=keep_last), TOKENS)
    return q, model


@functools.cache
def ran(block=Block, keep_last=0):
    """Output and records of plain QAT."""
    q, _ = unrolled(block, keep_last)
    return jax.jit(q.record)(q.params, TOKENS)


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


@functools.cache
def guide():
    return jax.jit(unrolled()[0].guided)


def stack(params):
    """The unrolled model's parameters as the scanned model has them."""
    pure = nnx.to_pure_dict(params)
    layers = [pure["layers"][i] for i in sorted(pure["layers"])]
    return pure | {"layers": jax.tree.map(lambda *a: jnp.stack(a), *layers)}


def test_the_audit_names_every_parameter_and_site():
    q, model = unrolled(keep_last=1)
    rows = {row.path: row for row in q.audit.rows}
    params = {"/".join(map(str, p)) for p, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert params == {path for path, row in rows.items() if row.what == "weight"}
    assert len(q.audit.weights) == 6 and len(q.audit.sites) == 4
    assert rows["layers/0/down/kernel"].axis == (-2,)
    assert rows["layers/0/attention/out/kernel"].axis == (-3, -2)
    assert rows["layers/0/attention/k"].format == ONE
    assert rows["layers/0/attention/k"].shape == (4, T, 2, 16)
    assert rows["layers/1/up/kernel"].why == "layer kept as it is"
    assert rows["layers/0/attention/query/bias"].why == "not a matrix of this module"
    assert rows["embed/embedding"].why == rows["layers/0/norm/scale"].why == "no rule"


def test_the_model_itself_is_left_alone():
    model = Unrolled(nnx.Rngs(0), layers=1)
    before, kinds = nnx.to_pure_dict(nnx.state(model)), type(model.layers[0].up)
    q = qat.nnx(model, recipe(), TOKENS)
    jax.jit(q.apply).trace(q.params, TOKENS)
    same(nnx.to_pure_dict(nnx.state(model)), before)
    assert type(model.layers[0].up) is kinds is nnx.Linear


def test_guided_by_its_own_records_is_plain_qat_bit_for_bit():
    q, _ = unrolled()
    out, records = ran()
    again, stats = guide()(q.params, records, TOKENS)
    same(again, out)
    assert all(s.agreement.value == 1 for s in stats.values())
    q.audit.check(stats)


def test_a_record_belongs_to_its_layer():
    q, _ = unrolled()
    plain, records = ran()
    swap = {"layers/0/up/input": "layers/1/up/input", "layers/1/up/input": "layers/0/up/input"}
    wrong = {path: records[swap.get(path, path)] for path in records}
    out, stats = guide()(q.params, wrong, TOKENS)
    assert stats["layers/0/up/input"].agreement.value < 0.9
    assert np.any(out != plain)


def scanned(block, keep_last=0, **options):
    """The scanned model with the parameters of the unrolled one."""
    rules = RULES if block is Block else EXACT_RULES
    model = Scanned(nnx.Rngs(0), block, layers=2 + (keep_last if block is Exact else 0), **options)
    q = qat.nnx(model, recipe(True, rules, keep_last=keep_last), TOKENS)
    params = nnx.clone(q.params)
    nnx.replace_by_pure_dict(params, stack(unrolled(block, keep_last)[0].params))
    return q, params


def test_scanned_layers_do_what_unrolled_layers_do_bit_for_bit():
    want, unrolled_records = ran(Exact, 1)
    q, params = scanned(Exact, 1)
    assert not q.audit.diff(unrolled(Exact, 1)[0].audit) and len(q.audit.sites) == 4
    out, records = jax.jit(q.record)(params, TOKENS)
    same(jax.jit(q.apply)(params, TOKENS), want)
    same(out, want)
    for path, one in unrolled_records.items():
        layer, rest = int(path.split("/")[1]), path.split("/", 2)[2]
        same(jax.tree.map(lambda a, i=layer: a[i], records[f"layers/{rest}"]), one)
    again, stats = jax.jit(q.guided)(params, records, TOKENS)
    same(again, want)
    q.audit.check(stats)
    assert set(stats) == set(unrolled(Exact, 1)[0].audit.sites)


def test_scanned_stock_transformer_agrees_with_the_unrolled_one():
    q, params = scanned(Block)
    out, records = jax.jit(q.record)(params, TOKENS)
    again, stats = jax.jit(q.guided)(params, records, TOKENS)
    same(again, out)
    q.audit.check(stats)
    # XLA fuses the two programs' norms differently: a few codes on a boundary may flip
    assert np.mean(np.abs(out - ran()[0]) < 1e-5) > 0.9


@pytest.mark.parametrize("kind", [Unrolled, Scanned])
def test_remat_changes_no_bit_of_values_and_records(kind):
    want, _ = ran(Exact)
    if kind is Scanned:
        q, params = scanned(Exact, wrap=nnx.remat)
    else:
        model = Unrolled(nnx.Rngs(0), Exact, layers=2, wrap=nnx.remat)
        q, params = qat.nnx(model, recipe(rules=EXACT_RULES), TOKENS), unrolled(Exact)[0].params
    plain, plain_params = scanned(Exact) if kind is Scanned else (unrolled(Exact)[0], params)

    def step(q):
        def loss(params, records):
            out = q.guided(params, records, TOKENS)[0]
            return jnp.sum(out**2), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    out, records = jax.jit(q.record)(params, TOKENS)
    same(out, want)
    same(records, jax.jit(plain.record)(plain_params, TOKENS)[1])
    (_, guided), gradient = step(q)(params, records)
    (_, same_guided), same_gradient = step(plain)(plain_params, records)
    same(guided, same_guided)
    for one, other in zip(*map(jax.tree.leaves, (gradient, same_gradient)), strict=True):
        np.testing.assert_allclose(
            one, other, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(other)))
        )


def test_jit_and_vmap_inside_the_model_carry_records():
    class Inner(nnx.Module):
        def __init__(self, rngs, how):
            self.up = nnx.Linear(D, D, rngs=rngs)
            self.how = how

        def __call__(self, x):
            axes = nnx.StateAxes({nnx.Param: None, ...: 0})
            how = {
                "plain": lambda f: f,
                "jit": nnx.jit,
                "vmap": lambda f: nnx.vmap(f, in_axes=(axes, 0)),
            }[self.how]
            return how(lambda up, x: up(x))(self.up, x)

    x = jax.random.normal(jax.random.key(0), (4, T, D))
    rules = qat.Recipe(rules=(qat.Rule("up", weights="nvfp4", inputs="nvfp4"),))
    found = []
    for how in ("plain", "jit", "vmap"):
        q = qat.nnx(Inner(nnx.Rngs(0), how), rules, x)
        out, records = jax.jit(q.record)(q.params, x)
        again, stats = jax.jit(q.guided)(q.params, records, x)
        same(again, out)
        found.append(records)
        q.audit.check(stats)
    same(found[1], found[0])
    same(found[2], found[0])


def test_transforms_around_the_model_change_no_bit():
    q, _ = unrolled(Exact)
    want, records = ran(Exact)
    rows = TOKENS[:, None]
    vmapped = jax.jit(jax.vmap(q.record, in_axes=(None, 0)))(q.params, rows)
    same(jax.tree.map(lambda a: a[:, 0], vmapped), (want, records))

    def step(carry, tokens):
        return carry, jax.checkpoint(q.record)(q.params, tokens)

    same(jax.jit(lambda t: jax.lax.scan(step, 0, t)[1])(rows), vmapped)


def test_shard_map_over_the_batch_changes_no_bit():
    q, _ = unrolled(Exact)
    want, records = ran(Exact)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("d"), PartitionSpec()
    shard = functools.partial(jax.shard_map, mesh=mesh)
    record = shard(q.record, in_specs=(whole, split), out_specs=(split, split))
    same(jax.jit(record)(q.params, TOKENS), (want, records))

    def guided(*args):
        return q.guided(*args)[0]

    guided = shard(guided, in_specs=(whole, split, split), out_specs=split)
    same(jax.jit(guided)(q.params, records, TOKENS), want)
