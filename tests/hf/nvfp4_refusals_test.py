"""NVFP4 exports: what else is refused by name, and what only servers read."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import trace_jax
from tests.hf.nvfp4_test import MODELS, QUANTS, sampler, tensors
from trace_jax import weight_sync
from trace_jax.models import transformer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("nvfp4") / "out"
    model, quant = MODELS["qwen3_moe"], QUANTS["nvfp4"]
    trace_jax.save_nvfp4(path, model, quant, sampler(model, quant)[1])
    return path


@pytest.fixture
def own_section(exported, tmp_path):
    """A copy of the export, and a function that changes its own section."""
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "trace_jax_quant.json"

    def change(new, **quant):
        kept = json.loads(file.read_text())
        kept = {**kept, "quant": {**kept["quant"], **quant}, **new}
        file.write_text(json.dumps(kept))
        return tmp_path

    return change


@pytest.mark.parametrize(
    "quant",
    [
        {"weights": "nvfp4:convention=te"},
        {"weights": "nvfp4:convention=vllm"},
        {"weights": "mxfp4"},
        {"weights": "hif4"},
        {"weights": None},
        {"weights": "int3"},
        {"weights": ["nvfp4"]},
        {"acts": "mxfp8"},
        {"kv": "nvfp4"},
        {"kv": "mxfp4"},
        {"keep_last": 1},
        {"keep_first": 3},
        {"keep_first": "1"},
        {"rollout": "bf16", "trainer": "bf16"},
        {"mlps": "none"},
        {"surprise": 1},
    ],
)
def test_own_section_that_would_decode_otherwise_is_refused_by_file(quant, own_section):
    with pytest.raises(ValueError, match=r"trace_jax_quant\.json: .*need"):
        trace_jax.load_quantised(own_section({}, **quant))


@pytest.mark.parametrize(
    "new", [{"compute_dtype": "int8"}, {"compute_dtype": 3}, {"quant": None}, {"quant": [1]}]
)
def test_own_section_that_is_none_is_refused_by_file(new, own_section):
    with pytest.raises(ValueError, match=r"trace_jax_quant\.json: .*need"):
        trace_jax.load_quantised(own_section(new))


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 200_000, "{}"])
def test_own_section_that_is_damaged_is_refused_by_file(text, own_section):
    path = own_section({})
    (path / "trace_jax_quant.json").write_text(text)
    with pytest.raises(ValueError, match=r"trace_jax_quant\.json: .*need"):
        trace_jax.load_quantised(path)


def test_scale_of_the_kv_cache_is_for_servers_alone(tmp_path):
    model, quant = MODELS["qwen3_moe"], QUANTS["nvfp4"]
    weights = sampler(model, quant)[1]
    trace_jax.save_nvfp4(tmp_path / "out", model, quant, weights, kv_scale=1 / 6)
    found = tensors(tmp_path / "out")
    scales = [n for n in found if n.endswith((".k_scale", ".v_scale"))]
    assert len(scales) == 2 * model.layers
    assert all(found[name] == np.float32(1 / 6) for name in scales)
    kept = json.loads((tmp_path / "out" / "trace_jax_quant.json").read_text())
    assert kept["kv_scale"] == 1 / 6
    again_model, again_quant, again = trace_jax.load_quantised(tmp_path / "out")
    assert (again_model, again_quant) == (model, quant)
    jax.tree.map(np.testing.assert_array_equal, again.params, weights.params)
    for bad, kv in (
        (0.0, quant.kv),
        (float("nan"), quant.kv),
        (float("inf"), quant.kv),
        (0.5, None),
    ):
        with pytest.raises(ValueError, match="kv_scale: got"):
            changed = dataclasses.replace(quant, kv=kv)
            trace_jax.save_nvfp4(tmp_path / "no", model, changed, weights, kv_scale=bad)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("leaf", "index", "name"),
    [
        (("layers", "moe", "down"), (1, 2, 3, 4), "model.layers.1.mlp.experts.2.down_proj.weight"),
        (
            ("layers", "moe", "gate_up"),
            (0, 1, 70, 0),
            "model.layers.0.mlp.experts.1.up_proj.weight",
        ),
        (("layers", "attention", "q"), (2, 0, 0), "model.layers.2.self_attn.q_proj.weight"),
        (("final_norm",), (5,), "model.norm.weight"),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(leaf, index, name, bad, tmp_path):
    model, quant = MODELS["qwen3_moe"], QUANTS["nvfp4"]
    model = dataclasses.replace(model, expert_ffn=64)
    params = transformer.init(model, 1, jax.random.key(0))
    inner = params
    for key in leaf[:-1]:
        inner[key] = dict(inner[key])
        inner = inner[key]
    inner[leaf[-1]] = inner[leaf[-1]].at[index].set(bad)
    given: list = [params]
    if np.isnan(bad):
        given.append(weight_sync.make_sync(model, quant)(params, 0))
    for weights in given:
        with pytest.raises(ValueError, match="NaN or infinity in ") as error:
            trace_jax.save_nvfp4(tmp_path / "out", model, quant, weights)
        assert name in str(error.value)
        assert str(error.value).count("model.") == 1
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("scheme", "keep", "kv", "said"),
    [
        ("NVFP4", False, "nvfp4:global_rule=one", None),
        ({"num_bits": 4, "type": "float"}, False, "nvfp4:global_rule=one", None),
        ({"num_bits": 8, "type": "float"}, False, None, "is not NVFP4"),
        ("FP8", False, None, "is not NVFP4"),
        (None, False, None, None),
        ("NVFP4", True, None, "some are in high precision"),
    ],
)
def test_kv_scheme_that_is_not_computed_is_left_out_and_said(
    scheme, keep, kv, said, tmp_path, caplog
):
    model, quant = MODELS["qwen3_moe"], QUANTS["kept" if keep else "nvfp4"]
    trace_jax.save_nvfp4(tmp_path / "out", model, quant, sampler(model, quant)[1])
    (tmp_path / "out" / "trace_jax_quant.json").unlink()
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    file.write_text(json.dumps(config))
    with caplog.at_level("WARNING", logger="absl"):
        assert trace_jax.load_quantised(tmp_path / "out")[1].kv == kv
    lines = [r.getMessage() for r in caplog.records if "kv_cache_scheme" in r.getMessage()]
    assert len(lines) == (said is not None)
    assert said is None or (said in lines[0] and str(file) in lines[0])


def test_quantisation_section_of_the_text_model_is_read(exported, tmp_path):
    for file in exported.iterdir():
        if file.name not in ("trace_jax_quant.json", "hf_quant_config.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": json.loads(file.read_text())}))
    weights = trace_jax.load_quantised(tmp_path)[2]
    wanted = trace_jax.load_quantised(exported)[2]
    jax.tree.map(np.testing.assert_array_equal, weights.params, wanted.params)
