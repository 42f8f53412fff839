"""Tiny random Hugging Face checkpoints of every architecture, made by transformers itself.

    model = tiny("qwen3_next", directory)      # saved there; the transformers model is handed back

Weights are drawn so that mistakes show: logits have a standard deviation near 1, no norm is
neutral, gates are neither open nor shut, and every head decays at its own rate.
"""

import math
import os
import pathlib
from typing import Any

import pytest

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 48,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _rope(theta: float, **more: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


# name: (config class, model class, fields of the config)
_SPECS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _MOE | {"mlp_only_layers": [1], "norm_topk_prob": True, "rope_parameters": _rope(1e4)},
    ),
    "qwen3_moe_raw_gates": (  # gates that do not sum to one; tied embeddings
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _MOE | {"norm_topk_prob": False, "tie_word_embeddings": True, "num_hidden_layers": 3},
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": _rope(1e6), "rms_norm_eps": 1e-5},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "llama_tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": _rope(1e4), "num_key_value_heads": 4},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _rope(1e4)},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _MOE | _LINEAR | {"rope_parameters": _rope(1e4, partial_rotary_factor=0.25)},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _MOE | _LINEAR | {"rope_parameters": _rope(1e7, partial_rotary_factor=0.25)},
    ),
}
NAMES = tuple(_SPECS)


def need_torch() -> None:
    """Skips the module or test that calls it where torch is absent; on a CI machine that fails."""
    try:
        import torch
        import transformers
    except ImportError as error:
        reason = f"NOT COMPARED WITH TRANSFORMERS ({error}): run `make setup-torch`"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; a CI run may not skip this", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def tiny(
    name: str,
    directory: str | pathlib.Path | None,
    *,
    dtype: str = "float32",
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A random model of an architecture, saved to `directory` (None: not saved).

    Args: name: one of `NAMES`. dtype: of the parameters, in memory and on disk.
          overrides: fields of the transformers config.
    """
    need_torch()
    import torch
    import transformers

    config_class, model_class, fields = _SPECS[name]
    config = getattr(transformers, config_class)(**_SIZES | fields | overrides)
    model = getattr(transformers, model_class)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(_draw(path, parameter, generator))
    model = model.to(getattr(torch, dtype))
    if directory is not None:
        model.save_pretrained(directory)
    return model


def _draw(path: str, parameter: Any, generator: Any) -> Any:
    """New values; `parameter` still has those of its initialisation."""
    import torch

    shape = parameter.shape

    def uniform(low: float, high: float) -> Any:
        return low + (high - low) * torch.rand(shape, generator=generator)

    owner, _, kind = path.rpartition(".")
    if kind == "A_log":  # decay rates from nearly none to forgetting within a few tokens
        return torch.log(uniform(0.02, 3.0))
    if kind == "dt_bias":
        return uniform(-2.0, 1.0)
    if owner.endswith("norm"):
        zero_centred = not parameter.any()  # 1 + weight
        return uniform(-0.4, 0.4) if zero_centred else uniform(0.6, 1.4)
    normal = torch.randn(shape, generator=generator)
    gain = 2.0 if owner.endswith("mlp.gate") else 1.0  # routers with a clear preference
    return normal * gain / math.sqrt(shape[-1])
