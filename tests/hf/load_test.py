"""Loading: values, layouts, shardings, and what is refused by name."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import trace_jax
from tests import slow
from tests.hf import checkpoints
from trace_jax.hf import files, load

torch = pytest.importorskip("torch")
KINDS = slow.only(checkpoints.CONFIGS, checkpoints.FAST)
LOGIT_TOLERANCE = 2e-4  # float32 sums in another order; logits are of order 1


@pytest.fixture(params=KINDS, scope="module")
def checkpoint(request, tmp_path_factory):
    return request.param, checkpoints.write(request.param, tmp_path_factory.mktemp("checkpoint"))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_logits_are_those_of_transformers(checkpoint):
    kind, path = checkpoint
    model, params = trace_jax.load(path)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 11))
    ours = trace_jax.logits(model, params, jnp.asarray(tokens, jnp.int32))
    with torch.no_grad():
        theirs = checkpoints.hf_model(kind)(torch.tensor(tokens)).logits.numpy()
    assert theirs.std() > 0.1  # the comparison can fail
    np.testing.assert_allclose(ours, theirs, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", slow.only(checkpoints.EXPERTS, checkpoints.FAST))
def test_fused_experts_are_the_same_parameters(kind, transposed, tmp_path):
    path = checkpoints.write(kind, tmp_path)
    _, wanted = trace_jax.load(path)
    checkpoints.rewrite(path, checkpoints.fuse(transposed))
    assert any(name.endswith("experts.gate_up_proj") for name in checkpoints.tensors(path))
    equal(trace_jax.load(path)[1], wanted)


def test_multimodal_checkpoint_gives_its_text_model(tmp_path):
    path = checkpoints.write("qwen3_5_moe", tmp_path)
    wanted = trace_jax.load(path)
    checkpoints.multimodal(path)
    got = trace_jax.load(path)
    assert got[0] == wanted[0]
    equal(got[1], wanted[1])


def test_shards_are_the_same_parameters_as_one_file(checkpoint, tmp_path):
    kind, path = checkpoint
    checkpoints.write(kind, tmp_path, max_shard_size="20KB")
    assert (tmp_path / files.INDEX).is_file() and len(list(tmp_path.glob("*.safetensors"))) > 3
    equal(trace_jax.load(tmp_path)[1], trace_jax.load(path)[1])


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_dtype_is_of_matrices_and_of_computing(kind, tmp_path):
    path = checkpoints.write(kind, tmp_path, torch.bfloat16)
    exact_model, exact = trace_jax.load(path, dtype="float32")
    model, params = trace_jax.load(path, dtype="bfloat16")
    assert (exact_model.compute_dtype, model.compute_dtype) == ("float32", "bfloat16")
    moe = params["layers"]["moe"]
    assert moe["gate_up"].dtype == params["embed"].dtype == jnp.bfloat16
    assert moe["router"].dtype == params["layers"]["ffn_norm"].dtype == jnp.float32
    equal(jax.tree.map(lambda a: a.astype(jnp.float32), params), exact)
    assert {leaf.dtype for leaf in jax.tree.leaves(exact)} == {np.dtype(np.float32)}


def test_float32_checkpoint_is_rounded_to_nearest_even_bfloat16(tmp_path):
    path = checkpoints.write("qwen3", tmp_path)
    _, params = trace_jax.load(path, dtype="bfloat16")
    theirs = checkpoints.tensors(path)["model.embed_tokens.weight"].to(torch.bfloat16)
    np.testing.assert_array_equal(params["embed"].astype(jnp.float32), theirs.float().numpy())


def test_each_device_gets_its_part_only(checkpoint):
    _, path = checkpoint
    mesh = jax.make_mesh((2, 2), ("a", "b"))

    def sharding(path):
        spec = {
            "gate_up": (None, *(("a", "b") if "moe" in path else ("b",))),
            "q": (None, "a", "b"),
            "embed": ("a",),
            "mixer_norm": ("b",),  # the stacked axis itself
        }.get(path[-1], ())
        return NamedSharding(mesh, PartitionSpec(*spec))

    _, wanted = trace_jax.load(path)
    _, params = trace_jax.load(path, shardings=sharding)
    equal(params, wanted)
    for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        asked = sharding(tuple(key.key for key in leaf_path))
        assert leaf.sharding == asked, leaf_path
        for shard in leaf.addressable_shards:
            assert shard.data.shape == asked.shard_shape(leaf.shape)
    assert params["embed"].addressable_shards[0].data.shape[0] == 48
    tree = jax.tree_util.tree_map_with_path(
        lambda p, _: sharding(tuple(key.key for key in p)), wanted
    )
    equal(trace_jax.load(path, shardings=tree)[1], wanted)
    del tree["embed"]
    with pytest.raises(ValueError, match="need a sharding at embed"):
        trace_jax.load(path, shardings=tree)


def test_all_wrong_tensors_are_in_one_error(tmp_path):
    path = checkpoints.write("qwen3_moe", tmp_path)

    def spoil(found):
        del found["model.layers.1.mlp.experts.3.up_proj.weight"]
        del found["model.norm.weight"]
        found["model.layers.0.self_attn.q_proj.bias"] = torch.ones(3)
        found["lm_head.weight"] = found["lm_head.weight"].T
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"].to(torch.int8)
        return found

    checkpoints.rewrite(path, spoil)
    with pytest.raises(ValueError) as error:
        trace_jax.load(path)
    for text in (
        str(path),
        "2 missing: model.layers.1.mlp.experts.3.up_proj.weight, model.norm.weight",
        "1 unknown: model.layers.0.self_attn.q_proj.bias",
        "lm_head.weight is (32, 96), not (96, 32)",
        "1 of a dtype that holds no weights: model.embed_tokens.weight is int8",
    ):
        assert text in str(error.value)


def test_long_lists_are_cut_and_counted(tmp_path):
    path = checkpoints.write("qwen3_moe", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 40}))
    with pytest.raises(ValueError, match=r"\d+ missing: .*, \.\.\. \(\d+ in all\)") as error:
        trace_jax.load(path)
    assert len(str(error.value)) < 2000


def test_head_beside_a_tied_embedding_must_be_the_embedding(tmp_path):
    path = checkpoints.write("qwen3", tmp_path)
    wanted = trace_jax.load(path)[1]

    def with_head(found):
        return {**found, "lm_head.weight": found["model.embed_tokens.weight"].clone()}

    checkpoints.rewrite(path, with_head)
    equal(trace_jax.load(path)[1], wanted)

    def other(found):
        found["lm_head.weight"][-1, -1] += 1
        return found

    checkpoints.rewrite(path, other)
    with pytest.raises(ValueError, match=r"lm_head\.weight: got another one than the embedding"):
        trace_jax.load(path)


def header_of(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def spoilt(file, change):
    header, data = header_of(file)
    text = json.dumps(change(header) or header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(header, **values):
    header["lm_head.weight"] |= values


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: entry(h, dtype="F13"), "lm_head.weight: got dtype 'F13'"),
        (lambda h: entry(h, dtype=["F32"]), "lm_head.weight: got dtype"),
        (lambda h: entry(h, shape=[-1, 32]), r"lm_head.weight: got shape \[-1, 32\]"),
        (lambda h: entry(h, shape=[96, 31]), "lm_head.weight: got 12288 bytes, need 11904"),
        (lambda h: entry(h, shape=[2**40, 2**40]), "lm_head.weight: got 12288 bytes"),
        (lambda h: entry(h, data_offsets=[-4, 8]), "lm_head.weight: got data_offsets"),
        (lambda h: entry(h, data_offsets=[8, 4]), "lm_head.weight: got data_offsets"),
        (lambda h: entry(h, data_offsets=[4, 12292]), "got byte .*, need data from byte"),
        (lambda h: h.update({"lm_head.weight": 3}), "lm_head.weight: got 3"),
        (lambda h: [1], "a header that is no object"),
    ],
)
def test_damaged_header_names_file_and_tensor(change, said, tmp_path):
    path = checkpoints.write("qwen3_moe", tmp_path)
    spoilt(path / "model.safetensors", change)
    with pytest.raises(ValueError, match=said) as error:
        trace_jax.load(path)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda data: data[:-1], "truncated or damaged"),
        (lambda data: data + b"\0", "truncated or damaged"),
        (lambda data: data[:5], "got a header of"),
        (lambda data: b"", "got a header of 0 bytes"),
        (lambda data: struct.pack("<Q", 2**62) + data[8:], "a header of 4611686018427387904 bytes"),
        (lambda data: struct.pack("<Q", 8) + data[8:], "a header that is no JSON"),
        (lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000, "a header that is no JSON"),
    ],
)
def test_damaged_file_is_refused_by_name(cut, said, tmp_path):
    path = checkpoints.write("qwen3_moe", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(cut(file.read_bytes()))
    with pytest.raises(ValueError, match=said) as error:
        trace_jax.load(path)
    assert str(file) in str(error.value)


def test_index_and_shards_must_agree(tmp_path):
    path = checkpoints.write("qwen3_moe", tmp_path, max_shard_size="20KB")
    index = json.loads((path / files.INDEX).read_text())
    name = "model.norm.weight"  # not alone in its shard
    shard = index["weight_map"][name]
    assert list(index["weight_map"].values()).count(shard) > 1

    def with_map(**changes):
        changed = {**index["weight_map"], **changes}
        changed = {key: value for key, value in changed.items() if value}
        (path / files.INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            trace_jax.load(path)
        return str(error.value)

    assert "no tensors that" in (said := with_map(ghost=shard)) and "ghost" in said
    assert "does not list there" in (said := with_map(**{name: None})) and name in said
    assert "../x.safetensors: got no such file" in with_map(**{name: "../x.safetensors"})
    (path / files.INDEX).write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"index\.json: got RecursionError"):
        trace_jax.load(path)
    (path / shard).unlink()
    assert f"{shard}: got no such file" in with_map()
    (path / files.INDEX).unlink()
    with pytest.raises(ValueError, match=r"got \d+ safetensors files"):
        trace_jax.load(path)


def test_of_a_single_file_and_shards_the_single_file_is_taken_as_transformers_does(tmp_path):
    path = checkpoints.write("qwen3_moe", tmp_path / "one")
    _, wanted = trace_jax.load(path)
    shards = tmp_path / "shards"
    checkpoints.hf_model("qwen3_moe", seed=1).save_pretrained(shards, max_shard_size="20KB")
    for file in (*shards.glob("*.safetensors"), shards / files.INDEX):
        (path / file.name).write_bytes(file.read_bytes())
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    _, params = trace_jax.load(path)
    equal(params, wanted)
    embedding = theirs.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(params["embed"], embedding)
    assert not np.array_equal(params["embed"], trace_jax.load(shards)[1]["embed"])


def test_another_file_beside_the_single_one_is_passed_over(tmp_path):
    path = checkpoints.write("qwen3", tmp_path)
    wanted = trace_jax.load(path)[1]
    (path / "consolidated.safetensors").write_bytes(b"of another layout")
    equal(trace_jax.load(path)[1], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_head_with_nan_is_still_the_embedding(dtype, tmp_path):
    path = checkpoints.write("qwen3", tmp_path, dtype)

    def spoil(found):
        found["model.embed_tokens.weight"][3, 5] = float("nan")
        return {**found, "lm_head.weight": found["model.embed_tokens.weight"].clone()}

    checkpoints.rewrite(path, spoil)
    assert np.isnan(trace_jax.load(path)[1]["embed"]).sum() == 1

    def other(found):
        found["lm_head.weight"][3, 5] = 0
        return found

    checkpoints.rewrite(path, other)
    with pytest.raises(ValueError, match=r"lm_head\.weight: got another one than the embedding"):
        trace_jax.load(path)


def test_dtype_is_one_of_two(tmp_path):
    with pytest.raises(ValueError, match="load: dtype: got 'int8'"):
        load.load(tmp_path, dtype="int8")
