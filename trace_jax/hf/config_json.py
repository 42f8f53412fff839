"""A Hugging Face config.json as a `config.Model`, and back.

What we do not compute is refused by name; keys that change no logit (dropout, initialisers, token
ids) are passed over. Defaults are those of transformers 5 for each model type. Both spellings are
read: `num_experts` / `num_local_experts`, `rope_theta` / `rope_parameters`,
`full_attention_interval` / `layer_types`.
Source: transformers' configuration classes of the model types.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from trace_jax import config as cfg
from trace_jax.checks import message, require
from trace_jax.hf import config_keys
from trace_jax.hf.config_keys import Json

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
# model types that are one family: the text part alone, and with a vision tower around it
_FAMILY_OF = {name: name for name in ARCHITECTURES} | {"qwen3_5_moe_text": "qwen3_5_moe"}
_HYBRID = ("qwen3_next", "qwen3_5_moe")
_MOE = ("qwen3_moe", "mixtral", *_HYBRID)
_KV_HEADS = {"qwen3_moe": 4, "qwen3": 32, "mixtral": 8, "qwen3_next": 2, "qwen3_5_moe": 2}
_HEAD_DIM = {"qwen3": 128, "qwen3_next": 256, "qwen3_5_moe": 256}
_THETA = {"mixtral": 1_000_000.0}  # the others 10,000

# the only value that we compute; absent means that value
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "hidden_act": ("silu",),
    "attn_output_gate": (True,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_qk_norm": (True, None),
    "linear_attention_bias": (False, None),
}


def read(directory: str | pathlib.Path) -> Json:
    """The config.json of a checkpoint directory.

    Quantisation that only ModelOpt's older hf_quant_config.json tells is put beside it.
    Raises: FileNotFoundError or ValueError, naming the file.
    """
    config = _object(pathlib.Path(directory) / "config.json")
    legacy = pathlib.Path(directory) / "hf_quant_config.json"
    if "quantization_config" not in config and legacy.is_file():
        old: Any = _object(legacy).get("quantization")
        need = "an object"
        require(isinstance(old, dict), f"{legacy}: quantization", repr(old), need)
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": old.get("quant_algo"),
            "group_size": old.get("group_size", 16),
            "ignore": old.get("exclude_modules", []),
            "kv_cache_scheme": old.get("kv_cache_quant_algo"),
        }
    return config


def _object(path: pathlib.Path) -> dict[str, Any]:
    need = "a checkpoint directory with config.json and *.safetensors"
    require(path.is_file(), str(path), "no such file", need, error=FileNotFoundError)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(message(str(path), f"not JSON ({error})", "a JSON object")) from error
    require(isinstance(config, dict), str(path), type(config).__name__, "a JSON object")
    return config


def quantisation(config: Json) -> Json:
    """The `quantization_config`; empty if there is none."""
    found = config_keys.flat(config).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def is_nvfp4(config: Json) -> bool:
    """Whether the weights on disk are NVFP4 as ModelOpt writes it."""
    return quantisation(config).get("quant_algo") in ("NVFP4", "W4A16_NVFP4")


def model_of(config: Json, dtype: str = "bfloat16", where: str = "config.json") -> cfg.Model:
    """The model that a config.json describes.

    Args:   config: the whole file; a text model nested in `text_config` is taken out of it.
            dtype: compute dtype of the result, "bfloat16" or "float32".
    Raises: ValueError naming the key, its value and what is supported.
    """
    config_keys.check(config, where)
    outer, config = config, config_keys.flat(config)
    config_keys.check(config, where)
    kind = config.get("model_type")
    need = f"one of {sorted(_FAMILY_OF)}"
    require(kind in _FAMILY_OF, f"{where}: model_type", repr(kind), need)
    family = _FAMILY_OF[str(kind)]
    _refuse(config, where)
    section = config.get("quantization_config")
    need = "none, or quant_algo NVFP4 as ModelOpt writes it"
    good = section is None or is_nvfp4(config)
    require(good, f"{where}: quantization_config", section, need)
    every_head = "num_key_value_heads" in config  # null: one for each query head
    config = config_keys.given(config)
    heads = _number(config, "num_attention_heads", where)
    width = _number(config, "hidden_size", where)
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": _number(config, "vocab_size", where),
        "width": width,
        "layers": _number(config, "num_hidden_layers", where),
        "norm_eps": config.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        "zero_centred_norm": family in _HYBRID,
        "tie_embeddings": _tied(outer, where),
        "compute_dtype": dtype,
        "heads": heads,
        "kv_heads": config.get(
            "num_key_value_heads", heads if every_head else _KV_HEADS.get(family, heads)
        ),
        "head_dim": config.get("head_dim", _HEAD_DIM.get(family, width // heads)),
        "qk_norm": family not in ("llama", "mixtral"),
        "gated_attention": family in _HYBRID,
    }
    fields |= _rope(config, family, where)
    fields |= _mixers(config, family, where)
    fields |= _ffn(config, family, where)
    try:
        return cfg.Model(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _number(config: Json, key: str, where: str) -> int:
    value = config.get(key)
    require(bool(value), f"{where}: {key}", repr(value), "a positive whole number")
    return int(value or 0)


def _refuse(config: Json, where: str) -> None:
    """Everything that would change the mathematics to something that we do not compute."""
    for key, allowed in _FIXED.items():
        if key in config:
            value = config[key]
            need = f"{allowed[0]!r}, the only one that this library computes"
            require(value in allowed, f"{where}: {key}", repr(value), need)


def _tied(config: Json, where: str) -> bool:
    """Tied embeddings: at the top, in the text part, or transformers' default."""
    places = [config, config.get("text_config") or {}]
    values = [place.get("tie_word_embeddings") for place in places]
    given = {value for value in values if value is not None}
    fix = "give both places the same value: whether the checkpoint has lm_head.weight tells which"
    at = f"{where}: tie_word_embeddings"
    require(len(given) <= 1, at, "true and false (top level and text_config)", "one value", fix)
    return bool(given.pop()) if given else False


