"""Oracles: layers counted by hand, and the paper's bytes per token."""

import dataclasses

import pytest

from trace_jax import config as cfg
from trace_jax import formats, layer_kinds
from trace_jax.guidance.record import GuidanceSpec
from trace_jax.qat import plan

# Qwen3.5-35B-A3B, as far as guidance sees it; its full-attention layers are 10 of the 40.
PAPER = {"width": 2048, "kv_heads": 2, "head_dim": 256, "heads": 16, "experts": 256}
QWEN = cfg.Model(layers=40, experts_per_token=8, expert_ffn=512, **PAPER)
ONE = {"acts": "nvfp4:global_rule=one", "kv": "nvfp4:global_rule=one"}
MOE = layer_kinds.Kind(mixer="attention", ffn="moe")
NVFP4, KV = formats.get("nvfp4"), formats.get("nvfp4:global_rule=one")


def of_depth(layers: int) -> cfg.Model:
    """The model cut to some layers."""
    return dataclasses.replace(QWEN, layers=layers)


def test_layers_kept_in_high_precision_are_neither_quantised_nor_recorded():
    plans = plan.layer_plans(cfg.Quant(keep_first=1, keep_last=2), of_depth(6))
    assert [p.acts is not None for p in plans] == [False, True, True, True, False, False]
    for field in ("weights", "acts", "kv"):
        assert [getattr(p, field) is not None for p in plans] == [bool(p.recorded) for p in plans]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("all", [2, 3, 4, 5]),
        ("latter_half", [4, 5]),
        ("last:1", [5]),
        ("last:4", [2, 3, 4, 5]),
        ("3,5", [3, 5]),
    ],
)
def test_guided_layers_are_chosen_among_the_quantised_ones(text, want):
    """Otherwise last:2 with keep_last=2 would guide nothing, and no one would notice."""
    quant = cfg.Quant(keep_first=2, keep_last=2, guide_layers=text)
    assert [i for i, p in enumerate(plan.layer_plans(quant, of_depth(8))) if p.recorded] == want
    assert plan.guidance_spec(quant, of_depth(8)).layers == (tuple(want),) * 3


def test_a_guided_layer_outside_the_quantised_ones_is_refused():
    with pytest.raises(ValueError, match=r"guide_layers: got 1,3, need quantised layers, 2\.\.5"):
        plan.layer_plans(cfg.Quant(keep_first=2, keep_last=2, guide_layers="1,3"), of_depth(8))


def test_weights_activations_and_kv_are_switched_apart():
    (only_kv,) = plan.layer_plans(cfg.Quant(weights=None, acts=None), of_depth(1))
    (only_experts,) = plan.layer_plans(cfg.Quant(kv=None), of_depth(1))
    (only_weights,) = plan.layer_plans(cfg.Quant(acts=None, kv=None, trainer="qat"), of_depth(1))
    assert only_kv == plan.LayerPlan(kind=MOE, weights=None, acts=None, kv=KV, recorded=("k", "v"))
    assert only_experts == plan.LayerPlan(
        kind=MOE, weights=NVFP4, acts=NVFP4, kv=None, recorded=("expert_in",)
    )
    assert only_weights == plan.LayerPlan(kind=MOE, weights=NVFP4, acts=None, kv=None, recorded=())


@pytest.mark.parametrize(
    ("quant", "want"),
    [
        (cfg.Quant(), [(0, 6)]),
        (cfg.Quant(guide_layers="latter_half"), [(0, 3), (3, 6)]),
        (cfg.Quant(keep_first=1, keep_last=1), [(0, 1), (1, 5), (5, 6)]),
        (cfg.Quant(guide_layers="0,2,3"), [(0, 1), (1, 2), (2, 4), (4, 6)]),
    ],
)
def test_segments_are_runs_of_one_plan(quant, want):
    plans = plan.layer_plans(quant, of_depth(6))
    got = plan.side_segments(quant, of_depth(6), "fp4")
    assert [(s.start, s.stop) for s in got] == want
    assert [one for s in got for one in s.layers] == list(plans)
    assert {len(s.period) for s in got} == {1}


def test_a_rollout_records_the_sites_it_quantises():
    assert plan.guidance_spec(cfg.Quant(), of_depth(2)).sites == ("expert_in", "k", "v")
    assert plan.guidance_spec(cfg.Quant(kv=None), of_depth(2)).sites == ("expert_in",)
    assert plan.guidance_spec(cfg.Quant(weights=None, acts=None), of_depth(2)).sites == ("k", "v")
    hidden = cfg.Quant(guide_hidden=True, guide="mantissa", guide_layers="1")
    want = GuidanceSpec(
        kind="mantissa",
        layers=((1,),) * 4,
        sites=("expert_in", "expert_hidden", "k", "v"),
        formats=("nvfp4", "nvfp4", "nvfp4:global_rule=one", "nvfp4:global_rule=one"),
    )
    assert plan.guidance_spec(hidden, of_depth(2)) == want


@pytest.mark.parametrize(("rollout", "trainer"), [("bf16", "bf16"), ("fp4", "bf16")])
def test_nothing_is_recorded_if_a_side_runs_in_high_precision(rollout, trainer):
    quant = cfg.Quant(rollout=rollout, trainer=trainer)
    assert plan.guidance_spec(quant, of_depth(4)) is None
    assert plan.bytes_per_token(None, QWEN) == 0


