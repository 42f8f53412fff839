"""Gated DeltaNet: the chunked form against the recurrence in float64 numpy, and the layer's state.

The layer as a whole (projections, convolution, gates) is compared with numpy in transformer_test.py
and with transformers in parity_hf_test.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import layer_kinds
from trace_jax.models import gated_delta, transformer

B, H, K, Z = 2, 3, 8, 6
MODEL = cfg.Model(
    width=24,
    layers=2,
    heads=2,
    head_dim=8,
    full_attention_every=2,
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=8,
    linear_value_dim=6,
    experts=0,
    dense_ffn=16,
    compute_dtype="float32",
)


def rule_by_hand(q, k, v, g, beta, memory):
    """S <- e^g S; u = beta (v - S' k); S <- S + k u'; o = S' q, each head on its own."""
    q, k, v, g, beta, memory = (np.asarray(a, np.float64) for a in (q, k, v, g, beta, memory))
    out, memory = np.zeros_like(v), memory.copy()
    for b in range(v.shape[0]):
        for h in range(v.shape[2]):
            S = memory[b, h]
            for t in range(v.shape[1]):
                S = S * np.exp(g[b, t, h])
                u = beta[b, t, h] * (v[b, t, h] - k[b, t, h] @ S)
                S = S + np.outer(k[b, t, h], u)
                out[b, t, h] = q[b, t, h] @ S
            memory[b, h] = S
    return out, memory


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw(T, seed=0):
    rng = np.random.default_rng(seed)
    operands = (
        unit(rng.standard_normal((B, T, H, K))),
        unit(rng.standard_normal((B, T, H, K))),
        rng.standard_normal((B, T, H, Z)),
        -rng.exponential(0.3, (B, T, H)),
        rng.uniform(0, 1, (B, T, H)),
        rng.standard_normal((B, H, K, Z)),
    )
    return tuple(a.astype(np.float32) for a in operands)


def with_change(T, case):
    q, k, v, g, beta, memory = draw(T)
    if case == "slow decay":
        g = g * np.float32(1e-3)
    elif case == "no decay":
        g = np.zeros_like(g)
    elif case == "strong decay":
        g = np.full_like(g, -20)
    elif case == "one total reset":  # e^-1000 is 0; what follows decays slowly
        g = g * np.float32(0.01)
        g[:, T // 3] = -1000
    elif case == "beta 0":
        beta = np.zeros_like(beta)
    elif case == "beta 1":
        beta = np.ones_like(beta)
    elif case == "beta 0 and 1":
        beta = np.round(beta)
    elif case == "one key, kept":  # (I + A)^-1 by powers of A would cancel here
        k, beta, g = np.broadcast_to(k[:, :1], k.shape), np.ones_like(beta), np.zeros_like(g)
    elif case == "zeros":
        q, k, v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    elif case == "no memory":
        memory = np.zeros_like(memory)
    return q, k, v, g, beta, memory


CASES = (
    "random",
    "slow decay",
    "no decay",
    "strong decay",
    "one total reset",
    "beta 0",
    "beta 1",
    "beta 0 and 1",
    "one key, kept",
    "zeros",
    "no memory",
)
chunked = jax.jit(gated_delta.chunked_rule, static_argnames=("chunk",))
recurrent = jax.jit(gated_delta.recurrent_rule)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130, 200])
def test_both_forms_are_the_recurrence_in_float64(T):
    for case in CASES:
        operands = with_change(T, case)
        want = rule_by_hand(*operands)
        for name, rule in (("chunked", chunked), ("recurrent", recurrent)):
            for got, right in zip(rule(*operands), want, strict=True):
                # float32 sums over up to 200 tokens of values near 1
                np.testing.assert_allclose(got, right, atol=5e-6, err_msg=f"{name}: {case}")


@pytest.mark.parametrize("case", ["random", "no decay", "strong decay", "one key, kept", "zeros"])
def test_gradients_are_those_of_the_recurrence(case):
    T = 70
    operands = with_change(T, case)
    rng = np.random.default_rng(1)
    toward = rng.standard_normal((B, T, H, Z)), rng.standard_normal((B, H, K, Z))
    toward = tuple(np.float32(a) for a in toward)

    def gradients(rule):
        def total(*operands):
            return sum(jnp.sum(a * b) for a, b in zip(rule(*operands), toward, strict=True))

        return jax.jit(jax.grad(total, argnums=tuple(range(6))))(*operands)

    pairs = zip(
        gradients(gated_delta.chunked_rule), gradients(gated_delta.recurrent_rule), strict=True
    )
    for name, (got, want) in zip(("q", "k", "v", "g", "beta", "memory"), pairs, strict=True):
        scale = max(1.0, float(np.max(np.abs(want))))
        np.testing.assert_allclose(got, want, atol=2e-5 * scale, err_msg=name)