def _rope(config: Json, family: str, where: str) -> dict[str, Any]:
    """Rotary positions: base, rotated fraction and Llama 3's scaling."""
    rope = config_keys.given(config.get("rope_scaling") or config.get("rope_parameters") or {})
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    at = f"{where}: rope_parameters"
    require(not nested, at, f"different ones for {nested}", "one set for all layers")
    config_keys.check(rope, at)
    kind = rope.get("rope_type", rope.get("type", "default"))
    need = "'default' or 'llama3'"
    fix = "without the scaling (delete the key) the model has its original context"
    require(kind in ("default", "llama3"), f"{at}: rope_type", repr(kind), need, fix)
    usual = 0.25 if family in _HYBRID else 1.0
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", usual))
    need = "1.0: transformers does not rotate part of a head in this model type"
    good = family in _HYBRID or fraction == 1
    require(good, f"{where}: partial_rotary_factor", fraction, need)
    fields = {
        "rope_theta": rope.get(
            "rope_theta", config.get("rope_theta", _THETA.get(family, 10_000.0))
        ),
        "rotary_fraction": fraction,
    }
    if kind == "llama3":
        context = config.get("max_position_embeddings", 2048)
        names = ("factor", "low_freq_factor", "high_freq_factor")
        for name in names:
            need = "a number, with rope_type llama3"
            require(isinstance(rope.get(name), int | float), f"{at}: {name}", rope.get(name), need)
        old = rope.get("original_max_position_embeddings", context)
        fields["rope_llama3"] = (*(float(rope[name]) for name in names), int(old))
    return fields


