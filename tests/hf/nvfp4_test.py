"""NVFP4 export: decoded by other code it is the sampler's weights; reloaded, the same codes."""

import dataclasses
import fnmatch
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import trace_jax
from trace_jax import config as cfg
from trace_jax import formats, weight_sync
from trace_jax.models import transformer
from trace_jax.qat import plan as qat_plan

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402  (numpy's has no FP8)

_THROUGH = {  # torch's dtype, one of the same size that numpy has too, ml_dtypes'
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}
_SHAPE = {"width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocab_size": 80}
_HYBRID = {
    "layers": 4,
    "full_attention_every": 4,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_dim": 8,
    "linear_value_dim": 8,
    "zero_centred_norm": True,
    "gated_attention": True,
    "rotary_fraction": 0.25,
    "shared_ffn": 64,
}
MODELS = {
    "qwen3_moe": cfg.Model(**_SHAPE, layers=3, experts=4, tie_embeddings=False),
    "mixed": cfg.Model(**_SHAPE, layers=3, experts=4, dense_ffn=128, dense_layers=(1,)),
    "qwen3": cfg.Model(family="qwen3", **_SHAPE, layers=2, experts=0, dense_ffn=128),
    "qwen3_next": cfg.Model(family="qwen3_next", **_SHAPE, **_HYBRID),
    "qwen3_5_moe": cfg.Model(family="qwen3_5_moe", **_SHAPE, **_HYBRID),
}
QUANTS = {
    "nvfp4": cfg.Quant(),
    "kept": cfg.Quant(keep_first=1, kv=None, guide_layers="all"),
    "kept_last": cfg.Quant(mlps="all", keep_last=1, kv=None),
    "4over6": cfg.Quant(weights="4over6", acts="4over6"),
    "tiles": cfg.Quant(weights="nvfp4:block_shape=16x16"),
    "modelopt": cfg.Quant(weights="nvfp4:convention=modelopt"),
    "one": cfg.Quant(weights="nvfp4:global_rule=one"),
    "weights_only": cfg.Quant(acts=None, kv=None, trainer="qat"),
    "mlps": cfg.Quant(mlps="all"),
}
_FAST = [
    ("qwen3_moe", "4over6"),
    ("qwen3_moe", "tiles"),
    ("mixed", "kept_last"),
    ("qwen3", "mlps"),
    ("qwen3_next", "nvfp4"),
]
_SLOW = [
    *(("qwen3_moe", name) for name in QUANTS if name not in ("4over6", "tiles")),
    *(("mixed", "mlps"), ("mixed", "nvfp4"), ("qwen3_5_moe", "kept")),
]
CASES = [*_FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOW)]


def sampler(model, quant, seed=0):
    params = transformer.init(model, 1, jax.random.key(seed))
    return params, weight_sync.make_sync(model, quant)(params, 0)


def decode(found, weight):
    """A matrix by ml_dtypes alone, in float64 (products of 2 + 4 + 24 bits are exact in it)."""
    codes = found[weight]
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    values = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scale = found[weight + "_scale"].astype(np.float64)
    step = (scale * np.float64(found[weight + "_scale_2"])).astype(np.float32)  # one rounding
    step = np.repeat(step.astype(np.float64), 16, axis=1)
    return (values * step).astype(np.float32)


def tensors(path):
    """Every tensor of a directory, read by safetensors' own library."""
    out = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, value in load_file(file).items():
            same, dtype = _THROUGH.get(value.dtype, (value.dtype, None))
            array = value.view(same).numpy()
            out[name] = array if dtype is None else array.view(dtype)
    return out


def write(path, found):
    """The inverse, as one file."""
    out = {}
    for name, value in found.items():
        value = np.ascontiguousarray(value).reshape(np.shape(value))
        kind = next((k for k, (_, dtype) in _THROUGH.items() if value.dtype == dtype), None)
        integer = value.view({1: np.uint8, 2: np.int16}[value.itemsize]) if kind else value
        tensor = torch.from_numpy(integer)
        out[name] = tensor if kind is None else tensor.view(kind)
    save_file(out, path / "model.safetensors")


