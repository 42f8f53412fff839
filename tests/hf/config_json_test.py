"""config.json -> Model -> config.json, judged by transformers' own reading of the file."""

import dataclasses
import json

import pytest

from tests.hf import checkpoints
from trace_jax import config as cfg
from trace_jax.hf import config_json

transformers = pytest.importorskip("transformers")

KINDS = tuple(checkpoints.CONFIGS)


def written(kind, path):
    name, fields = checkpoints.CONFIGS[kind]
    getattr(transformers, name)(**fields).save_pretrained(path)
    return json.loads((path / "config.json").read_text())


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_model_has_the_fields_that_transformers_has(kind, tmp_path):
    model = config_json.model_of(written(kind, tmp_path), "float32")
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (model.width, model.layers, model.heads) == (32, 4, 4)
    assert (model.kv_heads, model.head_dim, model.vocab_size) == (2, 16, 96)
    assert model.compute_dtype == "float32"
    assert model.norm_eps == hf.rms_norm_eps
    assert model.rope_theta == hf.rope_parameters["rope_theta"] == 5_000.0
    assert model.tie_embeddings == hf.tie_word_embeddings == (kind in ("qwen3", "llama"))
    hybrid = kind in ("qwen3_next", "qwen3_5_moe")
    assert model.rotary_fraction == (0.25 if hybrid else 1.0)
    assert model.zero_centred_norm == model.gated_attention == hybrid
    assert model.full_attention_every == (4 if hybrid else 1)
    assert model.qk_norm == (kind not in ("llama", "mixtral"))
    assert model.dense_layers == ((1,) if kind == "qwen3_moe_mixed" else ())
    assert model.renormalise_gates == (kind != "qwen3_moe_mixed")
    assert model.shared_ffn == (40 if hybrid else 0)
    assert model.experts == (4 if kind in checkpoints.EXPERTS else 0)
    llama3 = (8.0, 1.0, 4.0, 64) if kind == "llama" else None
    assert model.rope_llama3 == llama3


def test_written_config_is_read_the_same_by_us_and_by_transformers(kind, tmp_path):
    model = config_json.model_of(written(kind, tmp_path))
    out = config_json.config_of(model, context=128)
    assert config_json.model_of(out) == model
    original = transformers.AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(out))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(original)
    changes_logits = {
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
        "hidden_act", "layer_types", "num_experts", "num_experts_per_tok", "norm_topk_prob",
        "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step",
        "shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
        "max_position_embeddings", "attention_bias",
    }  # fmt: skip
    for name in changes_logits:
        if hasattr(original, name):
            assert getattr(again, name) == getattr(original, name), name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"num_experts": 4}, {"num_local_experts": 4}),
        ({"rope_theta": 7.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
        (
            {"full_attention_interval": 2},
            {"layer_types": ["linear_attention", "full_attention"] * 2},
        ),
        ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ({"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2}),
        ({}, {"dtype": "bfloat16", "bos_token_id": 7, "attention_dropout": 0.1}),
        ({}, {"sliding_window": 4096, "use_sliding_window": False}),
    ],
)
def test_both_spellings_mean_the_same(old, new):
    base = {
        "model_type": "qwen3_next", **checkpoints._SHAPE, **checkpoints._HYBRID,
        "intermediate_size": 56,
    }  # fmt: skip
    for key in {*old, *new} & {"num_experts", "rope_theta", "partial_rotary_factor"}:
        del base[key]
    if "rope_parameters" in new:
        base.pop("rope_theta", None)
        old = {"rope_theta": 10_000.0, **old}
    first = config_json.model_of({**base, **old})
    second = config_json.model_of({**base, **new})
    assert first == second


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias: got True"),
        ("llama", {"mlp_bias": True}, "mlp_bias: got True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: got 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "factor: got None"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window: got True"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "got 3 layers"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "got 'yarn'"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "different ones"),
        ("qwen3", {"model_type": "mamba"}, "model_type: got 'mamba'"),
        ("qwen3", {"model_type": None}, "model_type: got None"),
        ("qwen3", {"hidden_size": None}, "hidden_size: got None"),
        ("qwen3", {"num_hidden_layers": "4"}, "num_hidden_layers: got '4'"),
        ("qwen3", {"num_attention_heads": 3}, "heads: got 3"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: got"),
        ("qwen3_moe", {"num_experts": 8}, r"num_experts / num_local_experts: got \[4, 8\]"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate: got False"),
        (
            "qwen3_next",
            {"layer_types": ["full_attention", "linear_attention"] * 2},
            "got another order in layers",
        ),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layer_types: got none"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob: got False"),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, "dense layers"),
        (
            "qwen3_5_moe",
            {"text_config": {"tie_word_embeddings": True}},
            "tie_word_embeddings: got true and false",
        ),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(kind, change, said, tmp_path):
    config = written(kind, tmp_path)
    config_json.model_of(config)
    with pytest.raises(ValueError, match=said):
        config_json.model_of({**config, **change})


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("llama", {"qk_norm": True}, "qk_norm=True"),
        ("qwen3", {"family": "llama"}, "qk_norm=True"),
        ("qwen3_moe", {"shared_ffn": 8}, "shared_ffn=8"),
        ("qwen3", {"rotary_fraction": 0.5}, "partial_rotary_factor: got 0.5"),
        ("qwen3_5_moe", {"renormalise_gates": False}, "norm_topk_prob: got False"),
        ("qwen3_next", {"zero_centred_norm": False}, "zero_centred_norm=False"),
    ],
)
def test_model_that_no_family_computes_is_refused_by_field(kind, change, said, tmp_path):
    model = config_json.model_of(written(kind, tmp_path))
    with pytest.raises(ValueError, match=said):
        config_json.config_of(dataclasses.replace(model, **change))


def test_config_needs_a_vocabulary():
    with pytest.raises(ValueError, match="vocab_size: got None"):
        config_json.config_of(cfg.Model())


def test_read_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: got no such file"):
        config_json.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: got not JSON"):
        config_json.read(tmp_path)
