"""Our models against transformers on tiny random checkpoints, through `trace_jax.load`.

Gradients are compared tensor by tensor under the names on disk.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from tests import hf_models, slow
from trace_jax.hf import names

hf_models.need_torch()
import torch  # noqa: E402

B, T = 3, 70  # longer than a chunk of Gated DeltaNet
LENGTHS = (70, 66, 9)
NAMES = hf_models.NAMES
VARIANTS = ("qwen3_moe_raw_gates", "llama_tied", "mixtral")


# one of Llama's and Qwen3's attention, with and without experts, and one hybrid
EACH = slow.all_but(NAMES, (*VARIANTS, "qwen3", "qwen3_next"))
MOE = tuple(n for n in NAMES if "moe" in n or n in ("qwen3_next", "mixtral"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """By name, and made once: the transformers model, and ours loaded from what it saved."""

    @functools.cache
    def make(name, dtype="float32"):
        directory = tmp_path_factory.mktemp(name)
        theirs = hf_models.tiny(name, directory, dtype=dtype)
        return theirs, *trace_jax.load(directory, dtype=dtype)

    return make


def draw_tokens(theirs, rows=B, length=T, seed=0):
    high = theirs.config.vocab_size
    return np.random.default_rng(seed).integers(2, high, (rows, length)).astype(np.int32)


def hf_logits(theirs, tokens_BT, valid_BT=None):
    arguments = {}
    if valid_BT is not None:
        position = np.maximum(np.cumsum(valid_BT, axis=1) - 1, 0)
        arguments["attention_mask"] = torch.from_numpy(valid_BT.astype(np.int64))
        arguments["position_ids"] = torch.from_numpy(position)
    with torch.no_grad():
        out = theirs(torch.from_numpy(tokens_BT.astype(np.int64)), use_cache=False, **arguments)
    return out.logits.float().numpy()


def padded(tokens_BT, side):
    """Rows cut to LENGTHS and padded with arbitrary tokens on one side."""
    at_BT = np.arange(tokens_BT.shape[1])[None]
    length_B1 = np.array(LENGTHS)[:, None]
    valid_BT = at_BT < length_B1 if side == "right" else at_BT >= tokens_BT.shape[1] - length_B1
    out = np.full_like(tokens_BT, 1)
    out[valid_BT] = np.concatenate([row[:n] for row, n in zip(tokens_BT, LENGTHS, strict=True)])
    return out, valid_BT


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(pair, name):
    theirs, model, params = pair(name)
    tokens_BT = draw_tokens(theirs)
    want = hf_logits(theirs, tokens_BT)
    got = np.asarray(trace_jax.logits(model, params, tokens_BT))
    assert got.dtype == np.float32
    assert 0.5 < np.std(want) < 3
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(np.argmax(got, axis=-1), np.argmax(want, axis=-1))


@pytest.mark.parametrize("name", EACH)
def test_padding_on_either_side_changes_nothing(pair, name):
    theirs, model, params = pair(name)
    tokens_BT = draw_tokens(theirs)
    alone = np.asarray(trace_jax.logits(model, params, tokens_BT))
    for side in ("right", "left"):
        shifted_BT, valid_BT = padded(tokens_BT, side)
        got = np.asarray(trace_jax.logits(model, params, shifted_BT, valid_BT))[valid_BT]
        without = np.concatenate([row[:n] for row, n in zip(alone, LENGTHS, strict=True)])
        np.testing.assert_allclose(got, without, rtol=0, atol=1e-5, err_msg=side)
        want = hf_logits(theirs, shifted_BT, valid_BT)[valid_BT]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4, err_msg=side)


@pytest.mark.parametrize("name", EACH)
def test_gradients_of_the_loss_are_those_of_transformers(pair, name):
    theirs, model, params = pair(name)
    tokens_BT = draw_tokens(theirs, rows=2, seed=1)

    def loss(params):
        logits = trace_jax.logits(model, params, tokens_BT)[:, :-1]
        chosen = jnp.take_along_axis(logits, tokens_BT[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    got_loss, got = jax.jit(jax.value_and_grad(loss))(params)
    ids = torch.from_numpy(tokens_BT.astype(np.int64))
    theirs.zero_grad()
    logits = theirs(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    want_loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    want_loss.backward()
    np.testing.assert_allclose(got_loss, want_loss.item(), rtol=1e-5)
    gradients = {path: p.grad.numpy() for path, p in theirs.named_parameters()}
    table = names.table(model, names.Layout(experts="fused"))
    assert {row.name for row in table} == set(gradients)
    worst = {}
    for row in table:
        parts = zip(row.places, row.split(gradients[row.name]), strict=True)
        for place, want in parts:
            ours = functools.reduce(lambda tree, key: tree[key], place.path, got)
            ours = np.asarray(ours)[place.index]
            error = np.linalg.norm(ours - want) / np.linalg.norm(want)
            worst[row.name, place.path] = error
    assert max(worst.values()) <= 1e-3, sorted(worst.items(), key=lambda item: -item[1])[:5]


def routes_of(theirs, tokens_BT):
    """(layers with experts, B, T, X): the experts that the transformers model chose."""
    chosen = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, output: chosen.append(output[-1]))
        for path, module in theirs.named_modules()
        if path.endswith("mlp.gate")
    ]
    logits = hf_logits(theirs, tokens_BT)
    for hook in hooks:
        hook.remove()
    routes = np.stack([ids.numpy().reshape(*tokens_BT.shape, -1) for ids in chosen])
    return routes.astype(np.int32), logits


@pytest.mark.parametrize("name", slow.all_but(MOE, (*VARIANTS, "qwen3_next", "qwen3_5_moe")))
def test_given_routes_are_used(pair, name):
    """Of our own choice they change nothing; of others they change the logits."""
    theirs, model, params = pair(name)
    tokens_BT = draw_tokens(theirs)
    routes, want = routes_of(theirs, tokens_BT)
    got = np.asarray(trace_jax.logits(model, params, tokens_BT, routes_LBTX=routes))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
    other = (routes + 1) % model.experts
    moved = np.asarray(trace_jax.logits(model, params, tokens_BT, routes_LBTX=other))
    assert np.mean(np.abs(moved - want)) > 0.1


@pytest.mark.parametrize("name", EACH)
def test_bfloat16_differs_from_float32_as_much_as_transformers_own(pair, name):
    """Both compute the same in BF16 up to where each rounds.

    A router that flips changes a token's logits by more than any rounding, so both go through the
    experts that transformers chose in BF16. The yardstick is what BF16 does to transformers itself:
    its own distance from the same weights in float32.
    """
    theirs, model, params = pair(name, "bfloat16")
    tokens_BT = draw_tokens(theirs)
    routes, want = (None, hf_logits(theirs, tokens_BT))
    if name in MOE:
        routes, want = routes_of(theirs, tokens_BT)
    assert model.compute_dtype == "bfloat16"
    got = np.asarray(trace_jax.logits(model, params, tokens_BT, routes_LBTX=routes))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    exact = functools.partial(trace_jax.logits, dataclasses.replace(model, compute_dtype="float32"))
    exact = np.asarray(exact(wide, tokens_BT, routes_LBTX=routes))
    ours, their, between = (
        np.sqrt(np.mean(np.square(a - b))) for a, b in ((got, exact), (want, exact), (got, want))
    )
    print(
        f"{name}: rms distance of logits from float32: ours {ours:.4f}, theirs {their:.4f};"
        f" from each other {between:.4f}"
    )
    assert ours < 1.5 * their
    assert between < 1.5 * np.hypot(ours, their)
    assert their < 0.1 * np.std(exact)
    choice = {"ours": got, "theirs": want, "exact": exact}
    choice = {who: np.argmax(logits, axis=-1) for who, logits in choice.items()}
    right = {who: np.mean(choice[who] == choice["exact"]) for who in ("ours", "theirs")}
    assert right["theirs"] > 0.8
    assert right["ours"] > right["theirs"] - 0.05
