"""What an NVFP4 checkpoint says about itself, and which of our formats it can hold."""

import dataclasses
import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from absl import logging

from trace_jax import config as cfg
from trace_jax import formats, layer_kinds, model_checks
from trace_jax.checks import message, require
from trace_jax.formats.nvfp4 import NVFP4
from trace_jax.hf import config_json, load, names, nvfp4_tensors

OWN = "trace_jax_quant.json"  # our quant section; a server does not read it
_DECODES = ("exact", "modelopt")  # conventions whose value is code * scale * global


def check(model: cfg.Model, quant: cfg.Quant, at: str = "save_nvfp4: config.quant.") -> None:
    """Whether the layout can hold what a sampler under `quant` runs with.

    Args:   at: what an error says before the name of the field.
    Raises: ValueError naming the field, why not, and what can be done.
    """
    fix = "save() writes BF16"
    require(quant.rollout == "fp4", f"{at}rollout", quant.rollout, "a sampler in FP4", fix)
    need = "a format of weights; save() writes BF16"
    require(quant.weights is not None, f"{at}weights", None, need)
    weights = formats.get(quant.weights or "")
    need = "nvfp4: the layout holds E2M1 codes in blocks of 16 with E4M3 scales"
    require(isinstance(weights, NVFP4), f"{at}weights", quant.weights, need)
    convention = getattr(weights, "convention", "")
    need = f"a convention of {list(_DECODES)}, whose values are code * scale * global scale"
    why = f"{quant.weights}, which divides by its global scale"
    require(convention in _DECODES, f"{at}weights", why, need, "weights=nvfp4")
    if quant.acts is not None:
        need = "nvfp4 or none: what servers do with activations beside NVFP4 weights"
        require(isinstance(formats.get(quant.acts), NVFP4), f"{at}acts", quant.acts, need)
    if quant.kv is not None:
        _check_kv(model, quant, f"{at}kv")


def _check_kv(model: cfg.Model, quant: cfg.Quant, at: str) -> None:
    kv = formats.get(quant.kv or "")
    need = "nvfp4: servers keep E2M1 codes with E4M3 scales"
    require(
        isinstance(kv, NVFP4), at, quant.kv, need, "kv=none, and another KV format in the server"
    )
    need = "global_rule=one: a server has one global scale a layer, not one a token"
    one = getattr(kv, "global_rule", "") == "one"
    require(one, at, quant.kv, need, "kv=nvfp4:global_rule=one")
    kept = [i for i in layer_kinds.layers_with(model, "attention") if not _inside(model, quant, i)]
    need = "a quantised KV cache in every layer: servers have one KV format for all"
    fix = "keep_first=0 and keep_last=0, or kv=none (and a BF16 cache in the server)"
    require(not kept, at, f"layers {kept} in high precision (keep_first, keep_last)", need, fix)


def _inside(model: cfg.Model, quant: cfg.Quant, layer: int) -> bool:
    return quant.keep_first <= layer < model.layers - quant.keep_last


