"""Sampler against trainer, on the tokens that the sampler drew."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.slow import only
from trace_jax import config as cfg
from trace_jax import policy
from trace_jax.data import batching
from trace_jax.qat.policy_recipe import trainer_audit

MODES = {
    "bf16": cfg.Quant(rollout="bf16", trainer="bf16"),
    "codes": cfg.Quant(),
    "first layer kept": cfg.Quant(keep_first=1, acts="nvfp4:global_rule=pow2"),
    "weights in high precision": cfg.Quant(weights=None),
    "W4A16": cfg.Quant(acts=None),
    "low bits of scales": cfg.Quant(guide="mantissa", guide_scale_bits=2),
    "sites in layers of their own": cfg.Quant(guide_layers="expert_in=0 kv=1"),
    "MXFP4 W4A8": cfg.Quant(weights="mxfp4", acts="mxfp8", kv="mxfp4", guide_hidden=True),
    "conventions": cfg.Quant(weights="4over6", acts="nvfp4:convention=te", kv="hif4"),
    "mantissa, hidden, amax": cfg.Quant(guide="mantissa", guide_hidden=True, kv="nvfp4"),
}


def sampled(tiny, quant, **kwargs):
    pair = tiny.make_pair(quant, **kwargs)
    return pair, pair.sample(tiny.make_prompts(tiny.LENGTHS))


def gaps(pair, batch):
    """|trainer - sampler| of the sampled tokens, nats, and the trainer's counts."""
    logprobs_BS, counts = pair.log_probs(pair.params, batch)
    gap_BS = np.abs(np.asarray(logprobs_BS) - batch.sampler_logprobs_BS)
    return gap_BS[batch.loss_mask_BS], {name: mean.value for name, mean in counts.items()}


FAST = ("bf16", "codes", "MXFP4 W4A8")


@pytest.mark.parametrize("mode", only(MODES, FAST))
def test_sampler_and_trainer_agree_in_float32(tiny, mode):
    pair, trajectories = sampled(tiny, MODES[mode])
    batch = tiny.collate(trajectories)
    gap, counts = gaps(pair, batch)
    assert len(gap) == sum(len(t.response_T) for t in trajectories)
    assert np.std(batch.sampler_logprobs_BS[batch.loss_mask_BS]) > 0.5  # logits that matter
    np.testing.assert_allclose(gap, 0, atol=1e-5)
    assert counts["parity/route_mismatch"] == 0
    audit = trainer_audit(tiny.MODEL, MODES[mode], pair.params)
    coded = {path: counts[f"quant/coded/{path}"] for path in audit.sites}
    assert (len(coded) == 0) == (mode == "bf16")
    assert all(0.3 < share <= 1 for share in coded.values())
    # of codes, or of the one bit that mantissa guidance has
    kinds = ("guide/agreement", "guide/bit_agreement")
    agreement = {n.split("/")[-1]: v for n, v in counts.items() if n.startswith(kinds)}
    guidance = trajectories[0].guidance
    assert (guidance is None) == (mode == "bf16")
    assert agreement == ({} if guidance is None else dict.fromkeys(guidance.spec.sites, 1.0))


