"""What the model section refuses, and what a quant section refuses on a model."""

from typing import Any

from trace_jax import layer_choice, layer_kinds
from trace_jax.checks import require
from trace_jax.field_checks import check
from trace_jax.guidance.record import SITES

FAMILIES = ("qwen3_moe", "qwen3", "llama", "mixtral", "qwen3_next", "qwen3_5_moe")


def model(section: Any) -> None:
    """Shapes that fit together."""
    counts = ("width", "layers", "heads", "kv_heads", "head_dim", "vocab_size", "conv_width")
    optional = ("experts", "shared_ffn", "dense_ffn")
    least: dict[str, int | float] = dict.fromkeys((*counts, "full_attention_every"), 1)
    least |= dict.fromkeys(optional, 0)
    check(
        section,
        "config.model",
        choices={"compute_dtype": ("bfloat16", "float32"), "family": FAMILIES},
        least=least,
        above={"rope_theta": 0, "norm_eps": 0, "rotary_fraction": 0},
        most={"rotary_fraction": 1},
    )
    require(
        section.heads % section.kv_heads == 0,
        "config.model.heads",
        section.heads,
        f"a multiple of kv_heads ({section.kv_heads})",
        "every key/value head serves the same number of query heads",
    )
    rotated = section.head_dim * section.rotary_fraction
    require(
        rotated == int(rotated) and rotated % 2 == 0 and rotated > 0,
        "config.model.head_dim",
        f"{section.head_dim}, of which {rotated:g} are rotated",
        "an even number of them",
        "rotary embeddings turn pairs of values",
    )
    _check_ffn(section)
    if section.full_attention_every > 1:
        _check_linear(section)


def _check_ffn(section: Any) -> None:
    """Experts, dense MLPs or both; a layer has one of them."""
    if section.experts:
        for name in ("experts_per_token", "expert_ffn"):
            value = getattr(section, name)
            require(value >= 1, f"config.model.{name}", value, ">= 1")
        require(
            section.experts_per_token <= section.experts,
            "config.model.experts_per_token",
            section.experts_per_token,
            f"<= experts ({section.experts})",
        )
    else:
        fix = "a model without experts is dense in every layer"
        for name, off in (("shared_ffn", 0), ("dense_layers", ())):
            value = getattr(section, name)
            require(value == off, f"config.model.{name}", value, f"{off} with experts=0", fix)
    ids = section.dense_layers
    require(
        list(ids) == sorted(set(ids)) and all(0 <= i < section.layers for i in ids),
        "config.model.dense_layers",
        ids,
        f"different layers in order, 0..{section.layers - 1}",
    )
    require(
        section.experts == 0 or len(ids) < section.layers,
        "config.model.dense_layers",
        ids,
        "some layer with experts",
        "experts=0 makes every layer dense",
    )
    require(
        section.dense_ffn > 0 or (section.experts > 0 and not ids),
        "config.model.dense_ffn",
        section.dense_ffn,
        "the width of dense MLPs, >= 1",
    )


def _check_linear(section: Any) -> None:
    """Shapes of Gated DeltaNet."""
    names = ("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim")
    for name in names:
        value = getattr(section, name)
        need = ">= 1 where full_attention_every > 1"
        require(value >= 1, f"config.model.{name}", value, need)
    require(
        section.linear_value_heads % section.linear_key_heads == 0,
        "config.model.linear_value_heads",
        section.linear_value_heads,
        f"a multiple of linear_key_heads ({section.linear_key_heads})",
    )
    require(
        section.full_attention_every <= section.layers,
        "config.model.full_attention_every",
        section.full_attention_every,
        f"<= layers ({section.layers}): some layer with full attention",
    )


def quant_on_model(model: Any, quant: Any) -> None:
    """Every format has a layer to be used in, and the guided layers are among those."""
    first, stop = quant.keep_first, model.layers - quant.keep_last
    require(
        first < stop,
        "config.quant.keep_first + keep_last",
        f"{quant.keep_first} + {quant.keep_last}",
        f"fewer than the {model.layers} layers, or nothing is quantised",
    )
    for name in ("weights", "acts", "kv"):
        if getattr(quant, name) is not None:
            _check_used(model, quant, name)
    layer_choice.choose(quant.guide_layers, guidable_sites(quant, model), first, stop)


def _check_used(model: Any, quant: Any, name: str) -> None:
    """Some layer has what a format is of."""
    components = quantised_components(quant)[name]
    inside = range(quant.keep_first, model.layers - quant.keep_last)
    found = any(i in inside for c in components for i in layer_kinds.layers_with(model, c))
    got, need = f"{getattr(quant, name)} for {' and '.join(components)}", "a layer that has it"
    dense = components == ("moe",) and model.experts == 0
    fix = f"quant.{name}=none, or keep fewer layers"
    fix = f"quant.mlps=all quantises dense MLPs; or quant.{name}=none" if dense else fix
    where = f"config.quant.{name}"
    require(found, where, f"{got} in layers {inside.start}..{inside.stop - 1}", need, fix)


def quantised_components(quant: Any) -> dict[str, tuple[str, ...]]:
    """What of a layer each format of the quant section is of."""
    ffn = ("moe", "mlp") if quant.mlps == "all" else ("moe",)
    return {"weights": ffn, "acts": ffn, "kv": ("attention",)}


def guidable_sites(quant: Any, model: Any) -> dict[str, tuple[int, ...]]:
    """Sites that a rollout under this section can record, and the layers that have them."""
    components, found = quantised_components(quant), {}
    for site, component in SITES.items():
        name = "kv" if component == "attention" else "acts"
        hidden = site.endswith("_hidden") and not quant.guide_hidden
        if getattr(quant, name) is None or component not in components[name] or hidden:
            continue
        inside = range(quant.keep_first, model.layers - quant.keep_last)
        ids = tuple(i for i in layer_kinds.layers_with(model, component) if i in inside)
        if ids:
            found[site] = ids
    return found