def sections(
    model: cfg.Model, quant: cfg.Quant, table: Sequence[names.Tensor], packed: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`quantization_config` of config.json, and hf_quant_config.json."""
    algorithm = "NVFP4" if quant.acts is not None else "W4A16_NVFP4"
    ignore, kv = exclusions(table, packed), "NVFP4" if quant.kv is not None else None
    four = {"num_bits": 4, "type": "float", "group_size": nvfp4_tensors.BLOCK}
    group = {"weights": {**four, "dynamic": False}, "targets": ["Linear"]}
    if quant.acts is not None:
        group["input_activations"] = {**four, "dynamic": True}
    producer = {"name": "trace_jax", "version": "1"}
    flat = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": nvfp4_tensors.BLOCK,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "producer": producer,
    }
    if kv is not None:  # a name, as ModelOpt has it: only FP8 has a scheme of its own
        flat["kv_cache_scheme"] = kv
    legacy = {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": kv,
            "group_size": nvfp4_tensors.BLOCK,
            "exclude_modules": ignore,
        },
    }
    return flat, legacy


def exclusions(table: Sequence[names.Tensor], packed: Collection[str]) -> list[str]:
    """Shell-style patterns for the linear modules that are not packed, and for no other.

    A pattern is matched with a module's whole name: `mlp.gate` is not `mlp.gate_proj`.
    """
    found = []
    inside = {name.removesuffix(".weight") for name in packed}
    for row in table:
        module = row.name.removesuffix(".weight")
        if len(row.shape) != 2 or row.name in packed or module.endswith("embed_tokens"):
            continue
        head, _, last = module.rpartition(".")
        # a server fuses q, k and v: the pattern is of the module around them
        wide = (
            f"{head}*" if head.endswith(("self_attn", "linear_attn", "shared_expert")) else module
        )
        if ".experts." in module:
            wide = f"{module.partition('.experts.')[0]}.experts*"
        elif head.endswith("mlp") and last in ("gate_proj", "up_proj", "down_proj"):
            wide = f"{head}*"
        taken = [m for m in inside if wide.endswith("*") and m.startswith(wide[:-1])]
        assert not taken, (wide, taken)
        if wide not in found:
            found.append(wide)
    return found


def own(model: cfg.Model, quant: cfg.Quant, kv_scale: float = 1.0) -> dict[str, Any]:
    """What `read` needs to return exactly this model and quant section.

    The scale that servers were given for their KV cache stands beside it; our sampler's is 1.
    """
    kept = {"compute_dtype": model.compute_dtype, "quant": dataclasses.asdict(quant)}
    return kept if quant.kv is None else {**kept, "kv_scale": kv_scale}


def read(
    directory: pathlib.Path, config: config_json.Json, packed: Collection[str]
) -> tuple[cfg.Model, cfg.Quant]:
    """Model and quant section: our own as it was, another tool's as its packed weights say.

    Raises: ValueError naming the file if the section is no section, or none of this layout, whose
            values would not be what the file's codes mean.
    """
    where, file = str(directory / "config.json"), directory / OWN
    if not file.is_file():
        model = config_json.model_of(config, "bfloat16", where)
        return model, _infer(model, config, packed, where)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        quant = cfg.Quant(**kept["quant"])
        dtype = kept["compute_dtype"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        need = "the file that save_nvfp4 wrote"
        fix = "without it the section is read off the weights"
        raise ValueError(message(str(file), repr(error), need, fix)) from error
    need = f"one of {list(load.DTYPES)}"
    require(dtype in load.DTYPES, f"{file}: compute_dtype", repr(dtype), need)
    model = config_json.model_of(config, dtype, where)
    check(model, quant, f"{file}: quant.")
    try:
        model_checks.quant_on_model(model, quant)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return model, quant


def _infer(
    model: cfg.Model, config: config_json.Json, packed: Collection[str], where: str
) -> cfg.Quant:
    numbers = sorted({int(name.partition("layers.")[2].partition(".")[0]) for name in packed})
    require(bool(numbers), where, "no packed weights", "some, as quantization_config says")
    section = config_json.quantisation(config)
    kept = numbers[0], model.layers - 1 - numbers[-1]
    dense = {i for i in numbers if i in layer_kinds.layers_with(model, "mlp")}
    return cfg.Quant(
        rollout="fp4",
        trainer="qat",
        weights="nvfp4:convention=modelopt",
        acts=None if section["quant_algo"].startswith("W4A16") else "nvfp4",
        kv=_infer_kv(section.get("kv_cache_scheme"), any(kept), where),
        mlps="all" if dense else "experts",
        keep_first=kept[0],
        keep_last=kept[1],
    )


def _infer_kv(scheme: Any, kept: bool, where: str) -> str | None:
    """The KV format; what the sampler does not compute is left out, and said."""
    four = scheme == "NVFP4" or (isinstance(scheme, dict) and scheme.get("num_bits") == 4)
    if four and not kept:
        return "nvfp4:global_rule=one"
    if scheme is not None:
        why = "in every layer, of which some are in high precision" if four else "is not NVFP4"
        logging.warning(
            "%s: kv_cache_scheme %s %s: the sampler keeps its KV cache in high precision",
            where,
            scheme,
            why,
        )
    return None
