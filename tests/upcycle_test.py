"""Sparse upcycling: the same function at the start, and checkpoints that transformers loads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from tests import hf_models, slow
from trace_jax import config as cfg
from trace_jax.models import transformer
from trace_jax.upcycle import upcycle

DENSE = cfg.Model(
    family="qwen3",
    vocab_size=64,
    width=32,
    layers=3,
    head_dim=16,
    experts=0,
    dense_ffn=48,
    compute_dtype="float32",
)
LLAMA = cfg.Model(
    family="llama",
    vocab_size=64,
    width=32,
    layers=2,
    head_dim=16,
    qk_norm=False,
    experts=0,
    dense_ffn=40,
    tie_embeddings=False,
    compute_dtype="float32",
)
TOKENS = np.arange(22).reshape(2, 11) % 64


def started(model: cfg.Model, **options):
    params = transformer.init(model, 64, jax.random.key(0))
    return params, *upcycle(model, params, key=jax.random.key(1), **options)


@pytest.mark.parametrize(
    ("model", "experts", "chosen"),
    [(DENSE, 4, 2), (DENSE, 3, 3), (DENSE, 1, 1), (LLAMA, 8, 2)],
    ids=["qwen3", "all_chosen", "one", "llama"],
)
def test_without_noise_the_function_is_the_dense_models(model, experts, chosen):
    params, new, moe = started(model, experts=experts, experts_per_token=chosen)
    before = trace_jax.logits(model, params, TOKENS)
    after = trace_jax.logits(new, moe, TOKENS)
    np.testing.assert_allclose(after, before, atol=1e-5 * float(jnp.std(before)))
    assert (new.experts, new.experts_per_token) == (experts, chosen)
    assert (new.expert_ffn, new.dense_ffn) == (model.dense_ffn, 0)
    assert "mlp" not in moe["layers"] and "mlp" in params["layers"]
    assert moe["layers"]["moe"]["gate_up"].shape[:2] == (model.layers, experts)


def test_gates_that_do_not_sum_to_one_would_change_it():
    params, new, moe = started(DENSE, experts=4, experts_per_token=2)
    raw = dataclasses.replace(new, renormalise_gates=False)
    before, after = (trace_jax.logits(m, p, TOKENS) for m, p in ((DENSE, params), (raw, moe)))
    assert jnp.max(jnp.abs(after - before)) > 0.1 * jnp.std(before)


def test_the_router_uses_all_experts_and_gets_a_gradient_once_they_differ():
    _, new, moe = started(DENSE, experts=4, experts_per_token=2, noise=0.1)
    router = moe["layers"]["moe"]["router"]
    assert 0.015 < jnp.std(router) < 0.025

    def loss(p):
        return jnp.mean(jnp.square(trace_jax.logits(new, p, TOKENS)))

    gradient = jax.grad(loss)(moe)["layers"]["moe"]["router"]
    assert jnp.all(jnp.any(gradient != 0, axis=(0, 1)))  # each expert in some layer


def test_noise_is_of_the_given_size_and_spares_the_first_copy():
    params, _, moe = started(DENSE, experts=5, experts_per_token=2, noise=0.25)
    for name in ("gate_up", "down"):
        dense, copies = params["layers"]["mlp"][name], moe["layers"]["moe"][name]
        np.testing.assert_array_equal(copies[:, 0], dense)
        for row in range(DENSE.layers):
            added = copies[row, 1:] - dense[row][None]
            size = jnp.std(added) / jnp.std(dense[row])
            assert 0.24 < size < 0.26
            assert not jnp.any(added[0] == added[1])


def test_the_key_decides():
    options = {"experts": 4, "experts_per_token": 2, "noise": 0.1}
    params = transformer.init(DENSE, 64, jax.random.key(0))
    first, again, other = (
        upcycle(DENSE, params, key=jax.random.key(k), **options)[1]["layers"]["moe"]
        for k in (1, 1, 2)
    )
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert jnp.any(first[name] != other[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0}, "experts: got 0"),
        ({"experts_per_token": 5}, r"experts_per_token: got 5, need 1..experts \(4\)"),
        ({"noise": -1.0}, "noise: got -1.0"),
        ({"router_std": -1.0}, "router_std: got -1.0"),
    ],
)
def test_impossible_options_are_refused(change, message):
    options = {"experts": 4, "experts_per_token": 2} | change
    with pytest.raises(ValueError, match=message):
        started(DENSE, **options)


def test_a_mixture_is_not_upcycled_again():
    _, new, moe = started(DENSE, experts=4, experts_per_token=2)
    with pytest.raises(ValueError, match=r"model.experts: got 4, need 0"):
        upcycle(new, moe, experts=4, experts_per_token=2, key=jax.random.key(0))


UPCYCLED = ("qwen3", "llama_tied", "llama")


@pytest.mark.parametrize("name", slow.only(UPCYCLED, fast=["qwen3"]))
def test_transformers_loads_what_was_upcycled(name, tmp_path):
    hf_models.need_torch()
    import torch
    import transformers

    dense = hf_models.tiny(name, tmp_path / "dense")
    model, params = trace_jax.load(tmp_path / "dense", dtype="float32")
    new, moe = upcycle(model, params, experts=4, experts_per_token=2, key=jax.random.key(3))
    trace_jax.save(tmp_path / "moe", new, moe, dtype="float32")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "moe", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert theirs.config.model_type == ("qwen3_moe" if name == "qwen3" else "mixtral")
    tokens = torch.arange(30).reshape(2, 15)
    with torch.no_grad():
        before, after = (m(tokens).logits.numpy() for m in (dense, theirs))
    np.testing.assert_allclose(after, before, atol=2e-5 * before.std())
    again, reread = trace_jax.load(tmp_path / "moe", dtype="float32")
    assert again == new
    jax.tree.map(np.testing.assert_array_equal, reread, moe)