def _mixers(config: Json, family: str, where: str) -> dict[str, Any]:
    """Which layers attend, and the shapes of the others."""
    layers = _number(config, "num_hidden_layers", where)
    every = config.get("full_attention_interval", 4) if family in _HYBRID else 1
    types = config.get("layer_types")
    if types is not None:
        at, known = f"{where}: layer_types", {"full_attention", "linear_attention"}
        known = known if family in _HYBRID else {"full_attention"}
        need = f"only {sorted(known)} in {family}"
        require(set(types) <= known, at, f"{sorted(set(types) - known)}", need)
        require(len(types) == layers, at, f"{len(types)} layers", f"num_hidden_layers ({layers})")
        need = "some layer with full_attention"
        require("full_attention" in types, at, "none", need)
        every = types.index("full_attention") + 1
        wanted = [
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
        odd = [i for i in range(layers) if types[i] != wanted[i]]
        need = f"full attention in every {every}th layer, as the first of them is layer {every - 1}"
        require(not odd, at, f"another order in layers {odd[:8]}", need)
    fields: dict[str, Any] = {"full_attention_every": every}
    if family in _HYBRID:
        fields |= {
            "linear_key_heads": config.get("linear_num_key_heads", 16),
            "linear_value_heads": config.get("linear_num_value_heads", 32),
            "linear_key_dim": config.get("linear_key_head_dim", 128),
            "linear_value_dim": config.get("linear_value_head_dim", 128),
            "conv_width": config.get("linear_conv_kernel_dim", 4),
        }
    return fields


def _ffn(config: Json, family: str, where: str) -> dict[str, Any]:
    """Experts, shared expert and dense MLPs."""
    if family not in _MOE:
        return {"experts": 0, "dense_ffn": _number(config, "intermediate_size", where)}
    if family == "mixtral":
        return _mixtral(config, where)
    layers = _number(config, "num_hidden_layers", where)
    spellings = ("num_experts", "num_local_experts")
    given = {config[name] for name in spellings if name in config}
    need = "one number of experts"
    require(len(given) == 1, f"{where}: {' / '.join(spellings)}", sorted(given) or None, need)
    experts, step = given.pop(), config.get("decoder_sparse_step", 1)
    only = config.get("mlp_only_layers", [])
    dense = tuple(i for i in range(layers) if i in only or (i + 1) % step or not experts)
    at = f"{where}: mlp_only_layers / decoder_sparse_step"
    need = "experts in every layer: this model type has no dense MLP"
    require(family != "qwen3_5_moe" or not dense, at, f"dense layers {dense}", need)
    renormalise = config.get("norm_topk_prob", family != "qwen3_moe")
    need = "true: transformers always renormalises in this model type"
    good = family != "qwen3_5_moe" or renormalise
    require(good, f"{where}: norm_topk_prob", renormalise, need)
    width = _number(config, "intermediate_size", where) if dense else 0
    if len(dense) == layers:
        return {"experts": 0, "dense_ffn": width}
    shared = _number(config, "shared_expert_intermediate_size", where) if family in _HYBRID else 0
    return {
        "experts": experts,
        "experts_per_token": _number(config, "num_experts_per_tok", where),
        "expert_ffn": _number(config, "moe_intermediate_size", where),
        "renormalise_gates": renormalise,
        "shared_ffn": shared,
        "dense_ffn": width,
        "dense_layers": dense,
    }


def _mixtral(config: Json, where: str) -> dict[str, Any]:
    """Experts in every layer, gates always renormalised."""
    window = config.get("sliding_window")
    require(window is None, f"{where}: sliding_window", window, "null: full attention")
    config = {"num_local_experts": 8, "num_experts_per_tok": 2, **config}
    return {
        "experts": _number(config, "num_local_experts", where),
        "experts_per_token": _number(config, "num_experts_per_tok", where),
        "expert_ffn": _number(config, "intermediate_size", where),
        "renormalise_gates": True,
    }


def config_of(model: cfg.Model, context: int = 32_768) -> dict[str, Any]:
    """A config.json that transformers reads as this model, in old and new spellings.

    Args:   context: max_position_embeddings, which our model does not have.
    Raises: ValueError if no model type of transformers computes this model, naming the fields.
    """
    require(
        model.vocab_size is not None, "config.model.vocab_size", None, "the size of the embedding"
    )
    family = model.family
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": "qwen3_5_moe_text" if family == "qwen3_5_moe" else family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": context,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        **_rope_of(model),
    }
    if family == "llama":
        config["mlp_bias"] = False
    if family in _HYBRID:
        kinds = ("linear_attention", "full_attention")
        every = model.full_attention_every
        config |= {
            "full_attention_interval": every,
            "layer_types": [kinds[(i + 1) % every == 0] for i in range(model.layers)],
            "linear_num_key_heads": model.linear_key_heads,
            "linear_num_value_heads": model.linear_value_heads,
            "linear_key_head_dim": model.linear_key_dim,
            "linear_value_head_dim": model.linear_value_dim,
            "linear_conv_kernel_dim": model.conv_width,
            "shared_expert_intermediate_size": model.shared_ffn,
        }
    if model.dense_ffn or family not in _MOE:
        config["intermediate_size"] = model.dense_ffn
    if family in _MOE:
        config |= _experts_of(model)
    _check_same(model, config)
    return config


def _experts_of(model: cfg.Model) -> dict[str, Any]:
    if model.family == "mixtral":
        return {
            "intermediate_size": model.expert_ffn,
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "sliding_window": None,
        }
    return {
        "num_experts": model.experts,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn,
        "norm_topk_prob": model.renormalise_gates,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(model.dense_layers),
    }


def _rope_of(model: cfg.Model) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    out: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if model.rope_llama3 is not None:
        factor, low, high, old = model.rope_llama3
        rope |= {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": old,
        }
        out["rope_scaling"] = dict(rope)
    if model.family in _HYBRID or model.rotary_fraction != 1:
        rope["partial_rotary_factor"] = out["partial_rotary_factor"] = model.rotary_fraction
    return {**out, "rope_parameters": rope}


def _check_same(model: cfg.Model, config: Json) -> None:
    """The configuration says this model again; what it cannot say is named."""
    where = f"config.model (family {model.family})"
    need = "a model that this family of transformers computes"
    fix = "another family, or save a run's own checkpoint instead"
    try:
        again = model_of(config, model.compute_dtype, where)
    except ValueError as error:
        raise ValueError(message(where, str(error), need, fix)) from error
    names = [field.name for field in dataclasses.fields(model)]
    if model.experts == 0:  # fields that then mean nothing
        for name in ("experts_per_token", "expert_ffn", "renormalise_gates"):
            names.remove(name)
    elif not model.dense_layers:
        names.remove("dense_ffn")
    if model.full_attention_every == 1:
        names = [n for n in names if not n.startswith("linear_") and n != "conv_width"]
    wrong = {
        name: getattr(model, name) for name in names if getattr(model, name) != getattr(again, name)
    }
    require(not wrong, where, ", ".join(f"{k}={v}" for k, v in wrong.items()), need, fix)