def test_the_gradient_of_the_chunked_form_is_a_difference_quotient():
    """In float64 by the recurrence written out in numpy: no code in common."""
    operands = draw(9)
    direction = draw(9, seed=2)
    toward = np.random.default_rng(3).standard_normal((B, 9, H, Z))

    def total(scale):
        moved = (np.float64(a) + scale * b for a, b in zip(operands, direction, strict=True))
        return float(np.sum(rule_by_hand(*moved)[0] * toward))

    want = (total(1e-5) - total(-1e-5)) / 2e-5
    toward = toward.astype(np.float32)
    _, got = jax.jvp(lambda *a: jnp.sum(chunked(*a)[0] * toward), operands, direction)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("g", [-1e4, -100.0, -1e-9])
def test_extreme_decays_give_finite_values_and_gradients(g):
    q, k, v, _, beta, memory = draw(130)
    decay = np.full_like(beta, g)

    def total(*operands):
        o, memory = gated_delta.chunked_rule(*operands)
        return jnp.sum(o) + jnp.sum(memory)

    every = jax.jit(jax.value_and_grad(total, argnums=tuple(range(6))))(
        q, k, v, decay, beta, memory
    )
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(every))


@functools.cache
def make_layer(model=MODEL):
    """Layer 0's mixer, compiled, with weights that leave nothing neutral."""
    params = transformer.init(model, 5, jax.random.key(0))["layers"]
    layer = jax.tree.map(lambda a: a[0], params)  # row 0 of every stack
    rng = np.random.default_rng(0)
    linear = layer["linear"]
    linear["dt_bias"] = jnp.asarray(rng.uniform(-2, 1, linear["dt_bias"].shape), jnp.float32)
    linear["A_log"] = jnp.log(jnp.asarray(rng.uniform(0.05, 2, linear["A_log"].shape), jnp.float32))
    kind = layer_kinds.kinds(model)[0]
    assert kind.mixer == "linear"
    view = transformer.make_layer_view(model)
    return jax.jit(lambda x, state=None, valid=None: view(kind, layer).linear(x, state, valid))


def inputs(rows, T, seed=0):
    draw = np.random.default_rng(seed).standard_normal((rows, T, MODEL.width))
    return jnp.asarray(draw, jnp.float32)


def close(got, want, atol=3e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), got, want)


@pytest.mark.parametrize("first", [1, 2, 64, 70])
def test_prefill_then_decode_is_the_whole_sequence(first):
    module, x_BTD = make_layer(), inputs(2, 75)
    want, end = module(x_BTD)
    y, state = module(x_BTD[:, :first])
    parts = [y]
    for t in range(first, 75):
        y, state = module(x_BTD[:, t : t + 1], state)
        parts.append(y)
    assert np.std(want) > 0.1
    close(np.concatenate(parts, axis=1), want)
    close(state, end)


def test_two_prefills_are_one():
    module, x_BTD = make_layer(), inputs(2, 90)
    y, state = module(x_BTD[:, :50])
    rest, end = module(x_BTD[:, 50:], state)
    want, whole = module(x_BTD)
    close(np.concatenate([y, rest], axis=1), want)
    close(end, whole)


@pytest.mark.parametrize("where", ["right", "left", "between"])
def test_rows_of_different_length_continue_each_from_its_own_end(where):
    """A padded batch ends in the states of its rows alone, then decodes one more token."""
    module, lengths, T = make_layer(), (0, 1, 2, 37, 66, 70), 70
    rng = np.random.default_rng(4)
    x_BTD, valid_BT = inputs(len(lengths), T), np.zeros((len(lengths), T), bool)
    for row, length in enumerate(lengths):
        slots = {"right": np.arange(length), "left": np.arange(T - length, T)}.get(where)
        slots = np.sort(rng.permutation(T)[:length]) if slots is None else slots
        valid_BT[row, slots] = True
    following = inputs(len(lengths), 1, seed=5)
    y_BTD, state = module(x_BTD, None, valid_BT)
    np.testing.assert_array_equal(y_BTD[~valid_BT], 0)
    after, _ = module(following, state)
    for row, length in enumerate(lengths):
        want = token_by_token(module, jnp.concatenate([x_BTD[row][valid_BT[row]], following[row]]))
        close(y_BTD[row][valid_BT[row]], want[:length])
        close(after[row], want[length:])


