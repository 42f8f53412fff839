"""The policy's audit against what is known of the model, and the two sides against each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import weight_sync
from trace_jax.models import transformer
from trace_jax.qat.policy_recipe import trainer_audit
from trace_jax.rollout.audit import sampler_audit
from trace_jax.types import Mean

MODEL = cfg.Model(
    width=40, layers=3, heads=2, kv_heads=1, head_dim=24, experts=4, expert_ffn=20
)  # no width is a whole number of blocks
SITES = ("moe/expert_in", "moe/expert_hidden", "attention/k_cache", "attention/v_cache")
MODES = {
    "default": cfg.Quant(),
    "first layer kept": cfg.Quant(keep_first=1),
    "weights alone": cfg.Quant(acts=None, kv=None, trainer="qat"),
    "no weights": cfg.Quant(weights=None),
    "mxfp4": cfg.Quant(weights="mxfp4", acts="mxfp8", kv="mxfp4"),
    "hidden guided": cfg.Quant(guide_hidden=True, guide="mantissa", guide_layers="latter_half"),
}


@pytest.fixture(scope="module")
def params():
    return jax.eval_shape(lambda: transformer.init(MODEL, 16, jax.random.key(0)))


def packed(quant, params):
    """Shapes of what the sampler would hold."""
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), params)
    return weight_sync.make_sync(MODEL, quant)(zeros, 0).params


def test_the_audit_lists_every_parameter_and_site_of_every_layer_once(params):
    audit = trainer_audit(MODEL, cfg.Quant(keep_last=1), params)
    per_layer = len(jax.tree.leaves(params["layers"]))
    outside = len(jax.tree.leaves(params)) - per_layer
    assert len(audit.rows) == 3 * (per_layer + len(SITES)) + outside
    want = {f"layers/{i}/{site}" for i in range(2) for site in SITES}
    assert set(audit.sites) == want
    assert set(audit.weights) == {
        f"layers/{i}/moe/{name}" for i in range(2) for name in ("gate_up", "down")
    }
    why = {row.path: row.why for row in audit.rows if row.format is None}
    assert why["layers/2/moe/gate_up"] == "layer kept as it is"
    assert why["layers/0/moe/router"] == "no rule"


@pytest.mark.parametrize("mode", MODES)
def test_trainer_and_sampler_quantise_the_same(params, mode):
    quant = MODES[mode]
    trainer = trainer_audit(MODEL, quant, params)
    sampler = sampler_audit(MODEL, quant, packed(quant, params))
    assert trainer.diff(sampler) == []
    assert trainer.weights or trainer.sites


def test_only_recorded_layers_and_sites_are_listed_as_guided(params):
    audit = trainer_audit(MODEL, MODES["hidden guided"], params)
    guided = {row.path for row in audit.rows if row.guide == "mantissa"}
    assert guided == {f"layers/{i}/{site}" for i in (1, 2) for site in SITES}


OTHER_SIDES = {
    "another format": (cfg.Quant(acts="mxfp4"), "layers/0/moe/expert_hidden: tensor nvfp4"),
    "another option": (cfg.Quant(kv="nvfp4"), "layers/0/attention/k_cache: tensor nvfp4:global"),
    "a layer kept": (cfg.Quant(keep_first=1), "layers/0/attention/k_cache: tensor nvfp4"),
    "weights in BF16": (cfg.Quant(weights=None), "layers/0/moe/down: weight nvfp4"),
}


@pytest.mark.parametrize("case", OTHER_SIDES)
def test_sides_that_differ_are_refused_by_name(params, case):
    """F15, F18: a rollout in other formats, or one that silently left something in BF16."""
    quant, start = OTHER_SIDES[case]
    trainer = trainer_audit(MODEL, cfg.Quant(), params)
    sampler = sampler_audit(MODEL, quant, packed(quant, params))
    with pytest.raises(ValueError, match=f"qat audits of the two sides: got {start}"):
        trainer.require_same(sampler)


def test_weights_that_are_not_really_packed_are_seen_whatever_the_configuration_says(params):
    quant = cfg.Quant()
    held = packed(quant, params)
    (stack,) = held["segments"]
    plain = jnp.zeros((3, 4, 40, 20), jnp.bfloat16)
    stack = {**stack, "moe": {**stack["moe"], "down": plain}}
    sampler = sampler_audit(MODEL, quant, {**held, "segments": (stack,)})
    found = trainer_audit(MODEL, quant, params).diff(sampler)
    assert len(found) == 3 and all("/moe/down: weight nvfp4" in line for line in found)


def test_a_site_without_codes_fails_the_check_by_name(params):
    """F16: QAT looks enabled and is not."""
    audit = trainer_audit(MODEL, cfg.Quant(), params)
    one = Mean(total=jnp.float32(3), count=jnp.float32(4))
    counts = dict.fromkeys(audit.sites, one)
    audit.check(counts)
    dead = "layers/1/moe/expert_in"
    counts[dead] = dataclasses.replace(one, total=jnp.float32(0))
    with pytest.raises(ValueError, match=f"sites without codes: got .*{dead}"):
        audit.check(counts)
    del counts[dead]
    with pytest.raises(ValueError, match=f"sites without counts: got .*{dead}"):
        audit.check(counts)


def test_a_trainer_in_bf16_has_an_audit_of_nothing(params):
    audit = trainer_audit(MODEL, cfg.Quant(trainer="bf16"), params)
    assert audit.weights == audit.sites == ()
    assert {row.why for row in audit.rows} == {'quant.trainer="bf16"'}
    assert np.all([row.format is None for row in audit.rows])


HYBRID = dataclasses.replace(
    MODEL,
    layers=6,
    full_attention_every=3,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_key_dim=8,
    linear_value_dim=8,
    dense_layers=(0, 3),
    dense_ffn=20,
    shared_ffn=12,
)


def test_the_audit_of_a_mixed_model_goes_by_absolute_layers_and_leaves_the_rest_plain():
    shapes = jax.eval_shape(lambda: transformer.init(HYBRID, 16, jax.random.key(0)))
    audit = trainer_audit(HYBRID, cfg.Quant(mlps="all", keep_first=1, keep_last=1), shapes)
    ffn = {1: "moe", 2: "moe", 3: "mlp", 4: "moe"}  # layers 0 and 5 are kept
    assert set(audit.weights) == {
        f"layers/{i}/{name}/{leaf}" for i, name in ffn.items() for leaf in ("gate_up", "down")
    }
    inputs = {
        "moe": ("moe/expert_in", "moe/expert_hidden"),
        "mlp": ("mlp/mlp_in", "mlp/mlp_hidden"),
    }
    sites = {f"layers/{i}/{site}" for i, name in ffn.items() for site in inputs[name]}
    assert set(audit.sites) == sites | {f"layers/2/attention/{kv}_cache" for kv in "kv"}
    why = {row.path: row.why for row in audit.rows if row.format is None}
    assert why["layers/0/mlp/down"] == why["layers/5/moe/down"] == "layer kept as it is"
    for plain in ("layers/1/moe/shared_down", "layers/4/linear/qkv", "layers/2/attention/q"):
        assert why[plain] == "no rule"
    held = weight_sync.make_sync(HYBRID, cfg.Quant(mlps="all", keep_first=1, keep_last=1))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    quant = cfg.Quant(mlps="all", keep_first=1, keep_last=1)
    assert audit.diff(sampler_audit(HYBRID, quant, held(zeros, 0).params)) == []


def test_a_kept_component_needs_no_rule():
    """The only dense MLP is in the layer kept: a rule for it would match nothing."""
    model = dataclasses.replace(MODEL, dense_layers=(0,), dense_ffn=20)
    shapes = jax.eval_shape(lambda: transformer.init(model, 16, jax.random.key(0)))
    audit = trainer_audit(model, cfg.Quant(mlps="all", keep_first=1), shapes)
    assert not any("/mlp/" in path for path in (*audit.weights, *audit.sites))
