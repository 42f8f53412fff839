"""Qwen3-MoE against the architecture written out in float64 numpy, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import policy
from trace_jax.models import transformer
from trace_jax.types import Batch

MODEL = cfg.Model(
    width=24,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=10,
    experts=6,
    experts_per_token=3,
    expert_ffn=14,
    rope_theta=100.0,
    norm_eps=1e-3,
    compute_dtype="float32",
)
VOCAB, B, T = 19, 3, 11
BF16 = cfg.Quant(rollout="bf16", trainer="bf16")


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x) + MODEL.norm_eps) * weight


def rotate(x, position):
    """Pairs (i, i + K/2) turn by position * theta ** (-2 i / K)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * MODEL.rope_theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def attention(layer, xs):
    H, J, K = MODEL.heads, MODEL.kv_heads, MODEL.head_dim
    queries, keys, values, out = [], [], [], []
    for t, x in enumerate(xs):
        heads = [(x @ layer[w]).reshape(-1, K) for w in "qkv"]
        queries.append([rotate(norm(q, layer["q_norm"]), t) for q in heads[0]])
        keys.append([rotate(norm(k, layer["k_norm"]), t) for k in heads[1]])
        values.append(heads[2])
        mixed = []
        for h in range(H):
            j = h // (H // J)
            scores = np.array([queries[t][h] @ keys[s][j] for s in range(t + 1)]) / np.sqrt(K)
            mixed.append(sum(p * values[s][j] for s, p in enumerate(softmax(scores))))
        out.append(np.concatenate(mixed) @ layer["o"])
    return out


def moe(layer, x):
    probs = softmax(x @ layer["router"])
    chosen = np.argsort(-probs)[: MODEL.experts_per_token]
    y = np.zeros_like(x)
    for e in chosen:
        gate, up = np.split(layer["gate_up"][e] @ x, 2)
        y += probs[e] / probs[chosen].sum() * (layer["down"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return y


def log_probs_by_hand(params, tokens, temperature):
    """log softmax(logits / temperature) of each next token of one sequence."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    xs = [params["embed"][token] for token in tokens]
    for i in range(MODEL.layers):
        layer = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        heard = attention(layer["attention"], [norm(x, layer["attention_norm"]) for x in xs])
        xs = [x + a for x, a in zip(xs, heard, strict=True)]
        xs = [x + moe(layer["moe"], norm(x, layer["moe_norm"])) for x in xs]
    head = params.get("head", params["embed"])
    out = []
    for x, following in zip(xs[:-1], tokens[1:], strict=True):
        out.append(np.log(softmax(head @ norm(x, params["final_norm"]) / temperature)[following]))
    return out


def rough_params(model):
    """Random, with every weight so large that leaving it out would show."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: transformer.init(model, VOCAB, jax.random.key(0)))

    def fill(path, leaf):
        if path[-1].key.endswith("norm"):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        size = 0.25 if path[-1].key in ("embed", "head") else 2 * leaf.shape[-1] ** -0.5
        return (rng.standard_normal(leaf.shape) * size).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def make_batch(tokens_BT):
    rows, length = tokens_BT.shape
    return Batch(
        tokens_BT=tokens_BT,
        valid_BT=np.ones((rows, length), bool),
        loss_mask_BS=np.ones((rows, length - 1), bool),
        sampler_logprobs_BS=np.zeros((rows, length - 1), np.float32),
        advantages_B=np.zeros(rows, np.float32),
        routes_LBSX=None,
        guidance=None,
    )


@pytest.mark.parametrize(("tied", "temperature"), [(True, 1.0), (False, 0.6)])
def test_log_probs_are_those_of_the_architecture_in_float64(tied, temperature):
    model = dataclasses.replace(MODEL, tie_embeddings=tied)
    params = rough_params(model)
    assert ("head" in params) != tied
    tokens_BT = np.random.default_rng(1).integers(0, VOCAB, (B, T)).astype(np.int32)
    log_probs = jax.jit(policy.make_log_probs(model, BF16, temperature=temperature))
    got, counts = log_probs(params, make_batch(tokens_BT))
    want = [log_probs_by_hand(params, tokens, temperature) for tokens in tokens_BT]
    assert np.std(want) > 0.5  # logits that matter
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert counts == {}


def test_the_layer_view_takes_any_pytree_in_place_of_a_weight():
    params = rough_params(MODEL)
    layer = jax.tree.map(lambda a: a[0], params["layers"])
    layer["moe"]["down"] = {"codes": 1, "scales": 2}
    block = transformer.make_layer_view(MODEL)(layer)
    assert block.moe.down.get_value() == {"codes": 1, "scales": 2}
    np.testing.assert_array_equal(block.attention.q[...], params["layers"]["attention"]["q"][0])


def test_embedding_gradients_add_up_in_the_dtype_of_the_parameter():
    """512 occurrences of one token: BF16 sums would stop growing at 256."""
    tokens = jnp.zeros((1, 512), jnp.int32)

    def total(embed):
        x = transformer.embed_tokens({"embed": embed}, tokens, jnp.bfloat16)
        return jnp.sum(x.astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))(jnp.ones((2, 4)))
    np.testing.assert_array_equal(gradient, [[512.0] * 4, [0.0] * 4])
