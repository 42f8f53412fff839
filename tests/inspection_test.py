"""Sizes from shapes; oracles: the arrays that the sampler really makes, and counts by hand."""

import dataclasses
import json

import jax
import pytest

from trace_jax import config as cfg
from trace_jax import inspection, inspection_text, weight_sync
from trace_jax.models import known, transformer

MOE = cfg.Model(vocab_size=96, width=64, layers=2, heads=2, kv_heads=1, head_dim=32, experts=4)
HYBRID = cfg.Model(
    family="qwen3_5_moe",
    vocab_size=96,
    width=64,
    layers=4,
    heads=2,
    kv_heads=1,
    head_dim=32,
    gated_attention=True,
    zero_centred_norm=True,
    rotary_fraction=0.25,
    full_attention_every=4,
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=8,
    linear_value_dim=12,
    experts=4,
    shared_ffn=32,
    tie_embeddings=False,
)
DENSE = dataclasses.replace(MOE, family="qwen3", experts=0, dense_ffn=48)


@pytest.mark.parametrize("model", [MOE, HYBRID, DENSE], ids=["moe", "hybrid", "dense"])
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_sizes_are_those_of_the_arrays_that_the_sampler_makes(model, weights):
    quant = cfg.Quant(weights=weights, mlps="experts" if model.experts else "all")
    found = inspection.inspect("x", model, quant)
    params = transformer.init(model, 96, jax.random.key(0))
    assert sum(found.parameters.values()) == sum(a.size for a in jax.tree.leaves(params))
    assert sum(found.sampler_bytes.values()) == weight_sync.make_sync(model, quant)(params, 0).bytes
    assert found.trainer_bytes == sum(a.nbytes for a in jax.tree.leaves(params))
    text = inspection_text.text(found)
    assert all(part in text for part in found.parameters)
    assert json.loads(found.to_json())["audit"]


def test_bytes_of_cache_and_state_by_hand():
    found = inspection.inspect("x", HYBRID, cfg.Quant())
    # one layer attends: k and v of one head, 16 bytes of codes and two scales
    assert (found.kv_token_bytes, found.kv_bf16_token_bytes) == (2 * (16 + 2), 2 * 32 * 2)
    channels, memory = 2 * 2 * 8 + 4 * 12, 4 * 8 * 12
    assert found.state_bytes == 3 * (channels * 3 * 2 + memory * 4)
    assert found.layers == {"linear + moe": [0, 1, 2], "attention + moe": [3]}
    quarter = found.parameters["experts"] * HYBRID.experts_per_token // HYBRID.experts
    assert found.active["experts"] == quarter


@pytest.mark.parametrize(
    ("name", "total", "active"), [("Qwen3-30B-A3B", 30.5e9, 3.3e9), ("Qwen3.5-35B-A3B", 35e9, 3e9)]
)
def test_known_models_have_the_parameters_of_their_names(name, total, active):
    found = inspection.inspect(name, known.get(name), cfg.Quant())
    assert sum(found.parameters.values()) == pytest.approx(total, rel=0.02)
    assert sum(found.active.values()) == pytest.approx(active, rel=0.16)
