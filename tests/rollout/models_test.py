"""Dense, mixed and hybrid models: sampler against trainer, cache against full forward, records."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.slow import only
from trace_jax import config as cfg
from trace_jax import policy, weight_sync
from trace_jax.guidance import health
from trace_jax.models import forward
from trace_jax.qat import plan as qat_plan
from trace_jax.qat.policy_recipe import trainer_audit
from trace_jax.rollout import jax_engine, stream
from trace_jax.rollout.audit import sampler_audit

BF16 = cfg.Quant(rollout="bf16", trainer="bf16")
TRACE = cfg.Quant(mlps="all", guide_hidden=True)
SITES = {  # by hand: the layers of each site
    "dense": {"mlp_in": (0, 1), "mlp_hidden": (0, 1), "k": (0, 1), "v": (0, 1)},
    "moe and dense": {
        **{"expert_in": (1, 2), "expert_hidden": (1, 2), "mlp_in": (0,), "mlp_hidden": (0,)},
        **{"k": (0, 1, 2), "v": (0, 1, 2)},
    },
    "hybrid": {
        **{"expert_in": (0, 1, 2, 3, 4), "expert_hidden": (0, 1, 2, 3, 4)},
        **{"k": (1, 3), "v": (1, 3)},
    },
}
every = pytest.mark.parametrize("name", only(SITES, ["moe and dense"]))


def sampled(tiny, name, quant):
    pair = tiny.make_pair(quant, tiny.MODELS[name])
    return pair, pair.sample(tiny.make_prompts(tiny.LENGTHS))


def gaps(log_probs, params, batch):
    """|trainer - sampler| of the sampled tokens, nats, and the trainer's counts."""
    logprobs_BS, counts = log_probs(params, batch)
    gap_BS = np.abs(np.asarray(logprobs_BS) - batch.sampler_logprobs_BS)
    return gap_BS[batch.loss_mask_BS], {name: mean.value for name, mean in counts.items()}


@every
def test_without_quantisation_both_sides_have_one_distribution(tiny, name):
    pair, trajectories = sampled(tiny, name, BF16)
    batch = tiny.collate(trajectories)
    gap, counts = gaps(pair.log_probs, pair.params, batch)
    assert np.std(batch.sampler_logprobs_BS[batch.loss_mask_BS]) > 0.3  # logits that matter
    np.testing.assert_allclose(gap, 0, atol=1e-4)
    moe_layers = len(SITES[name].get("expert_in", ()))
    X = tiny.MODEL.experts_per_token
    assert trajectories[0].routes_SLX.shape == (len(trajectories[0].tokens_T) - 1, moe_layers, X)
    assert ("parity/route_mismatch" in counts) == (moe_layers > 0)
    assert counts.get("parity/route_mismatch", 0) == 0


@every
def test_prefill_and_decode_give_the_logits_of_the_full_forward(tiny, name):
    """Prompts of different lengths in one batch: each row's cache and state are its own."""
    model, steps = tiny.MODELS[name], 4
    params = tiny.rough_params(model=model)
    prompts = tiny.make_prompts((3, 8, 6))
    forced_RB = np.random.default_rng(5).integers(6, tiny.VOCAB, (steps, 3)).astype(np.int32)

    @jax.jit
    def engine(weights, tokens_PT, length_P):
        seen = []

        def draw(logits_BV, keys_B, step):
            seen.append(logits_BV)
            return jnp.asarray(forced_RB[len(seen) - 1]), jnp.zeros(3)

        rollout = dataclasses.replace(tiny.ROLLOUT, max_new_tokens=steps)
        core = jax_engine.Core(model, BF16, rollout, (), tiny.PAD, custom_draw=draw)
        seeds, key = jnp.zeros(3, jnp.uint32), jax.random.key(0)
        begun = core.begin(weights, tokens_PT, length_P, seeds, key, samples=1)
        state = begun.state
        for _ in range(steps - 1):
            state = core.decode_step(weights, state, begun.prompt_B, begun.keys_B)
        return jnp.stack(seen)

    tokens_PT = np.full((3, 8), tiny.PAD, np.int32)
    for row, prompt in enumerate(prompts):
        tokens_PT[row, : len(prompt.tokens)] = prompt.tokens
    weights = weight_sync.make_sync(model, BF16)(params, 0).params
    got_RBV = np.asarray(engine(weights, tokens_PT, np.array([3, 8, 6], np.int32)))
    for row, prompt in enumerate(prompts):
        tokens = np.array([[*prompt.tokens, *forced_RB[:-1, row].tolist()]], np.int32)
        want_TV = np.asarray(forward.logits(model, params, tokens)[0])
        np.testing.assert_allclose(got_RBV[:, row], want_TV[-steps:], atol=2e-4, rtol=0)


