"""The whole sampler and trainer with their kernels, step by step on the CPU, against plain XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import policy
from trace_jax.models import kv_cache
from trace_jax.rollout import jax_engine

TRACE = cfg.Quant(weights="nvfp4", acts="nvfp4", kv="nvfp4:global_rule=one", guide_hidden=True)
SAMPLER = ("quantize", "fp4_matmul", "kv_attention")
TRAINER = ("fake_quant", "grouped_matmul", "token_logprob")
KINDS = {
    "codes": TRACE,
    "few bits": dataclasses.replace(
        TRACE, guide="mantissa", guide_scale_bits=4, guide_global_bits=16
    ),
    "compared only": dataclasses.replace(TRACE, trainer="qat"),
}


def interpreted(*ops):
    return cfg.Kernels(**dict.fromkeys(ops, "triton_interpret"))


@pytest.fixture(scope="module")
def sampled(tiny):
    """Trajectories of (kernels, model, quant)."""
    return functools.cache(functools.partial(sample, tiny))


@pytest.fixture(scope="module")
def trained(tiny, sampled):
    """Log-probs, counts and gradients of (kernels, quant)."""
    return functools.cache(functools.partial(train, tiny, sampled))


def sample(tiny, kernels, model, quant=TRACE):
    pair = tiny.make_pair(quant, model)
    generate = jax_engine.make_generate(
        model, quant, tiny.ROLLOUT, kernels, stop_ids=tiny.STOPS, pad_id=tiny.PAD
    )
    return generate(pair.weights, tiny.make_prompts((3, 7)), 2, jax.random.key(0))


@pytest.mark.parametrize("counted", [kv_cache._COUNTED, pytest.param(0, marks=pytest.mark.slow)])
def test_a_sampler_of_kernels_says_what_plain_xla_says(tiny, sampled, counted, monkeypatch):
    """Products and scores are added in another order, so log-probs differ by float32 rounding."""
    monkeypatch.setattr(kv_cache, "_COUNTED", counted)  # the cache of all layers, or of one
    plain = sampled(cfg.XLA, tiny.MODEL)
    sampled.cache_clear()
    ours = sampled(interpreted(*SAMPLER), tiny.MODEL)
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_array_equal(a.response_T, b.response_T)
        np.testing.assert_allclose(a.sampler_logprobs_R, b.sampler_logprobs_R, atol=1e-5)
        np.testing.assert_array_equal(a.routes_SLX, b.routes_SLX)
        records = zip(jax.tree.leaves(a.guidance), jax.tree.leaves(b.guidance), strict=True)
        for one, other in records:
            # a value beside a midpoint may fall to either side; none does here
            exact = one.dtype == np.uint8
            np.testing.assert_allclose(one, other, rtol=0 if exact else 1e-5)


def train(tiny, sampled, kernels, quant):
    """One batch, in BF16 as kernels multiply."""
    model = dataclasses.replace(tiny.MODEL, compute_dtype="bfloat16")
    batch = tiny.collate(sampled(cfg.XLA, model, quant))
    log_probs = policy.make_log_probs(model, quant, kernels, temperature=0.7)

    @jax.jit
    def run(params, batch):
        def total(params):
            logprobs_BS, counts = log_probs(params, batch)
            return jnp.sum(logprobs_BS, where=batch.loss_mask_BS), (logprobs_BS, counts)

        return jax.grad(total, has_aux=True)(params)

    grads, (logprobs_BS, counts) = run(tiny.rough_params(), batch)
    return np.asarray(logprobs_BS)[batch.loss_mask_BS], jax.device_get(counts), grads


@pytest.mark.slow  # half a minute each, most of it compiling
@pytest.mark.parametrize("kind", list(KINDS))
def test_fake_quantisation_by_a_kernel_changes_no_bit_of_a_training_step(trained, kind):
    plain, ours = (trained(k, KINDS[kind]) for k in (cfg.XLA, interpreted("fake_quant")))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {name for name in plain[1] if "undecoded" in name} and len(plain[1]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("op", ["grouped_matmul", "token_logprob"])
def test_products_by_a_kernel_differ_from_xla_by_the_rounding_of_bfloat16(trained, op):
    (plain, _, grads), (ours, _, found) = (trained(k, TRACE) for k in (cfg.XLA, interpreted(op)))
    np.testing.assert_allclose(ours, plain, atol=0.02)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(found), strict=True):
        assert np.linalg.norm(a - b) <= 0.03 * np.linalg.norm(a)
    assert any(np.any(a != 0) for a in jax.tree.leaves(found))


@pytest.mark.slow
def test_debug_mode_finds_scales_that_are_nan(tiny):
    pair, prompts = tiny.make_pair(TRACE), tiny.make_prompts((3, 7))
    generate = jax_engine.make_generate(
        tiny.MODEL,
        TRACE,
        tiny.ROLLOUT,
        cfg.Kernels(debug=True),
        stop_ids=tiny.STOPS,
        pad_id=tiny.PAD,
    )
    args = (prompts, 2, jax.random.key(0))
    for a, b in zip(generate(pair.weights, *args), pair.sample(prompts), strict=True):
        np.testing.assert_array_equal(a.response_T, b.response_T)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[0, 0, 0, 0].set(0x7F) if path[-1].key == "scales" else leaf,
        pair.weights.params,
    )
    broken = dataclasses.replace(pair.weights, params=params)
    with pytest.raises(ValueError, match=r"fp4_grouped_matmul: w.scales: got \d+ NaN, need none"):
        generate(broken, *args)
