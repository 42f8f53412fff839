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
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"config\.json: got not JSON"):
        config_json.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: got not JSON"):
        config_json.read(tmp_path)


# what a config.json can not leave out; all the rest is left to transformers' defaults
_LEAST = {"vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 40}
MINIMAL = {
    "qwen3_moe": ("Qwen3MoeConfig", {**_LEAST, **_EXPERTS}),
    "qwen3": ("Qwen3Config", {**_LEAST, "intermediate_size": 56}),
    "llama": ("LlamaConfig", {**_LEAST, "intermediate_size": 56}),
    "mixtral": ("MixtralConfig", {**_LEAST, "intermediate_size": 56}),
    "qwen3_next": ("Qwen3NextConfig", {**_LEAST, **_SHARED}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_LEAST, **_SHARED}),
}


def said_by_transformers(hf) -> dict:
    """What our model must say, from the attributes that transformers' modelling code reads."""
    rope = hf.rope_parameters
    out = {
        "rope_theta": rope["rope_theta"],
        "rotary_fraction": rope.get("partial_rotary_factor", 1.0),
        "norm_eps": hf.rms_norm_eps,
        "kv_heads": hf.num_key_value_heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "tie_embeddings": hf.tie_word_embeddings,
        "renormalise_gates": getattr(hf, "norm_topk_prob", True),
        "dense_layers": tuple(getattr(hf, "mlp_only_layers", ())),
        "experts": getattr(hf, "num_local_experts", getattr(hf, "num_experts", 0)),
        "experts_per_token": getattr(hf, "num_experts_per_tok", None),
        "shared_ffn": getattr(hf, "shared_expert_intermediate_size", 0),
        "linear_key_heads": getattr(hf, "linear_num_key_heads", None),
        "linear_value_heads": getattr(hf, "linear_num_value_heads", None),
        "linear_key_dim": getattr(hf, "linear_key_head_dim", None),
        "linear_value_dim": getattr(hf, "linear_value_head_dim", None),
        "conv_width": getattr(hf, "linear_conv_kernel_dim", None),
    }
    if hasattr(hf, "linear_num_key_heads"):
        out["full_attention_every"] = hf.layer_types.index("full_attention") + 1
    return {name: value for name, value in out.items() if value is not None}


def agrees(model, hf):
    wanted = said_by_transformers(hf)
    if model.experts == 0:
        del wanted["renormalise_gates"]
    assert {name: getattr(model, name) for name in wanted} == wanted


@pytest.mark.parametrize("kind", MINIMAL)
def test_what_is_left_out_is_what_transformers_takes(kind):
    name, fields = MINIMAL[kind]
    agrees(
        config_json.model_of({"model_type": kind, **fields}), getattr(transformers, name)(**fields)
    )


@pytest.mark.parametrize(
    ("kind", "key"),
    [  # transformers refuses null elsewhere
        ("qwen3", "num_key_value_heads"),
        ("llama", "num_key_value_heads"),
        ("llama", "head_dim"),
        ("mixtral", "head_dim"),
        *((kind, "rope_parameters") for kind in MINIMAL),
    ],
)
def test_null_is_what_transformers_takes_it_for(kind, key):
    name, fields = MINIMAL[kind]
    fields = {**fields, key: None}
    agrees(
        config_json.model_of({"model_type": kind, **fields}), getattr(transformers, name)(**fields)
    )


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default"}, {"rope_theta": 7.0}, {"type": "default"}]
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", MINIMAL)
def test_rope_given_in_part_is_filled_as_transformers_does(kind, spelling, rope):
    name, fields = MINIMAL[kind]
    config = {**fields, spelling: dict(rope)}
    agrees(
        config_json.model_of({"model_type": kind, **config}), getattr(transformers, name)(**config)
    )


def test_widths_of_what_a_model_does_not_have_may_be_zero(tmp_path):
    config = written("qwen3_moe", tmp_path)
    model = config_json.model_of(config)
    assert config_json.model_of({**config, "intermediate_size": 0}) == model
    with pytest.raises(ValueError, match="intermediate_size: got 0, need a positive"):
        config_json.model_of({**config, "intermediate_size": 0, "mlp_only_layers": [1]})


BAD = ("x", "", 2.5, -1, 0, True, [], [1], ["x"], [[]], {"a": 1}, [None], float("nan"), None)
READ = (
    "text_config", "quantization_config", "rope_parameters", "rope_scaling", "rope_theta",
    "model_type", "num_experts", "num_local_experts", "mlp_only_layers", "decoder_sparse_step",
    "layer_types", "full_attention_interval", "head_dim", "hidden_act", "num_key_value_heads",
    "tie_word_embeddings", "norm_topk_prob", "rms_norm_eps", "partial_rotary_factor",
    "sliding_window", "intermediate_size", "max_position_embeddings",
)  # fmt: skip


def test_any_value_is_read_or_refused_by_file_and_key(kind, tmp_path):
    """Whatever JSON stands at a key: a model, or an error of the house that names it."""
    config = written(kind, tmp_path)
    refused = 0
    for key in sorted({*config, *READ}):
        for bad in BAD:
            for place in ({key: bad}, {"text_config": {key: bad}}):
                try:
                    config_json.model_of({**config, **place}, where="DIR/config.json")
                except ValueError as error:
                    refused += 1
                    said = str(error)
                    assert said.startswith("DIR/config.json: ") and ", need " in said
                    # null is a default, which may not fit the other sizes; 0 experts are dense MLPs
                    default = bad is None and "config.model." in said
                    dense = bad == 0 and "experts" in key and "dense layers" in said
                    assert key in said or default or dense, (key, bad)
    assert refused > 200


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor", "factor", "rope_type"])
@pytest.mark.parametrize("bad", ["x", [1], {"a": 1}, -1, True, float("inf")])
def test_any_value_in_rope_is_refused_by_key(key, bad, tmp_path):
    config = written("llama", tmp_path)
    rope = {**config["rope_parameters"], key: bad}
    with pytest.raises(ValueError, match=f"rope_parameters.*{'a' if bad == {'a': 1} else key}"):
        config_json.model_of({**config, "rope_parameters": rope})


@pytest.mark.parametrize("bad", ["x", [], [1], 3, None])
def test_older_quantisation_file_is_read_or_refused_by_name(bad, tmp_path):
    written("qwen3", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": bad}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization: got"):
        config_json.read(tmp_path)


@pytest.mark.parametrize("bad", ["fp8", [1], 3, {"quant_algo": ["NVFP4"]}, {}])
def test_other_quantisation_is_none_of_ours(bad):
    assert not config_json.is_nvfp4({"quantization_config": bad})
    assert not config_json.is_nvfp4({"text_config": bad, "quantization_config": None})
