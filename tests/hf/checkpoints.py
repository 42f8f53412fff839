"""Tiny random checkpoints of every architecture, made by transformers, in every layout on disk."""

import json
import pathlib

import pytest

FAST = ("qwen3_moe_mixed", "llama", "qwen3_next")

torch = pytest.importorskip("torch", reason="NO TORCH: checkpoints are compared with transformers'")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 5_000.0,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_HYBRID = {
    **_MOE,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5_000.0,
}

CONFIGS = {
    "qwen3_moe": ("Qwen3MoeConfig", {**_SHAPE, **_MOE, "intermediate_size": 56}),
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        {
            **_SHAPE,
            **_MOE,
            "intermediate_size": 56,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3": ("Qwen3Config", {**_SHAPE, "intermediate_size": 56, "tie_word_embeddings": True}),
    "llama": (
        "LlamaConfig",
        {**_SHAPE, "intermediate_size": 56, "tie_word_embeddings": True, "rope_scaling": _LLAMA3},
    ),
    "mixtral": (
        "MixtralConfig",
        {**_SHAPE, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_SHAPE, **_HYBRID, "intermediate_size": 56}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_SHAPE, **_HYBRID}),
}
EXPERTS = ("qwen3_moe", "qwen3_moe_mixed", "mixtral", "qwen3_next", "qwen3_5_moe")


def hf_model(kind: str, dtype=torch.float32, seed: int = 0):
    """A random model whose every parameter is away from its neutral value."""
    torch.set_num_threads(1)
    name, fields = CONFIGS[kind]
    config = getattr(transformers, name)(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, A_log, dt_bias: a swapped or missing one must show
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def write(kind: str, path: pathlib.Path, dtype=torch.float32, **save) -> pathlib.Path:
    """A checkpoint directory as `save_pretrained` writes it: one tensor for each expert."""
    hf_model(kind, dtype).save_pretrained(path, **save)
    return path


def tensors(path: pathlib.Path) -> dict:
    """Every tensor of a directory."""
    out = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def rewrite(path: pathlib.Path, change) -> None:
    """Replaces the tensors of a directory by `change` of them, in one file."""
    changed = change(tensors(path))
    for file in (*path.glob("*.safetensors"), *path.glob("*.index.json")):
        file.unlink()
    contiguous = {name: value.contiguous() for name, value in changed.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})


def fuse(transposed: bool):
    """From one tensor for each expert to fused ones."""

    def change(found: dict) -> dict:
        out, experts = {}, {}
        usual = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names
        for name, value in found.items():
            name = name.replace("block_sparse_moe", "mlp")
            before, is_expert, after = name.partition(".experts.")
            if not is_expert:
                out[name] = value
                continue
            e, projection, _ = after.split(".")
            experts.setdefault(before, {})[usual.get(projection, projection), int(e)] = value
        for before, parts in experts.items():
            count = len(parts) // 3

            def stack(name, parts=parts, count=count):
                return torch.stack([parts[name, e] for e in range(count)])

            gate_up = torch.cat([stack("gate_proj"), stack("up_proj")], dim=1)
            down = stack("down_proj")
            if transposed:
                gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            out[f"{before}.experts.gate_up_proj"] = gate_up
            out[f"{before}.experts.down_proj"] = down
        return out

    return change


def multimodal(path: pathlib.Path) -> None:
    """The text model of `path` as if a vision tower and a prediction head stood beside it."""

    def change(found: dict) -> dict:
        out = {
            name.replace("model.", "model.language_model.", 1): value
            for name, value in found.items()
        }
        out["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(6, 2)
        out["mtp.fc.weight"] = torch.ones(2, 4)
        return out

    rewrite(path, change)
    file = path / "config.json"
    text = json.loads(file.read_text())
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 2, "model_type": "qwen3_5_moe_vision"},
    }
    file.write_text(json.dumps(outer))
