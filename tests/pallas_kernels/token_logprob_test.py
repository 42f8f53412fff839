"""Token log-probs against NumPy in float64: values, finite differences, bad input, memory."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common import debug, device
from pallas_kernels.token_logprob import bench, op, triton, xla

# name -> (impl, columns of a chunk; None: as the op chooses, one chunk at these sizes)
WAYS = {
    "xla": ("xla", None),
    "xla_chunks": ("xla", 37),
    "triton": ("triton_interpret", None),
    "mosaic_tpu": ("mosaic_tpu_interpret", None),
}
SUM = 1e-5  # float32 sums over a width and a vocabulary
BF16 = 2.0**-8  # half an ulp of BF16, relative, twice


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """An impl; chunks are made narrow where it says so."""
    impl, width = WAYS[request.param]
    if width is not None:
        monkeypatch.setattr(xla, "chunk_width", lambda tokens, vocabulary: min(width, vocabulary))
    return impl


@functools.cache
def jitted(impl, width):
    """Compiled once for each way and shape; `width` only keeps chunked programs apart."""
    del width

    def call(hidden, head, tokens, temperature, top_k):
        return op.token_logprobs(
            hidden, head, tokens, impl=impl, temperature=temperature, top_k=top_k
        )

    return jax.jit(call, static_argnums=(3, 4))


def evaluate(impl, hidden, head, tokens, temperature=1.0, top_k=0):
    width = xla.chunk_width(hidden.shape[0], head.shape[0])
    return jitted(impl, width)(hidden, head, tokens, temperature, top_k)


def draw(M, V, D, dtype=jnp.bfloat16, head_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(M, D)), jnp.float32).astype(dtype)
    head = jnp.asarray(rng.normal(size=(V, D)) / D**0.5 * 3, jnp.float32)
    tokens = jnp.asarray(rng.integers(0, V, M), jnp.int32)
    return hidden, head.astype(head_dtype or dtype), tokens


def log_softmax(hidden, head, temperature=1.0):
    """In float64, of the operands as they are multiplied."""
    name = jnp.dtype(hidden.dtype).name
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.float32
    hidden = np.asarray(hidden).astype(np.float64)
    head = np.asarray(head).astype(np.float32).astype(dtype).astype(np.float64)
    z = hidden @ head.T / temperature
    largest = z.max(axis=-1, keepdims=True)
    return z - largest - np.log(np.exp(z - largest).sum(axis=-1, keepdims=True))


def expect(hidden, head, tokens, temperature=1.0):
    logp = log_softmax(hidden, head, temperature)
    entropy = -(np.exp(logp) * logp).sum(axis=-1)
    return logp[np.arange(len(logp)), np.asarray(tokens)], entropy


def plain(hidden, head, tokens, temperature=1.0):
    """The formula with all logits in memory, for jax.grad."""
    z = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T / temperature
    logp = z - jax.nn.logsumexp(z, axis=-1, keepdims=True)
    return logp[jnp.arange(len(tokens)), tokens], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def weighted(logprob, entropy):
    """A number that depends on both results of each token in another way."""
    at = np.arange(len(logprob))
    return (logprob * np.float32(np.cos(at))).sum() + (entropy * np.float32(np.sin(at + 1))).sum()


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [((1, 1, 1), 1.0), ((1, 300, 64), 0.6), ((131, 261, 33), 1.7), ((64, 37, 16), 1.0)],
)
def test_token_logprobs_are_those_of_float64(way, shape, temperature):
    hidden, head, tokens = draw(*shape)
    got = evaluate(way, hidden, head, tokens, temperature=temperature)
    logprob, entropy = expect(hidden, head, tokens, temperature)
    np.testing.assert_allclose(got.logprob_M, logprob, rtol=SUM, atol=SUM)
    np.testing.assert_allclose(got.entropy_M, entropy, rtol=SUM, atol=SUM)
    assert got.top_logprobs_Mk is None and got.top_ids_Mk is None


def test_token_logprobs_multiply_a_float32_head_in_the_dtype_of_the_hidden_states(way):
    hidden, head, tokens = draw(7, 130, 48, head_dtype=jnp.float32)
    got = evaluate(way, hidden, head, tokens)
    np.testing.assert_allclose(got.logprob_M, expect(hidden, head, tokens)[0], atol=SUM)


def test_token_logprobs_of_all_tokens_are_a_distribution(way):
    hidden, head, _ = draw(1, 150, 24)
    every = jnp.arange(150, dtype=jnp.int32)
    got = evaluate(way, jnp.tile(hidden, (150, 1)), head, every)
    assert abs(np.exp(np.asarray(got.logprob_M, np.float64)).sum() - 1) < SUM


@pytest.mark.parametrize(("chunk", "k"), [(None, 5), (20, 1), (20, 61), (7, 5), (7, 9)])
def test_token_logprobs_give_the_largest_with_ids_and_equal_ones_by_id(monkeypatch, chunk, k):
    if chunk is not None:
        monkeypatch.setattr(xla, "chunk_width", lambda tokens, vocabulary: chunk)
    hidden, head, tokens = draw(9, 61, 8, jnp.float32)
    head = jnp.round(head * 2)  # whole numbers, so that many logits are equal
    hidden = jnp.round(hidden)
    got = evaluate("xla", hidden, head, tokens, top_k=k, temperature=2.0)
    logp = log_softmax(hidden, head, 2.0)
    ids = np.argsort(-np.round(logp, 9), axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(got.top_ids_Mk, ids)
    want = np.take_along_axis(logp, ids, axis=-1)
    np.testing.assert_allclose(got.top_logprobs_Mk, want, rtol=SUM, atol=SUM)


@pytest.mark.parametrize(("chunk", "temperature"), [(13, 1.0), (5, 0.7)])
def test_gradients_are_finite_differences(monkeypatch, chunk, temperature):
    monkeypatch.setattr(xla, "chunk_width", lambda tokens, vocabulary: chunk)
    hidden, head, tokens = draw(4, 13, 3, jnp.float32)

    def ours(hidden, head):
        got = op.token_logprobs(hidden, head, tokens, impl="xla", temperature=temperature)
        return weighted(got.logprob_M, got.entropy_M)

    arrays = [np.asarray(array, np.float64) for array in (hidden, head)]
    for which, got in enumerate(jax.jit(jax.grad(ours, (0, 1)))(hidden, head)):
        want = np.empty(arrays[which].shape)
        for at in np.ndindex(want.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [array.copy() for array in arrays]
                moved[which][at] += step
                logp = moved[0] @ moved[1].T / temperature
                logp = logp - np.log(np.exp(logp).sum(axis=-1, keepdims=True))
                chosen = logp[np.arange(4), np.asarray(tokens)]
                sides.append(weighted(chosen, -(np.exp(logp) * logp).sum(axis=-1)))
            want[at] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (131, 161, 33)])
def test_gradients_are_those_of_the_plain_formula(way, shape):
    hidden, head, tokens = draw(*shape, head_dtype=jnp.float32)
    head = head.astype(jnp.bfloat16).astype(jnp.float32)  # the cast changes nothing

    def ours(hidden, head):
        got = op.token_logprobs(hidden, head, tokens, impl=way, temperature=0.7)
        return weighted(got.logprob_M, got.entropy_M)

    def formula(hidden, head):
        return weighted(*plain(hidden, head, tokens, 0.7))

    got = jax.jit(jax.grad(ours, (0, 1)))(hidden, head)
    want = jax.jit(jax.grad(formula, (0, 1)))(hidden.astype(jnp.float32), head)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    rounded_logits = way.startswith("triton")
    for mine, theirs, exact in zip(got, want, (False, not rounded_logits), strict=True):
        scale = float(np.abs(theirs).max())
        atol = scale * (SUM if exact else BF16) + 1e-6
        np.testing.assert_allclose(np.asarray(mine, np.float32), theirs, atol=atol)


@pytest.mark.parametrize("result", ["logprob_M", "entropy_M"])
def test_gradients_flow_through_each_result_alone(way, result):
    hidden, head, tokens = draw(6, 90, 16, head_dtype=jnp.float32)
    head = head.astype(jnp.bfloat16).astype(jnp.float32)

    def ours(hidden, head):
        return jnp.sum(getattr(op.token_logprobs(hidden, head, tokens, impl=way), result))

    def formula(hidden, head):
        return jnp.sum(plain(hidden, head, tokens)[{"logprob_M": 0, "entropy_M": 1}[result]])

    for which in (0, 1):  # the other one is constant, and its gradient not computed
        got = jax.jit(jax.grad(ours, which))(hidden, head)
        want = jax.jit(jax.grad(formula, which))(hidden.astype(jnp.float32), head)
        exact = which == 1 and not way.startswith("triton")
        atol = float(np.abs(want).max()) * (SUM if exact else BF16)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=atol)


def test_the_largest_have_no_gradient():
    hidden, head, tokens = draw(3, 11, 4, jnp.float32)

    def best(hidden, head):
        got = op.token_logprobs(hidden, head, tokens, impl="xla", top_k=2)
        return jnp.sum(got.top_logprobs_Mk)

    for gradient in jax.grad(best, (0, 1))(hidden, head):
        np.testing.assert_array_equal(gradient, 0)


def test_gradients_pass_through_scan_and_checkpoint():
    hidden, head, tokens = draw(8, 50, 6, jnp.float32)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(hidden, head):
        def part(total, some):
            got = op.token_logprobs(some[0], head, some[1], impl="xla")
            return total + jnp.sum(got.logprob_M), None

        halves = (hidden.reshape(2, 4, 6), tokens.reshape(2, 4))
        return jax.lax.scan(jax.checkpoint(part), jnp.float32(0), halves)[0]

    want = jax.grad(lambda *two: jnp.sum(plain(*two, tokens)[0]), (0, 1))(hidden, head)
    for mine, theirs in zip(gradient(hidden, head), want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=SUM)


def test_huge_logits_stay_finite_and_their_entropy_exact(way):
    hidden = jnp.asarray([[1e4, 0], [-1e4, 0], [0, 1e4]], jnp.bfloat16)
    head = jnp.zeros((80, 2), jnp.bfloat16).at[3, 0].set(1).at[70].set(1).at[9, 0].set(-1)
    tokens = jnp.asarray([70, 3, 70], jnp.int32)

    def both(hidden, head):
        got = op.token_logprobs(hidden, head, tokens, impl=way)
        return weighted(got.logprob_M, got.entropy_M), got

    gradients, got = jax.jit(jax.grad(both, (0, 1), has_aux=True))(hidden, head)
    logprob, entropy = expect(hidden, head, tokens)
    np.testing.assert_allclose(got.logprob_M, logprob, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.entropy_M, entropy, atol=1e-6)
    np.testing.assert_allclose(got.entropy_M, [np.log(2), 0, 0], atol=1e-6)
    for gradient in gradients:
        assert np.all(np.isfinite(np.asarray(gradient, np.float32)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_hidden_state_that_is_not_finite_gives_nan_to_its_token_alone(way, value):
    hidden, head, tokens = draw(3, 80, 5)
    head = jnp.abs(head)  # then all logits of -inf hidden states are -inf
    spoilt = evaluate(way, hidden.at[1, :].set(value), head, tokens)
    whole = evaluate(way, hidden, head, tokens)
    for got, want in ((spoilt.logprob_M, whole.logprob_M), (spoilt.entropy_M, whole.entropy_M)):
        np.testing.assert_array_equal(np.isnan(got), [False, True, False])
        np.testing.assert_array_equal(got[::2], want[::2])


def test_a_head_row_that_is_nan_is_not_lost(way):
    hidden, head, tokens = draw(3, 80, 5)
    got = evaluate(way, hidden, head.at[70].set(np.nan), tokens)
    assert np.all(np.isnan(got.logprob_M)) and np.all(np.isnan(got.entropy_M))


def test_tokens_out_of_range_are_nan_and_an_error_where_values_are_checked(way):
    hidden, head, tokens = draw(3, 80, 5)
    call = functools.partial(op.token_logprobs, impl=way)
    debug.checked(call)(hidden, head, tokens)
    for bad in (-1, 80):
        wrong = tokens.at[1].set(bad)
        np.testing.assert_array_equal(
            np.isnan(evaluate(way, hidden, head, wrong).logprob_M), [False, True, False]
        )
        with pytest.raises(ValueError, match=r"tokens_M: got .*, need 0 to 79\. Fix"):
            debug.checked(call)(hidden, head, wrong)


@pytest.mark.parametrize("chunk", [64, 20])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_a_sharded_head_gives_the_same(monkeypatch, chunk, spec):
    monkeypatch.setattr(xla, "chunk_width", lambda tokens, vocabulary: chunk)
    hidden, head, tokens = draw(8, 64, 16, jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def both(hidden, head, tokens):
        got = op.token_logprobs(hidden, head, tokens, impl="xla", top_k=3)
        return weighted(got.logprob_M, got.entropy_M), got

    run = jax.jit(jax.value_and_grad(both, (0, 1), has_aux=True))
    got = run(
        jax.device_put(hidden, NamedSharding(mesh, P())),
        jax.device_put(head, NamedSharding(mesh, spec)),
        jax.device_put(tokens, NamedSharding(mesh, P())),
    )
    want = run(hidden, head, tokens)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=SUM)


@pytest.mark.parametrize("gradient", [False, True])
def test_logits_of_all_tokens_are_never_in_memory(gradient):
    M, V, D = 2048, 151936, 64
    shapes = [
        jax.ShapeDtypeStruct((M, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((V, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((M,), jnp.int32),
    ]

    def total(hidden, head, tokens):
        got = op.token_logprobs(hidden, head, tokens, impl="xla")
        return weighted(got.logprob_M, got.entropy_M)

    f = jax.grad(total, (0, 1)) if gradient else total
    analysis = jax.jit(f).lower(*shapes).compile().memory_analysis()
    # a few arrays of a chunk's size: logits, their exponentials or gradient, what the CPU copies
    assert analysis.temp_size_in_bytes < min(M * V * 4 / 2, 4 * xla._CHUNK_BYTES)


@pytest.mark.parametrize("tokens", [1, 64, 8192, 10**6])
@pytest.mark.parametrize("vocabulary", [1, 256, 50257, 151936])
def test_chunks_cover_the_vocabulary_and_are_small(tokens, vocabulary):
    width = xla.chunk_width(tokens, vocabulary)
    assert 1 <= width <= vocabulary
    small = 4 * tokens * vocabulary <= xla._KEPT_BYTES or vocabulary <= xla._LEAST
    assert (width == vocabulary) == small
    limit = max(xla._CHUNK_BYTES // 4, xla._LEAST * tokens)
    assert small or tokens * width <= limit * 1.01 + 256 * tokens
    assert small or width % 256 == 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": (0, 4), "tokens": (0,)}, ValueError, "at least one token"),
        ({"dtype": jnp.float16}, TypeError, "hidden_MD: dtype: got float16"),
        ({"temperature": 0.0}, ValueError, "temperature: got 0.0"),
        ({"temperature": float("inf")}, ValueError, "temperature: got inf"),
        ({"top_k": 10}, ValueError, "top_k: got 10, need 0 to the vocabulary, 9"),
        ({"impl": "mosaic_gpu"}, NotImplementedError, "there is no such kernel"),
        ({"impl": "triton"}, NotImplementedError, "need an NVIDIA GPU"),
        ({"impl": "mosaic_tpu"}, NotImplementedError, "need a TPU"),
        ({"impl": "triton_interpret", "top_k": 2}, NotImplementedError, "sort across its tiles"),
        (
            {"impl": "mosaic_tpu_interpret", "dtype": jnp.float32},
            NotImplementedError,
            "hidden states are float32",
        ),
        ({"impl": "fast"}, ValueError, "'fast'"),
    ],
)
def test_bad_calls_say_what_is_wrong(change, error, words):
    options = {name: change[name] for name in ("temperature", "top_k") if name in change}
    hidden = jnp.ones(change.get("hidden", (3, 4)), change.get("dtype", jnp.bfloat16))
    head = jnp.ones((9, 4), jnp.bfloat16)
    tokens = jnp.zeros(change.get("tokens", (3,)), jnp.int32)
    with pytest.raises(error, match=re.escape(words)):
        op.token_logprobs(hidden, head, tokens, impl=change.get("impl", "xla"), **options)


def test_shapes_that_do_not_fit_are_named():
    hidden, head, tokens = draw(3, 9, 4)
    with pytest.raises(ValueError, match="head_VD: width: got 3, need that of hidden, 4"):
        op._check(hidden, head[:, :3], tokens, 1.0, 0)
    with pytest.raises(ValueError, match="tokens_M: shape: got"):
        op._check(hidden, head, tokens[:2], 1.0, 0)


def test_tiles_of_hopper_are_wider_and_give_the_same():
    hidden, head, tokens = draw(3, 300, 16)
    with device.described("cuda", (9, 0)):
        assert triton.columns() == 256
        got = op.token_logprobs(hidden, head, tokens, impl="triton_interpret")
    logprob, entropy = expect(hidden, head, tokens)
    np.testing.assert_allclose(got.logprob_M, logprob, atol=SUM)
    np.testing.assert_allclose(got.entropy_M, entropy, atol=SUM)


def test_splits_of_several_tiles_and_a_short_last_one_merge(monkeypatch):
    monkeypatch.setattr(triton, "_PROGRAMS", 2)
    hidden, head, tokens = draw(3, 5 * triton.columns() + 7, 16)
    got = evaluate("triton_interpret", hidden, head, tokens, temperature=1.7)
    logprob, entropy = expect(hidden, head, tokens, 1.7)
    np.testing.assert_allclose(got.logprob_M, logprob, atol=SUM)
    np.testing.assert_allclose(got.entropy_M, entropy, atol=SUM)


CASES = {case.case: case for case in bench.BENCHES if case.small}


@pytest.mark.parametrize(
    ("name", "impl"),
    [(name, impl) for name, case in CASES.items() for impl in case.impls],
)
def test_every_small_case_is_within_its_tolerance(name, impl):
    case = CASES[name]
    arguments = case.make(1)
    got = jax.jit(case.run(impl if impl == "xla" else f"{impl}_interpret"))(*arguments)
    want = jax.jit(case.reference)(*arguments)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        rms = np.sqrt(np.mean(theirs**2))
        np.testing.assert_allclose(mine, theirs, atol=case.tolerance * rms + 1e-6)


def test_costs_count_each_operand_once():
    case = dataclasses.replace(
        next(c for c in bench.CASES if c.name == "m8192"), M=2, V=10, D=3, head_dtype="float32"
    )
    assert bench.cost(case).read == 2 * 3 * 2 + 10 * 3 * 4 + 2 * 4
    assert bench.cost(case).written == 2 * 8
    assert bench.cost(case).operations == 2 * 2 * 10 * 3
