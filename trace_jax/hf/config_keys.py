"""The keys of a config.json that are read: what JSON value each has, whatever tool wrote it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trace_jax.checks import require

Json = Mapping[str, Any]


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _count(value: Any) -> bool:
    return _whole(value, 0)


def _number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and math.isfinite(value) and value > 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _layers(value: Any) -> bool:
    return isinstance(value, list) and all(_count(i) for i in value)


def _kinds(value: Any) -> bool:
    return isinstance(value, list) and all(_text(kind) for kind in value)


_WHOLE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "full_attention_interval",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "decoder_sparse_step",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
_COUNTS = (  # 0 where a model has none of it
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
)
_NUMBERS = (
    "rms_norm_eps",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
)
_OBJECTS = ("text_config", "rope_parameters", "rope_scaling", "quantization_config")
_Good = tuple[Callable[[Any], bool], str]
_KEYS: dict[str, _Good] = {
    **dict.fromkeys(_WHOLE, (_whole, "a positive whole number")),
    **dict.fromkeys(_COUNTS, (_count, "a whole number >= 0")),
    **dict.fromkeys(_NUMBERS, (_number, "a finite number > 0")),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob"), (_flag, "true or false")),
    **dict.fromkeys(("model_type", "hidden_act", "rope_type"), (_text, "a string")),
    **dict.fromkeys(_OBJECTS, (_object, "an object or null")),
    "mlp_only_layers": (_layers, "a list of layers"),
    "layer_types": (_kinds, "a list of strings, one a layer"),
}


def check(config: Json, where: str) -> None:
    """Every key that is read has a value of its kind; null counts as absent.

    Args:   config: the whole file, a part of it, or its rope parameters.
    Raises: ValueError naming the key and what it needs.
    """
    for key, (good, need) in _KEYS.items():
        value = config.get(key)
        require(value is None or good(value), f"{where}: {key}", repr(value), need)


def flat(config: Json) -> dict[str, Any]:
    """The keys of the whole file, under those of the text model nested in `text_config`."""
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def given(config: Json) -> dict[str, Any]:
    """Without nulls."""
    return {key: value for key, value in config.items() if value is not None}
