"""Conversions: what goes in comes out, nothing is overwritten, every problem is named first."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

import trace_jax
from trace_jax import convert, overrides, sources
from trace_jax.checkpoint import Checkpointer
from trace_jax.data.tokenizer import byte_tokenizer, load_tokenizer
from trace_jax.models import transformer
from trace_jax.rundir import open_run
from trace_jax.weight_sync import make_sync

TINY = overrides.load("tiny_cpu")
MODEL = dataclasses.replace(TINY.model, vocab_size=272, expert_ffn=64)
DENSE = dataclasses.replace(MODEL, family="qwen3", experts=0, dense_ffn=64)


def write(folder, model=MODEL, dtype="bfloat16"):
    params = transformer.init(model, 272, jax.random.key(3))
    trace_jax.save(folder, model, params, dtype=dtype, tokenizer=byte_tokenizer())
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }} mine")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write(tmp_path_factory.mktemp("checkpoints") / "dense", DENSE)


def run(src, dst, **fields):
    return convert.run(convert.Request(src=str(src), dst=str(dst), **fields))


DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8}


def tensors(folder):
    """Every tensor of a directory, read by hand; E4M3 as its bytes."""
    found = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, end = (start + at for at in entry["data_offsets"])
                flat = np.frombuffer(raw[first:end], DTYPES[entry["dtype"]])
                found[name] = flat.reshape(entry["shape"])
    return found


def test_saving_again_changes_no_bit_and_keeps_the_tokenizers_files(checkpoint, tmp_path):
    made = run(checkpoint, tmp_path / "a" / "b")
    before, after = tensors(checkpoint), tensors(made)
    assert before.keys() == after.keys() and len(before) > 20
    for name in before:
        assert before[name].tobytes() == after[name].tobytes(), name
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (made / name).read_bytes() == (checkpoint / name).read_bytes()
    assert sources.find(made, "x").model == sources.find(checkpoint, "x").model
    assert [p.name for p in made.parent.iterdir()] == ["b"]  # nothing else is left behind


def test_float32_holds_what_bfloat16_held(checkpoint, tmp_path):
    made = run(checkpoint, tmp_path / "wide", dtype="float32")
    for name, wide in tensors(made).items():
        narrow = tensors(checkpoint)[name]
        assert wide.dtype == np.float32 and np.array_equal(wide, narrow.astype(np.float32)), name


def test_a_run_becomes_a_checkpoint_with_its_tokenizer(tmp_path):
    params = transformer.init(MODEL, 272, jax.random.key(5))
    config = dataclasses.replace(TINY, model=MODEL)
    with (
        open_run(tmp_path / "run", overrides.to_dict(config)) as opened,
        Checkpointer(opened.folder("checkpoints"), keep=2) as checkpoints,
    ):
        checkpoints.save(1, {"params": params}, {})
    made = run(tmp_path / "run", tmp_path / "out", dtype="float32")
    model, loaded = trace_jax.load(made)
    assert dataclasses.replace(model, compute_dtype=MODEL.compute_dtype) == MODEL
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert np.array_equal(a, b)
    assert load_tokenizer(str(made)).prompt_ids("hi") == byte_tokenizer().prompt_ids("hi")


@pytest.mark.parametrize("format", ["nvfp4", "4over6"])
def test_an_export_holds_the_codes_of_the_sampler(checkpoint, tmp_path, format):
    made = run(checkpoint, tmp_path / "fp4", quantise=format)
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    assert (made / "hf_quant_config.json").is_file() and (made / "tokenizer.json").is_file()
    _, quant, weights = trace_jax.load_quantised(made)
    model, params = sources.load(sources.find(checkpoint, "x"), "bfloat16")
    expected = make_sync(model, quant)(params, 0)
    pairs = zip(jax.tree.leaves(weights.params), jax.tree.leaves(expected.params), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert quant.weights is not None and (made / "chat_template.jinja").is_file()
    again = run(made, tmp_path / "decoded", dtype="float32")
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    values = trace_jax.load(made)[1]["layers"]["moe"]["gate_up"][0, 0, 64:]
    assert np.array_equal(tensors(again)[name], values)


def test_hscale_changes_scales_by_the_calibration_text(dense, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("reverse abc\n\nthe cat sat on the mat\n" * 5)
    plain = run(dense, tmp_path / "plain", quantise="nvfp4")
    fine = run(dense, tmp_path / "fine", quantise="hscale", calibration=str(text))
    same = [
        np.array_equal(a, tensors(fine)[name])
        for name, a in tensors(plain).items()
        if name.endswith("weight_scale")
    ]
    assert len(same) >= 6 and not all(same)


def test_a_dense_model_becomes_experts(dense, tmp_path):
    made = run(dense, tmp_path / "moe", upcycle=(4, 2))
    model = sources.find(made, "x").model
    assert (model.experts, model.experts_per_token, model.family) == (4, 2, "qwen3_moe")
    up = trace_jax.load(made)[1]["layers"]["moe"]["gate_up"]
    assert np.array_equal(up[:, 0], trace_jax.load(dense)[1]["layers"]["mlp"]["gate_up"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"src": "nowhere/at/all"}, ["--src: got nowhere/at/all, no directory"]),
        ({"src": "nothing.gguf"}, ["--src: got nothing.gguf, no file"]),
        ({"dst": "{src}"}, ["--dst: got ", "nothing is ever overwritten"]),
        ({"dtype": "float16"}, ["--dtype: got 'float16', need one of"]),
        ({"quantise": "int8"}, ["--quantise: format: got 'int8', need one of"]),
        ({"quantise": "mxfp4"}, ["--quantise: got mxfp4, need nvfp4, 4over6 or hscale"]),
        ({"quantise": "hscale"}, ["--calibration: got nothing, need a text file"]),
        ({"quantise": "hscale:hif4", "calibration": "x"}, ["--quantise: got hscale:hif4", "x, no"]),
        ({"quantise": "nvfp4", "calibration": "x"}, ["--calibration: got x, need --quantise=hsca"]),
        ({"upcycle": (2, 3)}, ["--upcycle: got 2x3, need EXPERTSxPER_TOKEN", "which has experts"]),
        ({"dst": "{src}/below"}, ["inside --src, need a directory outside"]),
        ({"dst": "{src}/config.json/x"}, ["--dst: got ", "need a directory that can be written"]),
        ({"dst": "/proc/x"}, ["--dst: got /proc/x, in /proc, need a directory that can be writ"]),
        ({"seed": 2**32}, ["--seed: got 4294967296, need 0..4294967295"]),
        ({"seed": -1}, ["--seed: got -1"]),
        ({"upcycle": (10**8, 2)}, ["--upcycle: got 100000000x2, need at most 4096 experts"]),
        ({"quantise": "hscale", "calibration": "{src}/bad.txt"}, ["need a text file in UTF-8"]),
        ({"src": "nope"}, ["--src: got 'nope', need"]),
        ({"dtype": "x", "quantise": "x", "dst": "{src}"}, ["--dst: ", "--dtype: ", "--quantise: "]),
    ],
)
def test_every_problem_is_named_before_anything_is_written(checkpoint, tmp_path, fields, says):
    fields = {"src": str(checkpoint), "dst": str(tmp_path / "out")} | fields
    (checkpoint / "bad.txt").write_bytes(b"\xff\xfe")
    fields = {
        k: v.replace("{src}", str(checkpoint)) if isinstance(v, str) else v
        for k, v in fields.items()
    }
    with pytest.raises(ValueError) as caught:
        convert.run(convert.Request(**fields))
    for part in says:
        assert part in str(caught.value)
    assert all(": got " in line and ", need " in line for line in str(caught.value).splitlines())
    assert not list(tmp_path.iterdir())


def test_the_seed_is_of_the_routers(dense, tmp_path):
    routers = []
    for seed in (0, 0, 1):
        made = run(dense, tmp_path / str(len(routers)), upcycle=(4, 2), seed=seed)
        routers.append(np.asarray(trace_jax.load(made)[1]["layers"]["moe"]["router"]))
    assert np.array_equal(routers[0], routers[1]) and not np.array_equal(routers[0], routers[2])


def test_a_base_model_without_a_template_is_calibrated(dense, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(dense, base)
    (base / "chat_template.jinja").unlink()
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "text").write_text("reverse abc\nthe cat\n")
    made = run(base, tmp_path / "out", quantise="hscale", calibration=str(tmp_path / "text"))
    assert (made / "hf_quant_config.json").is_file()


def test_a_failure_half_way_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(convert, "copy_tokenizer", broken)
    with pytest.raises(OSError, match="disk full"):
        run(checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_was_written_is_listed(checkpoint, tmp_path):
    made = run(checkpoint, tmp_path / "out")
    text = convert.describe(made)
    size = (made / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in text
    assert f"python launch/inspect.py --model={made}" in text