@pytest.mark.parametrize(
    ("layers", "sites", "full", "compact"),
    [
        (40, {"kv": None}, 46_080, 7_680),  # the expert input, in all MoE layers
        (10, {"weights": None, "acts": None}, 5_760, 960),  # K and V, in the full-attention layers
    ],
)
def test_bytes_per_token_are_the_papers(layers, sites, full, compact):
    for want, guide, where in ((full, "codes", "all"), (compact, "mantissa", "latter_half")):
        quant = cfg.Quant(guide=guide, guide_layers=where, **{**ONE, **sites})
        assert plan.bytes_per_token(plan.guidance_spec(quant, of_depth(layers)), QWEN) == want


def test_the_two_sites_add_up_to_the_papers_50_and_8_kib():
    assert (46_080 + 5_760) / 1024 == 50.625
    assert (7_680 + 960) / 1024 == 8.4375


def test_a_whole_hybrid_model_costs_what_the_paper_says():
    """Qwen3.5-35B-A3B as it is: 40 MoE layers, every fourth of them with full attention."""
    linear = {"linear_key_heads": 16, "linear_value_heads": 32}
    linear |= {"linear_key_dim": 128, "linear_value_dim": 128}
    model = dataclasses.replace(QWEN, full_attention_every=4, shared_ffn=512, **linear)
    full = plan.guidance_spec(cfg.Quant(**ONE), model)
    assert plan.bytes_per_token(full, model) == 46_080 + 5_760
    compact = cfg.Quant(guide="mantissa", guide_layers="latter_half", **ONE)
    assert plan.bytes_per_token(plan.guidance_spec(compact, model), model) == 7_680 + 960
    assert full.layers_of("k") == tuple(range(3, 40, 4))


def test_only_what_a_layer_has_is_quantised():
    """Layers 0 and 1 are linear and dense, 2 linear and MoE, 3 attends: each format where it is."""
    linear = dict.fromkeys(("linear_key_heads", "linear_value_heads"), 1)
    linear |= dict.fromkeys(("linear_key_dim", "linear_value_dim"), 8)
    model = cfg.Model(full_attention_every=4, dense_layers=(0, 1), dense_ffn=48, **linear)
    for mlps, acts in (("experts", [False, False, True, True]), ("all", [True] * 4)):
        plans = plan.layer_plans(cfg.Quant(mlps=mlps, guide_hidden=True), model)
        assert [p.acts is not None for p in plans] == acts
        assert [p.weights is not None for p in plans] == acts
        assert [p.kv is not None for p in plans] == [False, False, False, True]
        inside = ("mlp_in", "mlp_hidden") if mlps == "all" else ()
        moe = ("expert_in", "expert_hidden")
        assert [p.recorded for p in plans] == [inside, inside, moe, (*moe, "k", "v")]
    spec = plan.guidance_spec(cfg.Quant(mlps="all", guide_hidden=True, **ONE), model)
    by_hand = 2 * (64 + 8 + 24 + 3) + 2 * (64 + 8 + 2 * (32 + 4)) + 2 * 2 * (16 + 2)
    assert plan.bytes_per_token(spec, model) == by_hand


def test_bytes_per_token_of_a_model_are_the_sum_over_layers_and_sites():
    """One layer in codes: D/2 + D/16; K and V: J heads of K/2 + K/16; hidden: X rows of F."""
    quant = cfg.Quant(guide_hidden=True, **ONE)
    spec = plan.guidance_spec(quant, of_depth(3))
    expert_in, kv, hidden = 1024 + 128, 2 * 2 * (128 + 16), 8 * (256 + 32)
    assert plan.bytes_per_token(spec, QWEN) == 3 * (expert_in + kv + hidden)
    own = cfg.Quant(guide_hidden=True, acts="nvfp4", kv="nvfp4:global_rule=pow2")
    globals_ = 4 * (1 + 8 + 2 + 2)  # float32: a token, 8 expert rows, 2 heads each of K and V
    assert plan.bytes_per_token(plan.guidance_spec(own, of_depth(3)), QWEN) == 3 * (
        expert_in + kv + hidden + globals_
    )


def test_sites_may_be_recorded_in_layers_of_their_own():
    quant = cfg.Quant(guide_layers="expert_in=0,1,3 kv=1")
    spec = plan.guidance_spec(quant, of_depth(4))
    assert spec.sites == ("expert_in", "k", "v")
    assert spec.layers == ((0, 1, 3), (1,), (1,)) and spec.layers_of("k") == (1,)
    recorded = [p.recorded for p in plan.layer_plans(quant, of_depth(4))]
    assert recorded == [("expert_in",), ("expert_in", "k", "v"), (), ("expert_in",)]
    one = plan.guidance_spec(cfg.Quant(guide_layers="0", kv=None), of_depth(4))
    both = plan.guidance_spec(cfg.Quant(guide_layers="0", weights=None, acts=None), of_depth(4))
    parts = 3 * plan.bytes_per_token(one, QWEN) + plan.bytes_per_token(both, QWEN)
    assert plan.bytes_per_token(spec, QWEN) == parts