@every
def test_in_fp4_a_guided_trainer_follows_the_sampler_and_all_is_recorded_and_audited(tiny, name):
    model = tiny.MODELS[name]
    pair, trajectories = sampled(tiny, name, TRACE)
    gap, counts = gaps(pair.log_probs, pair.params, tiny.collate(trajectories))
    np.testing.assert_allclose(gap, 0, atol=1e-4)
    agreement = {n.split("/")[-1]: v for n, v in counts.items() if n.startswith("guide/agreement")}
    assert agreement == dict.fromkeys(SITES[name], 1.0)
    for t in trajectories:
        assert dict(zip(t.guidance.spec.sites, t.guidance.spec.layers, strict=True)) == SITES[name]
        for site, ids in SITES[name].items():
            lead = (len(ids), len(t.tokens_T) - 1, *qat_plan.site_shape(model, site)[:-1])
            assert t.guidance.sites[site].scales.shape[:-1] == lead
            assert np.all(np.asarray(t.guidance.sites[site].scales) > 0)
    tokens = sum(len(t.tokens_T) - 1 for t in trajectories)
    recorded = health.record_bytes([t.guidance for t in trajectories])
    spec = qat_plan.guidance_spec(TRACE, model)
    assert recorded == tokens * qat_plan.bytes_per_token(spec, model)
    audit = trainer_audit(model, TRACE, pair.params)
    audit.require_same(sampler_audit(model, TRACE, pair.weights.params))
    assert all(0.3 < counts[f"quant/coded/{path}"] <= 1 for path in audit.sites)
    paths = {p: "attention" if p in ("k", "v") else p.split("_")[0] for p in SITES[name]}
    names = {"attention": "attention/{}_cache", "expert": "moe/{}", "mlp": "mlp/{}"}
    assert set(audit.sites) == {
        f"layers/{i}/{names[paths[site]].format(site)}"
        for site, ids in SITES[name].items()
        for i in ids
    }


@pytest.mark.slow  # seam_test.py does this by default for the uniform model
def test_in_bfloat16_guided_training_of_a_hybrid_is_closer_than_plain_rounding(tiny):
    """Only the order is asserted; the numbers are those of one small random model."""
    model = dataclasses.replace(tiny.MODELS["hybrid"], compute_dtype="bfloat16")
    pair = tiny.make_pair(TRACE, model)
    prompts = tiny.make_prompts(tiny.LENGTHS)
    batch = tiny.collate([t for key in range(4) for t in pair.sample(prompts, key=key)])
    plain = dataclasses.replace(TRACE, trainer="qat")
    log_probs = policy.make_log_probs(model, plain, temperature=tiny.ROLLOUT.temperature)
    trace, counts = gaps(pair.log_probs, pair.params, batch)
    qat, _ = gaps(jax.jit(log_probs), pair.params, batch)
    print(f"mean gap: trace {trace.mean():.5f}, qat {qat.mean():.5f} nats")
    assert trace.mean() < qat.mean()
    assert counts["guide/agreement/expert_in"] > 0.97


@every
def test_a_row_does_not_depend_on_its_neighbours_or_the_bucket(tiny, name):
    pair = tiny.make_pair(TRACE, tiny.MODELS[name])
    prompts = tiny.make_prompts(tiny.LENGTHS)
    together = pair.sample(prompts)
    alone = pair.sample([prompts[1]]) + pair.sample(list(reversed(prompts)))[-2:]
    wider = pair.sample([*tiny.make_prompts((11,), seed=9), prompts[1], prompts[0]])
    want = {(t.prompt.uid, t.sample): t for t in together}
    compared = [t for t in alone + wider if (t.prompt.uid, t.sample) in want]
    assert len(compared) == 8
    for t in compared:
        other = want[t.prompt.uid, t.sample]
        assert t.tokens_T.tolist() == other.tokens_T.tolist()
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
        close(t.sampler_logprobs_R, other.sampler_logprobs_R)
        np.testing.assert_array_equal(t.routes_SLX, other.routes_SLX)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", "hybrid"])