def token_by_token(module, x_TD):
    state, out = gated_delta.empty_state(MODEL, 1, jnp.float32), []
    for x_D in x_TD:
        y, state = module(x_D[None, None], state)
        out.append(y[0, 0])
    return np.stack(out)


def test_an_invalid_decoding_step_leaves_the_state_as_it_is():
    """Finished sequences stay in the batch; their tokens may be anything."""
    module = make_layer()
    _, state = module(inputs(2, 5))
    token = inputs(2, 1).at[1].set(jnp.nan)
    y, after = module(token, state, jnp.array([[True], [False]]))
    assert np.all(np.isfinite(y))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), after, state)
    assert not np.array_equal(after["memory"][0], state["memory"][0])


def test_no_gradient_comes_from_padding_and_none_is_nan():
    module, x_BTD = make_layer(), inputs(2, 9)
    valid = np.arange(9)[None] < np.array([[4], [0]])
    gradient = jax.grad(lambda x: jnp.sum(module(x, None, jnp.asarray(valid))[0]))(x_BTD)
    gradient = np.asarray(gradient)
    np.testing.assert_array_equal(gradient[~valid], 0)
    assert np.all(np.isfinite(gradient))
    assert np.all(np.any(gradient[0, :4], axis=-1))


def test_under_bfloat16_memory_and_gates_stay_in_float32():
    """Memory is a sum over all tokens: BF16 would stop it from growing. The rest is rounded."""
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    module, wide = make_layer(model), make_layer()
    x_BTD = jnp.asarray(inputs(2, 40)).astype(jnp.bfloat16)
    y, state = module(x_BTD)
    assert (y.dtype, state["conv"].dtype, state["memory"].dtype) == (
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.float32,
    )
    empty = gated_delta.empty_state(model, 2, jnp.bfloat16)
    assert jax.tree.map(jnp.shape, empty) == jax.tree.map(jnp.shape, state)
    assert jax.tree.map(lambda a: a.dtype, empty) == jax.tree.map(lambda a: a.dtype, state)
    want, _ = wide(x_BTD.astype(jnp.float32))
    error = np.linalg.norm(y.astype(jnp.float32) - want) / np.linalg.norm(want)
    assert 1e-4 < error < 0.02  # a few roundings of 2**-9 each; a BF16 decay would show more
    step, state = module(x_BTD[:, :1], state)
    assert step.dtype == jnp.bfloat16
    assert state["memory"].dtype == jnp.float32


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1e-2, 1.0])
def test_small_keys_and_queries_are_normalised_with_the_epsilon_of_transformers(size):
    """transformers' l2norm: x * rsqrt(sum(x^2) + 1e-6), in float64 by numpy; q times dk^-1/2."""
    dk, Hk, Hv = MODEL.linear_key_dim, MODEL.linear_key_heads, MODEL.linear_value_heads
    rng = np.random.default_rng(0)
    channels = 2 * Hk * dk + Hv * MODEL.linear_value_dim
    mixed = (size * rng.standard_normal((2, 3, channels))).astype(np.float32)
    mixed[0, 0] = 0
    params = transformer.init(MODEL, 5, jax.random.key(0))["layers"]
    kind = layer_kinds.kinds(MODEL)[0]
    layer = transformer.make_layer_view(MODEL)(kind, jax.tree.map(lambda a: a[0], params))
    q, k, v = layer.linear._heads(jnp.asarray(mixed))
    wide = mixed.astype(np.float64)
    for got, start, scale in ((q, 0, dk**-0.5), (k, Hk * dk, 1.0)):
        x = wide[..., start : start + Hk * dk].reshape(2, 3, Hk, dk)
        want = scale * x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        want = np.repeat(want, Hv // Hk, axis=2)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-12)
        np.testing.assert_array_equal(got[0, 0], 0)
    np.testing.assert_array_equal(v, mixed[..., 2 * Hk * dk :].reshape(v.shape))