def test_every_processed_token_has_a_route_and_a_record_and_the_last_has_none(tiny):
    """A prompt of 3 and a response of 4 make 6 rows (F25)."""
    _, trajectories = sampled(tiny, MODES["mantissa, hidden, amax"])
    model = tiny.MODEL
    for t in trajectories:
        S = len(t.tokens_T) - 1
        assert S == t.prompt_length + len(t.response_T) - 1 >= 3
        assert t.routes_SLX.shape == (S, model.layers, model.experts_per_token)
        assert t.routes_SLX.min() >= 0 and t.routes_SLX.max() < model.experts
        assert np.all(t.routes_SLX[..., 0] != t.routes_SLX[..., 1])
        assert len(t.sampler_logprobs_R) == len(t.response_T)
        X, F, J, K = model.experts_per_token, model.expert_ffn, model.kv_heads, model.head_dim
        axes = {"expert_in": (model.width,), "expert_hidden": (X, F), "k": (J, K), "v": (J, K)}
        assert set(t.guidance.sites) == set(axes)
        for name, shape in axes.items():
            site = t.guidance.sites[name]
            lead = (model.layers, S, *shape[:-1])
            assert site.bits.shape == (*lead, shape[-1] // 8)
            assert site.scales.shape == (*lead, shape[-1] // 16)
            assert site.global_scale.shape == (*lead, 1)
            assert np.all(site.scales > 0)


def test_a_layer_that_is_kept_is_not_recorded(tiny):
    _, trajectories = sampled(tiny, MODES["first layer kept"])
    guidance = trajectories[0].guidance
    assert guidance.spec.layers == ((1,),) * 3
    assert {len(leaf) for leaf in jax.tree.leaves(guidance)} == {1}


def test_padding_and_the_micro_batch_split_change_nothing(tiny):
    """Halves of the batch, each eight tokens longer (F21)."""
    pair, trajectories = sampled(tiny, MODES["codes"])
    whole, longer = tiny.collate(trajectories), tiny.collate(trajectories, extra=8)
    logprobs_BS, counts = pair.log_probs(pair.params, whole)
    parts = [pair.log_probs(pair.params, p) for p in batching.micro_batches(longer, 4)]
    split_BS = np.concatenate([np.asarray(part) for part, _ in parts])
    S = logprobs_BS.shape[1]
    assert split_BS.shape[1] == S + 8
    mask_BS = whole.loss_mask_BS
    np.testing.assert_allclose(
        split_BS[:, :S][mask_BS], np.asarray(logprobs_BS)[mask_BS], atol=1e-6, rtol=0
    )
    for name, mean in counts.items():  # undivided counts add up exactly
        total, count = (
            sum(float(getattr(c[name], f)) for _, c in parts) for f in ("total", "count")
        )
        assert (total, count) == (float(mean.total), float(mean.count)), name
    processed = sum(len(t.tokens_T) - 1 for t in trajectories)
    layers, width = tiny.MODEL.layers, tiny.MODEL.width
    assert float(counts["guide/agreement/expert_in"].count) == processed * layers * width
    assert float(counts["parity/route_mismatch"].count) == processed * layers


def test_the_sampled_path_equals_a_full_forward_of_every_prefix(tiny):
    """No cache, no routes: the trainer on each growing prefix, for its last token only."""
    pair, trajectories = sampled(tiny, MODES["bf16"])
    whole = tiny.collate(trajectories)
    for r in range(tiny.ROLLOUT.max_new_tokens):
        tokens_BT, valid_BT = np.zeros_like(whole.tokens_BT), np.zeros_like(whole.valid_BT)
        ends = [min(t.prompt_length + r + 1, len(t.tokens_T)) for t in trajectories]
        for row, end in enumerate(ends):
            tokens_BT[row, :end] = trajectories[row].tokens_T[:end]
            valid_BT[row, :end] = True
        prefix = dataclasses.replace(
            whole, tokens_BT=tokens_BT, valid_BT=valid_BT, routes_LBSX=None
        )
        logprobs_BS, _ = pair.log_probs(pair.params, prefix)
        for row, (end, t) in enumerate(zip(ends, trajectories, strict=True)):
            want = t.sampler_logprobs_R[end - t.prompt_length - 1]
            assert abs(float(logprobs_BS[row, end - 2]) - want) < 1e-5


def test_in_bfloat16_guided_training_is_closer_to_the_sampler_than_plain_rounding(tiny):
    """Only the order is asserted; the numbers are those of one small random model."""
    model = dataclasses.replace(tiny.MODEL, compute_dtype="bfloat16")
    pair, _ = sampled(tiny, MODES["codes"], model=model)
    batch = tiny.collate(
        [t for key in range(8) for t in pair.sample(tiny.make_prompts(tiny.LENGTHS, key), key=key)]
    )
    plain = policy.make_log_probs(
        model, cfg.Quant(trainer="qat"), temperature=tiny.ROLLOUT.temperature
    )
    trace, counts = gaps(pair, batch)
    qat, _ = gaps(dataclasses.replace(pair, log_probs=jax.jit(plain)), batch)
    print(f"mean gap: trace {trace.mean():.5f}, qat {qat.mean():.5f} nats; {counts}")
    assert trace.mean() < qat.mean() / 2
    assert counts["guide/agreement/k"] > 0.999
