"""Checkpoints whose tensors have several dtypes, as released hybrids have: not a bit is lost."""

import json

import jax
import numpy as np
import pytest

import trace_jax
from tests.hf import checkpoints
from trace_jax.hf import files

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
HYBRIDS = ("qwen3_next", "qwen3_5_moe")
DECAYS = ("linear_attn.A_log", "linear_attn.norm.weight")


def mixed(kind, path, ends=DECAYS, main=torch.bfloat16, odd=torch.float32):
    """A checkpoint in `main`; tensors with these ends are in `odd`, with values of their own."""
    checkpoints.write(kind, path, main)

    def change(found):
        for name, value in found.items():
            if name.endswith(ends):
                found[name] = (value.float() * 1.0003 + 1e-4).to(odd)
        return found

    checkpoints.rewrite(path, change)
    return path


def same(one, two):
    wanted, got = checkpoints.tensors(one), checkpoints.tensors(two)
    assert got.keys() == wanted.keys()
    wrong = [n for n in wanted if got[n].dtype != wanted[n].dtype]
    wrong += [n for n in wanted if not torch.equal(got[n], wanted[n])]
    assert wrong == []


def logits(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    with torch.no_grad():
        return model(torch.arange(12)[None] * 3).logits


@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_decays_in_float32_come_back_bit_for_bit(kind, like, loaded, tmp_path):
    path = mixed(kind, tmp_path / "theirs")
    model, params = trace_jax.load(path, dtype=loaded)
    trace_jax.save(tmp_path / "ours", model, params, like=path if like else None)
    same(path, tmp_path / "ours")
    assert torch.equal(logits(path), logits(tmp_path / "ours"))


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("qwen3_next", ("in_proj_ba.weight", "dt_bias", "q_norm.weight")),
        ("qwen3_moe", ("mlp.gate.weight", "layernorm.weight", "experts.1.up_proj.weight")),
        ("mixtral", ("gate.weight", "w2.weight")),
        ("qwen3", ("model.norm.weight", "q_proj.weight")),
    ],
)
@pytest.mark.parametrize(
    ("main", "odd", "dtype"),
    [
        (torch.bfloat16, torch.float32, "bfloat16"),
        (torch.float32, torch.bfloat16, "float32"),
        (torch.float32, torch.float16, "float32"),
    ],
)
def test_like_keeps_every_dtype(kind, ends, main, odd, dtype, tmp_path):
    path = mixed(kind, tmp_path / "theirs", ends, main, odd)
    model, params = trace_jax.load(path)
    trace_jax.save(tmp_path / "ours", model, params, dtype=dtype, like=path)
    same(path, tmp_path / "ours")


def test_like_in_another_layout_keeps_the_dtypes_too(tmp_path):
    path = mixed("qwen3_5_moe", tmp_path / "theirs", (*DECAYS, "q_norm.weight"))
    wanted = checkpoints.tensors(path)
    checkpoints.rewrite(path, checkpoints.fuse(False))
    checkpoints.multimodal(path)
    model, params = trace_jax.load(path)
    trace_jax.save(tmp_path / "ours", model, params, like=path)
    got = checkpoints.tensors(tmp_path / "ours")
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def test_another_dtype_than_that_of_like_is_of_all_but_wider_tensors(tmp_path):
    float32 = checkpoints.write("qwen3_moe", tmp_path / "float32")
    model, params = trace_jax.load(float32)
    trace_jax.save(tmp_path / "a", model, params, like=float32)  # like is all float32
    assert {v.dtype for v in checkpoints.tensors(tmp_path / "a").values()} == {torch.bfloat16}
    odd = mixed("qwen3_moe", tmp_path / "odd", ("q_norm.weight",))
    trace_jax.save(tmp_path / "b", model, params, dtype="float32", like=odd)
    assert {v.dtype for v in checkpoints.tensors(tmp_path / "b").values()} == {torch.float32}
    narrow = mixed(
        "qwen3_moe", tmp_path / "narrow", ("q_norm.weight",), torch.float32, torch.float16
    )
    trace_jax.save(tmp_path / "c", model, params, like=narrow)
    assert {v.dtype for v in checkpoints.tensors(tmp_path / "c").values()} == {torch.bfloat16}


def test_decays_that_training_moved_are_not_rounded(tmp_path):
    path = checkpoints.write("qwen3_5_moe", tmp_path / "theirs", torch.bfloat16)
    model, params = trace_jax.load(path)
    linear = params["layers"]["linear"]
    linear["A_log"] = linear["A_log"] * np.float32(1.001)
    trace_jax.save(tmp_path / "ours", model, params)
    found = checkpoints.tensors(tmp_path / "ours")
    wide = {name for name, value in found.items() if value.dtype == torch.float32}
    assert wide == {name for name in found if name.endswith("A_log")}
    again = trace_jax.load(tmp_path / "ours")[1]
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_like_with_a_config_alone_says_no_dtypes(tmp_path):
    path = checkpoints.write("qwen3", tmp_path / "theirs", torch.bfloat16)
    model, params = trace_jax.load(path)
    (path / files.SINGLE).unlink()
    trace_jax.save(tmp_path / "ours", model, params, dtype="float32", like=path)
    assert {v.dtype for v in checkpoints.tensors(tmp_path / "ours").values()} == {torch.float32}


def test_like_of_other_sizes_gives_none_of_them(tmp_path):
    """What our model says stands above what the other checkpoint says."""
    path = checkpoints.write("qwen3_moe", tmp_path / "theirs", torch.bfloat16)
    file = path / "config.json"
    other = tmp_path / "other"
    other.mkdir()
    changed = {
        "vocab_size": 7, "hidden_size": 64, "num_hidden_layers": 9, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 32, "rms_norm_eps": 0.5, "rope_theta": 3.0,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 3.0}, "norm_topk_prob": False,
        "tie_word_embeddings": True, "num_experts": 8, "num_local_experts": 8,
        "num_experts_per_tok": 1, "moe_intermediate_size": 8, "mlp_only_layers": [0],
        "decoder_sparse_step": 2, "attention_bias": True, "model_type": "llama", "dtype": "float16",
        "mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1, "bos_token_id": 5,
    }  # fmt: skip
    (other / "config.json").write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    model, params = trace_jax.load(path)
    trace_jax.save(tmp_path / "ours", model, params, like=other)
    assert trace_jax.load(tmp_path / "ours")[0] == model
    assert torch.equal(logits(tmp_path / "ours"), logits(path))
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["bos_token_id"] == 5 and written["dtype"] == "bfloat16"
    kept = {key for key in changed if key in written and written[key] == changed[key]}
    assert kept == {"bos_token_id"}