def test_a_stream_brings_the_ids_of_generate_in_chunks(tiny, name):
    model = tiny.MODELS[name]
    pair = tiny.make_pair(TRACE, model)
    options = {"stop_ids": tiny.STOPS, "pad_id": tiny.PAD}
    streaming = stream.make_stream(model, TRACE, tiny.ROLLOUT, **options)
    seen = set()
    for key in range(8):
        for prompt in tiny.make_prompts((3, 7)):
            (t, _) = pair.sample([prompt], key=key)
            ids = jax.random.key(key)
            chunks = list(streaming(pair.weights, prompt.tokens, ids, 2, uid=prompt.uid))
            assert [len(chunk) for chunk in chunks[:-1]] == [1, 2, 2, 2][: len(chunks) - 1]
            assert [i for chunk in chunks for i in chunk] == t.response_T.tolist()
            seen.add(t.finish_reason)
    assert seen == {"stop", "length"}


def test_layers_come_out_of_the_samplers_stacks_and_go_back(tiny):
    """Each layer's matrices against the master's row of that layer, counted by hand."""
    model, quant = tiny.MODELS["hybrid"], cfg.Quant(keep_first=1)
    params = tiny.rough_params(model=model)
    held = weight_sync.make_sync(model, quant)(params, 0).params
    segments = qat_plan.side_segments(quant, model, quant.rollout)
    assert [(s.start, s.stop, len(s.period)) for s in segments] == [(0, 1, 1), (1, 5, 2)]
    layers = [weight_sync.layer(held, segments, i) for i in range(model.layers)]
    rows = [("linear", "qkv", 0), ("attention", "q", 0), ("linear", "qkv", 1)]
    rows += [("attention", "q", 1), ("linear", "qkv", 2)]
    for i, (mixer, leaf, row) in enumerate(rows):
        got, want = layers[i][mixer][leaf], params["layers"][mixer][leaf][row]
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(layers[i]["ffn_norm"], params["layers"]["ffn_norm"][i])
        assert isinstance(layers[i]["moe"]["down"], dict) == (i > 0)
        assert ("linear" in layers[i]) != ("attention" in layers[i])
    codes = weight_sync.pack_weight(
        params["layers"]["moe"]["down"][3], qat_plan.formats.get("nvfp4")
    )
    jax.tree.map(np.testing.assert_array_equal, layers[3]["moe"]["down"], codes)
    rest = {name: leaf for name, leaf in held.items() if name != "segments"}
    again = weight_sync.assemble(layers, segments, rest)
    assert jax.tree.structure(again) == jax.tree.structure(held)
    jax.tree.map(np.testing.assert_array_equal, again, held)


@pytest.mark.parametrize("name", ["moe and dense", "hybrid"])
def test_what_both_sides_use_in_float32_arithmetic_is_sent_in_float32(tiny, name):
    model = dataclasses.replace(tiny.MODELS[name], compute_dtype="bfloat16")
    held = weight_sync.make_sync(model, BF16)(tiny.rough_params(model=tiny.MODELS[name]), 0).params
    leaves = jax.tree_util.tree_leaves_with_path(held)
    wide = {path[-1].key for path, leaf in leaves if leaf.dtype == jnp.float32}
    want = {"router", "mixer_norm", "ffn_norm", "final_norm", "q_norm", "k_norm"}
    gated_delta = {"A_log", "dt_bias", "conv", "norm"}
    assert wide == (want | gated_delta | {"shared_gate"} if name == "hybrid" else want)
    assert {str(leaf.dtype) for _, leaf in leaves} == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("quant", "start"),
    [
        (dataclasses.replace(TRACE, keep_first=2), "layers/0/"),
        (dataclasses.replace(TRACE, mlps="experts"), "layers/0/mlp/"),
        (dataclasses.replace(TRACE, kv="nvfp4"), "layers/0/attention/k_cache"),
    ],
)
def test_a_sampler_that_quantises_something_else_is_refused_by_name(tiny, quant, start):
    model = tiny.MODELS["moe and dense"]
    params = tiny.rough_params(model=model)
    held = weight_sync.make_sync(model, quant)(params, 0).params
    trainer = trainer_audit(model, TRACE, params)
    with pytest.raises(ValueError, match=f"qat audits of the two sides: got {start}"):
        trainer.require_same(sampler_audit(model, quant, held))