def sampler_values(model, quant, weights, layer, component, name):
    """What the sampler multiplies with: the format's own decoding of what it holds."""
    segments = qat_plan.side_segments(quant, model, quant.rollout)
    tree = weight_sync.layer(weights.params, segments, layer)[component][name]
    format = formats.get(quant.weights)
    codes = format.unpack_codes(tree["codes"])
    global_ = None if format.global_scale(jnp.ones(())) is None else tree["global"]
    return np.asarray(format.dequantize_rows(codes, tree["scales"], global_))


@pytest.mark.parametrize(("kind", "chosen"), CASES)
def test_export_decodes_to_what_the_sampler_holds_and_reloads_the_same(kind, chosen, tmp_path):
    model, quant = MODELS[kind], QUANTS[chosen]
    _, weights = sampler(model, quant)
    path = tmp_path / "out"
    trace_jax.save_nvfp4(path, model, quant, weights)
    found = tensors(path)
    # an independent decoder gives the sampler's values, bit for bit
    checked = 0
    for layer in range(model.layers):
        at = f"model.layers.{layer}.mlp."
        dense = model.experts == 0 or layer in model.dense_layers
        kept = not quant.keep_first <= layer < model.layers - quant.keep_last
        if kept or (dense and quant.mlps != "all"):
            plain = f"{at}down_proj.weight" if dense else f"{at}experts.0.down_proj.weight"
            assert found[plain].dtype == ml_dtypes.bfloat16
            continue
        component = "mlp" if dense else "moe"
        both = sampler_values(model, quant, weights, layer, component, "gate_up")
        down = sampler_values(model, quant, weights, layer, component, "down")
        for e in (None,) if dense else range(model.experts):
            inner = at if e is None else f"{at}experts.{e}."
            gate, up = (decode(found, f"{inner}{n}_proj.weight") for n in ("gate", "up"))
            wanted = both if e is None else both[e]
            np.testing.assert_array_equal(np.concatenate([gate, up]), wanted)
            wanted = down if e is None else down[e]
            np.testing.assert_array_equal(decode(found, f"{inner}down_proj.weight"), wanted)
            assert (
                found[f"{inner}gate_proj.weight_scale_2"] == found[f"{inner}up_proj.weight_scale_2"]
            )
            checked += 1
    assert checked
    # our own reading gives back every leaf, bit for bit
    again_model, again_quant, again = trace_jax.load_quantised(path)
    assert again_model == model and again_quant == quant
    assert jax.tree.structure(again.params) == jax.tree.structure(weights.params)
    for one, two in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(weights.params), strict=True
    ):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert again.bytes == weights.bytes


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_load_dequantises_exactly(kind, tmp_path):
    model, quant = MODELS[kind], QUANTS["nvfp4"]
    _, weights = sampler(model, quant)
    trace_jax.save_nvfp4(tmp_path / "out", model, quant, weights)
    plain, params = trace_jax.load(tmp_path / "out")
    assert plain == dataclasses.replace(model, compute_dtype="float32")
    for layer in range(model.layers):
        for name in ("gate_up", "down"):
            np.testing.assert_array_equal(
                params["layers"]["moe"][name][layer],
                sampler_values(model, quant, weights, layer, "moe", name),
            )
    segments = qat_plan.side_segments(quant, model, quant.rollout)
    for layer in range(model.layers):  # what is not packed is exact too
        tree = weight_sync.layer(weights.params, segments, layer)
        router = params["layers"]["moe"]["router"][layer]
        np.testing.assert_array_equal(router, tree["moe"]["router"])


