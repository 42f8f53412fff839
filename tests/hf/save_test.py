"""Saving: HF -> ours -> HF is the identity, and transformers computes the same from both."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from tests import slow
from tests.hf import checkpoints
from trace_jax import config as cfg
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.hf import directory, files
from trace_jax.models import transformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
KINDS = slow.only(checkpoints.CONFIGS, (*checkpoints.FAST, "qwen3_5_moe"))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def logits(path, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    tokens = torch.arange(24).reshape(2, 12) * 3
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_keeps_every_bit(kind, dtype, tmp_path):
    original = checkpoints.write(kind, tmp_path / "theirs", DTYPES[dtype])
    model, params = trace_jax.load(original)
    trace_jax.save(tmp_path / "ours", model, params, dtype=dtype)
    wanted, got = checkpoints.tensors(original), checkpoints.tensors(tmp_path / "ours")
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype == DTYPES[dtype]
        assert torch.equal(got[name], value), name
    assert torch.equal(logits(tmp_path / "ours", DTYPES[dtype]), logits(original, DTYPES[dtype]))


def test_bfloat16_parameters_are_saved_bit_for_bit(tmp_path):
    original = checkpoints.write("qwen3_next", tmp_path / "theirs", torch.bfloat16)
    model, params = trace_jax.load(original, dtype="bfloat16")
    trace_jax.save(tmp_path / "ours", model, params)
    wanted, got = checkpoints.tensors(original), checkpoints.tensors(tmp_path / "ours")
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_shards_stay_within_their_size_and_load_alike(tmp_path):
    original = checkpoints.write("qwen3_moe", tmp_path / "theirs")
    model, params = trace_jax.load(original)
    trace_jax.save(tmp_path / "ours", model, params, dtype="float32", max_shard_bytes=20_000)
    shards = sorted((tmp_path / "ours").glob("model-*-of-*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 20_000 + 8_000 for shard in shards)  # and a header
    index = json.loads((tmp_path / "ours" / files.INDEX).read_text())
    wanted = checkpoints.tensors(original)
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    assert torch.equal(logits(tmp_path / "ours", torch.float32), logits(original, torch.float32))
    again = trace_jax.load(tmp_path / "ours")[1]
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_sharded_parameters_are_saved_like_whole_ones(tmp_path):
    original = checkpoints.write("qwen3_moe", tmp_path / "theirs")
    mesh = jax.make_mesh((2, 2), ("a", "b"))  # two of four layers a device
    spec = jax.sharding.PartitionSpec

    def sharding(path):
        return jax.sharding.NamedSharding(mesh, spec("a", "b") if "moe" in path else spec())

    model, params = trace_jax.load(original, shardings=sharding)
    trace_jax.save(tmp_path / "ours", model, params, dtype="float32")
    wanted, got = checkpoints.tensors(original), checkpoints.tensors(tmp_path / "ours")
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def small():
    model = cfg.Model(width=32, layers=2, heads=2, kv_heads=1, head_dim=16, expert_ffn=16)
    return model, transformer.init(model, 261, jax.random.key(0))


def test_own_model_is_saved_with_its_tokenizer(tmp_path):
    model, params = small()
    tokenizer = byte_tokenizer()
    trace_jax.save(tmp_path / "out", model, params, tokenizer=tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.encode("héllo", add_special_tokens=False) == tokenizer.encode("héllo")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert set(generation.eos_token_id) == set(tokenizer.stop_ids)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.vocab_size == 261 and set(config.eos_token_id) == set(tokenizer.stop_ids)
    again, values = trace_jax.load(tmp_path / "out")
    assert again.vocab_size == 261
    np.testing.assert_array_equal(
        values["embed"], params["embed"].astype(jnp.bfloat16).astype(jnp.float32)
    )


def test_like_keeps_what_the_model_does_not_say(tmp_path):
    path = checkpoints.write("qwen3_5_moe", tmp_path / "theirs")
    checkpoints.multimodal(path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"max_position_embeddings": 77, "bos_token_id": 5}
    (path / "config.json").write_text(json.dumps(config))
    model, params = trace_jax.load(path)
    trace_jax.save(tmp_path / "ours", model, params, like=path)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["max_position_embeddings"], written["bos_token_id"]) == (77, 5)
    assert "vision_config" not in written and "text_config" not in written
    assert trace_jax.load(tmp_path / "ours")[0] == model


def test_wrong_parameters_are_named_before_anything_is_written(tmp_path):
    model, params = small()
    layers = dict(params["layers"], mixer_norm=jnp.ones((3, 32)), extra=jnp.ones(1))
    del layers["ffn_norm"]
    with pytest.raises(ValueError) as error:
        trace_jax.save(tmp_path / "out", model, {**params, "layers": layers})
    for text in (
        "1 missing: layers/ffn_norm",
        "1 unknown: layers/extra",
        "layers/mixer_norm is (3, 32), not (2, 32)",
    ):
        assert text in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_model_without_a_family_is_refused(tmp_path):
    model, params = small()
    with pytest.raises(ValueError, match=r"partial_rotary_factor: got 0\.5"):
        odd = dataclasses.replace(model, rotary_fraction=0.5)
        trace_jax.save(tmp_path / "out", odd, params)


def test_full_directory_is_kept_unless_told(tmp_path):
    model, params = small()
    (tmp_path / "out").mkdir()
    trace_jax.save(tmp_path / "out", model, params)  # empty: taken
    with pytest.raises(FileExistsError, match="overwrite=True"):
        trace_jax.save(tmp_path / "out", model, params)
    (tmp_path / "out" / "stale").touch()
    trace_jax.save(tmp_path / "out", model, params, overwrite=True)
    assert not (tmp_path / "out" / "stale").exists()
    assert os.listdir(tmp_path) == ["out"]  # nothing is left beside it


def test_failure_while_writing_leaves_the_old_directory(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with (
        pytest.raises(KeyboardInterrupt),
        directory.fresh(tmp_path / "out", overwrite=True) as new,
    ):
        (new / "half").touch()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["old"]


def test_new_directory_has_usual_permissions(tmp_path):
    model, params = small()
    trace_jax.save(tmp_path / "out", model, params)
    usual = tmp_path / "usual"
    usual.mkdir()
    assert (tmp_path / "out").stat().st_mode == usual.stat().st_mode
