"""Single sites of NNX models. Oracles: closed forms, a search over the codewords, and numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trace_jax import formats, qat
from trace_jax.guidance import codec
from trace_jax.guidance.record import Coding
from trace_jax.qat import sites

D = 32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ONE = "nvfp4:global_rule=one"


@jax.jit
def rounded(x):
    site, valid = sites.Site(format=formats.get("nvfp4")), jnp.ones(x.shape[:-1], bool)
    return sites.quantize_site(x, None, valid, site, guided=False)[0]


class Two(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(D, 48, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(48, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.b(self.a(x))


def test_the_gradient_is_that_of_the_straight_through_surrogate():
    """y = q(q(x) A) B with A, B quantised: dB = h^T c, dA = q(x)^T c B^T, dx = c B^T A^T."""
    x = jax.random.normal(jax.random.key(0), (5, D))
    c = jax.random.normal(jax.random.key(1), (5, D))
    rule = qat.Rule("*", weights="nvfp4", inputs="nvfp4")
    q = qat.nnx(Two(nnx.Rngs(0)), qat.Recipe(rules=(rule,)), x)
    grads, to_x = jax.jit(jax.grad(lambda p, x: jnp.sum(c * q.apply(p, x)), argnums=(0, 1)))(
        q.params, x
    )
    matrices = nnx.to_pure_dict(jax.jit(q.quantize_params)(q.params))
    a, b = (np.float64(matrices[name]["kernel"]) for name in "ab")
    xq = np.float64(rounded(x))
    h = np.float64(rounded(jnp.float32(xq @ a)))
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # sums of 48 float32 products
    np.testing.assert_allclose(grads["b"]["kernel"][...], h.T @ c, **tolerance)
    np.testing.assert_allclose(grads["a"]["kernel"][...], xq.T @ (c @ b.T), **tolerance)
    np.testing.assert_allclose(to_x, c @ b.T @ a.T, **tolerance)
    assert np.any(xq != x) and np.any(np.float64(q.params["a"]["kernel"][...]) != a)


class Tap(nnx.Module):
    """A module whose own code names a tensor; without a transform that is the identity."""

    def __call__(self, x):
        return qat.site(self, "k", x)


def tap(x, **options):
    rules = qat.Recipe(rules=(qat.Rule("k", tensors=ONE, **options),))
    return qat.nnx(Tap(), rules, x)


def test_op_by_op_is_compiled_bit_for_bit():
    x = jax.random.normal(jax.random.key(0), (4, 64))
    q = tap(x)
    np.testing.assert_array_equal(q.apply(q.params, x), jax.jit(q.apply)(q.params, x))


@pytest.mark.parametrize("guide", ["codes", "mantissa"])
def test_records_of_another_precision_move_every_code_inside_its_bracket(guide):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_t(3, size=(8, 64)), jnp.float32)
    rollout = jnp.asarray(x * (1 + 0.05 * rng.normal(size=x.shape)), jnp.bfloat16)
    np.testing.assert_array_equal(Tap()(x), x)
    q = tap(x, guide=guide)
    recorded, records = jax.jit(q.record)(q.params, rollout)
    got, stats = jax.jit(q.guided)(q.params, records, x)
    record = records["k"]
    outcome = codec.decode(record, format=formats.get(ONE), coding=Coding(kind=guide))
    step = np.repeat(np.float64(outcome.steps), 16, axis=-1)
    code, theirs = np.float64(got) / step, np.float64(recorded.astype(jnp.float32)) / step
    z = np.clip(x / step, -6, 6)
    grid = np.sort(VALUES)
    low = grid[np.searchsorted(grid, z, "right") - 1]
    high = grid[np.minimum(np.searchsorted(grid, z, "left"), 15)]
    assert np.all((code == low) | (code == high))
    nearest = np.where(np.abs(low - theirs) <= np.abs(high - theirs), low, high)
    inside = (theirs >= low) & (theirs <= high)
    followed = code == nearest
    assert np.all(followed[inside]) and np.all(followed | (guide == "mantissa"))
    plain = np.float64(jax.jit(q.apply)(q.params, x)) / step
    assert np.mean(code == theirs) > np.mean(plain == theirs) + 0.05
    assert stats["k"].agreement.value > 0.9


def test_records_with_low_bits_of_scales_guide_in_the_same_way_with_fewer_bytes():
    x = jnp.asarray(np.random.default_rng(0).standard_t(3, size=(8, 256)), jnp.bfloat16)
    outputs, sizes = [], []
    for bits in (8, 2):
        q = tap(x.astype(jnp.float32), guide="mantissa", scale_bits=bits)
        _, records = jax.jit(q.record)(q.params, x.astype(jnp.float32))
        moved = x.astype(jnp.float32) * 1.01
        out, stats = jax.jit(q.guided)(q.params, records, moved)
        outputs.append(np.asarray(out))
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(records)))
        assert stats["k"].undecoded.value == 0
    np.testing.assert_array_equal(*outputs)
    assert sizes == [8 * (32 + 16), 8 * (32 + 16 // 4 + 1)]


def test_the_clipped_estimator_stops_the_gradient_where_the_record_saturates():
    x = jnp.tile(jnp.arange(1.0, 17.0), (2, 1))
    for ste, want in (("plain", np.ones(16)), ("clipped", np.arange(1, 17) <= 12)):
        q = tap(x, ste=ste)
        _, records = jax.jit(q.record)(q.params, jnp.clip(x, 0, 12))  # their largest is 12
        loss = jax.jit(jax.grad(lambda x, r, q=q: jnp.sum(q.guided(q.params, r, x)[0])))
        gradient = loss(x, records)
        np.testing.assert_array_equal(gradient, np.tile(want, (2, 1)))


def test_tokens_without_a_record_round_on_their_own():
    x = jax.random.normal(jax.random.key(0), (2, 3, D))
    q = tap(x)
    _, records = jax.jit(q.record)(q.params, x * 1.07)
    valid = jnp.array([[True, True, False], [True, False, False]])
    guided = jax.jit(q.guided)
    got, _ = guided(q.params, records, x, valid=valid)
    plain, (full, _) = jax.jit(q.apply)(q.params, x), guided(q.params, records, x)
    assert np.any(full != plain)
    np.testing.assert_array_equal(got, jnp.where(valid[..., None], full, plain))
    with pytest.raises(ValueError, match=r"valid: got \(5,\), need the leading axes of the rec"):
        guided(q.params, records, x, valid=jnp.ones(5, bool))


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return self.a(self.a(x))


def test_a_module_that_runs_twice_has_two_sites():
    x = jax.random.normal(jax.random.key(0), (2, D))
    q = qat.nnx(Twice(nnx.Rngs(0)), qat.Recipe(rules=(qat.Rule("a", inputs="nvfp4"),)), x)
    assert q.audit.sites == ("a/input", "a/input#1")
    out, records = jax.jit(q.record)(q.params, x)
    assert np.any(records["a/input"].bits != records["a/input#1"].bits)
    again, stats = jax.jit(q.guided)(q.params, records, x)
    np.testing.assert_array_equal(again, out)
    assert stats["a/input#1"].agreement.value == 1


class Moe(nnx.Module):
    def __init__(self, rngs, chain=False):
        self.router = nnx.Linear(D, 2, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (2, D, D)))
        self.chain = chain

    def __call__(self, x):
        gates = jax.nn.softmax(self.router(x + 0 if self.chain else x))
        return jnp.einsum("te,td,edf->tf", gates, x, self.up[...]), gates


MOE = qat.Rule("m", weights="nvfp4", inputs="nvfp4", axis=-2, bypass=("router",))


def test_a_router_can_keep_the_input_that_the_experts_get_quantised():
    x = jax.random.normal(jax.random.key(0), (4, D))

    class Around(nnx.Module):
        def __init__(self, m):
            self.m = m

        def __call__(self, x):
            return self.m(x)

    moe = Moe(nnx.Rngs(0))
    q = qat.nnx(Around(moe), qat.Recipe(rules=(MOE,), exclude=("m/router",)), x)
    (out, gates), _ = jax.jit(q.counted)(q.params, x)
    np.testing.assert_allclose(gates, jax.jit(lambda m: m(x)[1])(moe), rtol=1e-6)  # not of FP4
    w = jax.jit(q.quantize_params)(q.params)["m"]["up"][...]
    want = np.einsum("te,td,edf->tf", *(np.float64(a) for a in (gates, rounded(x), w)))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"bypass: got no such call of .'m/router'., need a call"):
        q = qat.nnx(Around(Moe(nnx.Rngs(0), chain=True)), qat.Recipe(rules=(MOE,)), x)
        jax.jit(q.apply).trace(q.params, x)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: {}, r"missing \['k'\], unknown \[\]"),
        (lambda r: r | {"v": r["k"]}, r"missing \[\], unknown \['v'\]"),
        (lambda r: {"k": jax.tree.map(lambda a: a[:1], r["k"])}, "record of k: got \\["),
    ],
)
def test_records_that_do_not_fit_are_an_error(change, text):
    x = jnp.ones((2, D))
    q = tap(x)
    _, records = jax.jit(q.record)(q.params, x)
    with pytest.raises(ValueError, match=text):
        jax.jit(q.guided).trace(q.params, change(records), x)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.router, self.up = nnx.Linear(D, 4, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.norm, self.drop = nnx.RMSNorm(D, rngs=rngs), nnx.Dropout(0.0)

    def __call__(self, x):
        return self.up(self.drop(self.norm(x))) * self.router(x).sum(-1, keepdims=True)


def test_a_star_quantises_neither_the_module_around_nor_modules_without_matrices():
    class Around(nnx.Module):
        def __init__(self, rngs):
            self.mlp = Mlp(rngs)

        def __call__(self, x):
            return self.mlp(x)

    rule = qat.Rule("mlp/*", weights="nvfp4", inputs="nvfp4")
    q = qat.nnx(Around(nnx.Rngs(0)), qat.Recipe(rules=rule, exclude="**/router"), jnp.ones((2, D)))
    assert q.audit.weights == ("mlp/up/kernel",) and q.audit.sites == ("mlp/up/input",)


class Uses(nnx.Module):
    """Multiplies with the kernel of a module that it never calls."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return self.a(x) @ self.b.kernel