def test_master_weights_are_quantised_as_weight_sync_does(tmp_path):
    model, quant = MODELS["qwen3_moe"], QUANTS["nvfp4"]
    params, weights = sampler(model, quant)
    trace_jax.save_nvfp4(tmp_path / "a", model, quant, params)
    trace_jax.save_nvfp4(tmp_path / "b", model, quant, weights)
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(("kind", "chosen"), CASES)
def test_tensors_have_the_layout_that_servers_read(kind, chosen, tmp_path):
    model, quant = MODELS[kind], QUANTS[chosen]
    trace_jax.save_nvfp4(tmp_path / "out", model, quant, sampler(model, quant)[1])
    found = tensors(tmp_path / "out")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    legacy = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    algorithm = "W4A16_NVFP4" if quant.acts is None else "NVFP4"
    assert section["quant_algo"] == legacy["quant_algo"] == algorithm
    assert section["group_size"] == legacy["group_size"] == 16
    assert section["ignore"] == legacy["exclude_modules"]
    kv = None if quant.kv is None else "NVFP4"
    assert section.get("kv_cache_scheme") == legacy["kv_cache_quant_algo"] == kv
    packed = 0
    for name, value in found.items():
        if not name.endswith(".weight") or value.ndim != 2:
            continue
        module = name.removesuffix(".weight")
        # as a server does: whole names against shell patterns
        excluded = any(fnmatch.fnmatchcase(module, pattern) for pattern in section["ignore"])
        if value.dtype == np.uint8:
            assert not excluded, module
            scale = found[f"{name}_scale"]
            assert scale.dtype == ml_dtypes.float8_e4m3fn
            assert scale.shape == (value.shape[0], value.shape[1] // 8)
            assert found[f"{name}_scale_2"].dtype == np.float32
            assert found[f"{name}_scale_2"].shape == ()
            packed += 1
        else:
            assert excluded or module.endswith("embed_tokens"), module
    assert packed
    attending = [i for i in range(model.layers) if (i + 1) % model.full_attention_every == 0]
    scales = {
        f"model.layers.{i}.self_attn.{x}_proj.{x}_scale" for i in attending for x in ("k", "v")
    }
    assert {n for n in found if n.endswith(("k_scale", "v_scale"))} == (
        scales if quant.kv else set()
    )
    assert all(found[name] == 1 for name in found.keys() & scales)


def test_input_scales_of_a_calibration_are_written_and_left_out_when_read(tmp_path):
    model, quant = MODELS["qwen3_moe"], QUANTS["nvfp4"]
    weights = sampler(model, quant)[1]
    name = "model.layers.0.mlp.experts.0.down_proj"
    trace_jax.save_nvfp4(tmp_path / "out", model, quant, weights, input_scales={name: 0.125})
    assert tensors(tmp_path / "out")[f"{name}.input_scale"] == np.float32(0.125)
    trace_jax.load_quantised(tmp_path / "out")
    for scales, said in (
        ({"model.layers.0.self_attn.q_proj": 1.0}, "self_attn.q_proj"),
        ({name: 0.0}, "down_proj, need finite"),
    ):
        with pytest.raises(ValueError, match=f"input_scales: got .*{said}"):
            trace_jax.save_nvfp4(tmp_path / "no", model, quant, weights, input_scales=scales)


def refused(tmp_path, model, quant, **options):
    with pytest.raises(ValueError) as error:
        trace_jax.save_nvfp4(tmp_path / "no", model, quant, sampler(model, quant)[1], **options)
    assert not (tmp_path / "no").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": "mxfp4"}, "quant.weights: got mxfp4, need nvfp4"),
        ({"weights": "hif4"}, "quant.weights: got hif4, need nvfp4"),
        ({"weights": "nvfp4:convention=vllm"}, "divides by its global scale"),
        ({"weights": "nvfp4:convention=te"}, "divides by its global scale"),
        ({"weights": None}, "quant.weights: got None"),
        ({"acts": "mxfp8"}, "quant.acts: got mxfp8"),
        ({"kv": "nvfp4"}, "kv=nvfp4:global_rule=one"),
        ({"kv": "mxfp4"}, "quant.kv: got mxfp4"),
        ({"keep_last": 1}, r"layers \[2\] in high precision"),
        ({"rollout": "bf16", "trainer": "bf16"}, "quant.rollout: got bf16"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused_by_name(change, said, tmp_path):
    model, quant = MODELS["qwen3_moe"], dataclasses.replace(cfg.Quant(), **change)
    said_by_us = refused(tmp_path, model, quant)
    assert re.search(said, said_by_us), said_by_us


def test_width_that_servers_cannot_tile_is_refused_by_name(tmp_path):
    model = dataclasses.replace(MODELS["qwen3_moe"], expert_ffn=464)
    said = refused(tmp_path, model, cfg.Quant())
    assert "mlp.experts.0.gate_proj.weight: got a width of 464, need multiples of 64" in said
    # 464 = 29 * 16: whole blocks, for a server that asks for no more
    weights = sampler(model, cfg.Quant())[1]
    trace_jax.save_nvfp4(tmp_path / "out", model, cfg.Quant(), weights, multiple=16)
    again = trace_jax.load_quantised(tmp_path / "out")[2]
    jax.tree.map(np.testing.assert_array_equal, again.params, weights.params)
    ragged = dataclasses.replace(model, expert_ffn=40)
    assert "a width of 40, need multiples of 16" in refused(
        tmp_path, ragged, cfg.Quant(), multiple=16
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("nvfp4") / "out"
    model, quant = MODELS["qwen3_moe"], QUANTS["nvfp4"]
    trace_jax.save_nvfp4(path, model, quant, sampler(model, quant)[1])
    return path


W = "model.layers.1.mlp.experts.2.up_proj.weight"


def _drop(name):
    return lambda found: found.pop(name)


def _set(name, value):
    return lambda found: found.__setitem__(name, value(found[name]))


def _two_globals(found):
    found[f"{W}_scale_2"] = found[f"{W}_scale_2"] * np.float32(2)


def _without_expert(found):
    for name in [n for n in found if ".1.mlp.experts.2." in n]:
        del found[name]


def _plain_expert(found):
    for end in ("_scale", "_scale_2"):
        del found[W + end]
    found[W] = np.zeros((64, 64), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("spoil", "said", "loads"),
    [
        (_drop(f"{W}_scale"), f"no {W}_scale", False),
        (_drop(f"{W}_scale_2"), f"no {W}_scale_2", False),
        (_drop(W), f"{W}_scale without its weight", False),
        (_without_expert, "3 missing: model.layers.1.mlp.experts.2.down_proj.weight", False),
        (_set(W, lambda a: a.astype(np.int32)), f"{W} is int32", False),
        (_set(W, lambda a: a[:, :-1]), f"{W} is (64, 31), not (N, K/2)", False),
        (_set(f"{W}_scale", lambda a: a.astype(np.float32)), f"{W}_scale is float32", False),
        (_set(f"{W}_scale", lambda a: a[:-1]), f"{W}_scale is float8_e4m3fn (63, 4)", False),
        (_set(f"{W}_scale_2", lambda a: a.astype(ml_dtypes.bfloat16)), "bfloat16 ()", False),
        (_set(f"{W}_scale_2", lambda a: np.float32(np.nan) * a), f"nan in {W}_scale_2", False),
        (_set(f"{W}_scale_2", lambda a: a * np.float32(0)), f"0.0 in {W}_scale_2", False),
        (_set(f"{W}_scale", lambda a: np.full_like(a, np.nan)), f"NaN in {W}_scale", False),
        (_two_globals, f"{W}_scale_2: got", True),
        (_plain_expert, f"not packed: {W}", True),
    ],
)
def test_damage_fails_by_name(spoil, said, loads, exported, tmp_path):
    found = tensors(exported)
    spoil(found)
    write(tmp_path, found)
    for file in exported.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError) as error:
        trace_jax.load_quantised(tmp_path)
    assert said in str(error.value)
    if loads:  # what only a packed sampler cannot hold
        trace_jax.load(tmp_path)
        return
    with pytest.raises(ValueError) as error:
        trace_jax.load(tmp_path)
    assert said in str(error.value)


def test_truncated_shard_fails_by_name(exported, tmp_path):
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    for read in (trace_jax.load, trace_jax.load_quantised):
        with pytest.raises(ValueError, match=r"model\.safetensors: got \d+ bytes, need \d+"):
            read(tmp_path)


@pytest.mark.parametrize("only_legacy", [False, True])
def test_checkpoint_of_another_tool_is_read_off_its_weights(only_legacy, exported, tmp_path):
    for file in exported.iterdir():
        if file.name != "trace_jax_quant.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if only_legacy:
        config = json.loads((tmp_path / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    model, quant, weights = trace_jax.load_quantised(tmp_path)
    assert model == MODELS["qwen3_moe"]
    assert (quant.weights, quant.acts) == ("nvfp4:convention=modelopt", "nvfp4")
    assert (quant.kv, quant.mlps, quant.keep_first, quant.keep_last) == (
        "nvfp4:global_rule=one", "experts", 0, 0,
    )  # fmt: skip
    wanted = trace_jax.load_quantised(exported)[2]
    jax.tree.map(np.testing.assert_array_equal, weights.params, wanted.params)


def test_plain_checkpoint_is_no_quantised_one(tmp_path):
    model = MODELS["qwen3_moe"]
    trace_jax.save(tmp_path / "out", model, transformer.init(model, 1, jax.random.key(0)))
    with pytest.raises(ValueError, match="quantization_config: got None"):
        trace_jax.load_quantised(tmp_path / "out")