def test_the_audit_says_that_a_module_is_never_called():
    rule = qat.Rule("{a,b}", weights="nvfp4", inputs="nvfp4")
    audit = qat.nnx(Uses(nnx.Rngs(0)), qat.Recipe(rules=(rule,)), jnp.ones((2, D))).audit
    row = next(row for row in audit.rows if row.path == "b/input")
    assert row.format is None and row.why.startswith("never called")
    assert audit.weights == ("a/kernel", "b/kernel") and audit.sites == ("a/input",)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.emb = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.head.kernel = self.emb.kernel

    def __call__(self, x):
        return self.head(self.emb(x))


def test_a_tied_parameter_is_quantised_once_in_both_places():
    x = jax.random.normal(jax.random.key(0), (2, D))
    model = Tied(nnx.Rngs(0))
    q = qat.nnx(model, qat.Recipe(rules=qat.Rule("*", weights="nvfp4")), x)
    assert q.audit.weights == ("emb/kernel",)
    assert {r.path: r.why for r in q.audit.rows}["head/kernel"] == "same as emb/kernel"
    w = np.float64(jax.jit(q.quantize_params)(q.params)["emb"]["kernel"][...])
    assert np.any(w != model.emb.kernel[...])
    out = jax.jit(q.apply)(q.params, x)
    np.testing.assert_allclose(out, np.float64(x) @ w @ w, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="head/kernel: got excluded by 'head', and emb/kernel q"):
        qat.nnx(model, qat.Recipe(rules=qat.Rule("*", weights="nvfp4"), exclude="head"), x)


class Hidden(nnx.Module):
    """Runs a layer where no variable can come out."""

    def __init__(self, rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x, hide=False):
        return x if hide else self.a(x)


def test_a_forward_that_goes_another_way_than_the_audited_one_is_an_error():
    x = jnp.ones((2, D))
    q = qat.nnx(Hidden(nnx.Rngs(0)), qat.Recipe(rules=(qat.Rule("a", inputs="nvfp4"),)), x)
    with pytest.raises(ValueError, match=r"\['a/input'\] did not run, .* Fix: build it with ex"):
        jax.jit(q.counted, static_argnames="hide").trace(q.params, x, hide=True)
