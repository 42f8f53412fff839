"""The sampler's weights as an NVFP4 checkpoint that servers load, and back.

What is written decodes to the sampler's values bit for bit: the same codes, E4M3 scales and global
scales, and everything else in the dtype in which the sampler holds it. See docs/models.md for what
a server has to be told about activations, whose scales we compute for each token.
"""

import collections
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from trace_jax import config as cfg
from trace_jax import layer_kinds, stacks, weight_sync
from trace_jax.checks import message, require
from trace_jax.hf import (
    config_json,
    config_keys,
    directory,
    files,
    load,
    names,
    nvfp4_config,
    nvfp4_tensors,
    save,
)
from trace_jax.hf.nvfp4_tensors import GLOBAL, Packed
from trace_jax.qat import plan as qat_plan
from trace_jax.types import Params
from trace_jax.weight_sync import SamplerWeights

_Slab = tuple[names.Path, int | None]
_Get = Callable[[_Slab], Any]
_Find = Callable[[_Slab], tuple[Any, int | None]]


def save_nvfp4(
    path: str | pathlib.Path,
    model: cfg.Model,
    quant: cfg.Quant,
    weights: SamplerWeights | Params,
    tokenizer: Any = None,
    *,
    input_scales: Mapping[str, float] | None = None,
    kv_scale: float = 1.0,
    like: str | pathlib.Path | None = None,
    multiple: int = 64,
    max_shard_bytes: int = directory.SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint in the layout of ModelOpt, with packed experts (and MLPs).

    Activations are quantised for each token, as the server's per-token mode does, and need no scale
    on disk; a server that uses static scales reads `input_scales`, or takes 1 where there is none.

    Args:   weights: what the sampler runs with, or master weights to be quantised now.
            input_scales: amax / (6 * 448) of the input of a linear module, by its name
            ("model.layers.0.mlp.experts.0.down_proj"), from a calibration.
            kv_scale: global scale of keys and values that a server is told, where it keeps them in
            NVFP4. Ours is 1; SGLang multiplies it by 6 on SM100, which 1/6 undoes.
            multiple: of which rows and columns of a packed matrix have to be one. Servers lay
            scales out in tiles of 4 blocks of 16 columns; at least 16.
            The rest as in `save`.
    Raises: ValueError if a format has no such layout, if a width is no such multiple, if a weight
            is NaN or infinite, or as `save`.
    """
    nvfp4_config.check(model, quant)
    weights = weights if isinstance(weights, SamplerWeights) else _sync(model, quant, weights)
    model = save.with_vocabulary(model, weights.params)
    table = names.table(model)
    find = _finder(model, quant, weights)
    packed = packed_names(model, quant, table)
    _check_widths(table, packed, multiple)
    beside = _beside(model, quant, input_scales or {}, kv_scale, packed)
    declared: dict[str, files.Declared] = {}
    for row in table:
        if row.name in packed:
            declared |= nvfp4_tensors.parts(row.name, row.shape)
        else:
            declared[row.name] = (find(row.places[0].slab)[0].dtype, row.shape)
    declared |= dict.fromkeys(beside, (np.float32, ()))
    config = save.describe(model, model.compute_dtype, tokenizer, like)
    section, legacy = nvfp4_config.sections(model, quant, table, packed)

    def stream() -> Iterator[np.ndarray]:
        return _values(table, packed, functools.partial(_get, find), beside)

    _check_numbers(weights.params, lambda: zip(declared, stream(), strict=True))
    with directory.fresh(path, overwrite=overwrite) as new:
        directory.write_json(new / "config.json", {**config, "quantization_config": section})
        directory.write_json(new / "hf_quant_config.json", legacy)
        directory.write_json(new / nvfp4_config.OWN, nvfp4_config.own(model, quant, kv_scale))
        directory.write_tensors(new, declared, stream(), max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(new)


def _sync(model: cfg.Model, quant: cfg.Quant, params: Params) -> SamplerWeights:
    """Of master weights what the sampler runs with; an infinite one could not be seen in it."""
    model = save.with_vocabulary(model, params)
    save.check(model, params)
    table = names.table(model)
    kinds = dict.fromkeys((row.name for row in table), np.dtype(np.float32))
    values = save.values(table, params, kinds)
    _check_numbers(params, lambda: zip(kinds, values, strict=True))
    return weight_sync.make_sync(model, quant)(params, 0)


def _check_numbers(tree: Any, named: Callable[[], Iterable[tuple[str, np.ndarray]]]) -> None:
    """Every weight is a finite number; tensors are looked through only to name the others."""
    if all(
        bool(_finite(leaf, path[-1] == jax.tree_util.DictKey("scales")))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ):
        return
    bad = [name for name, value in named() if not np.isfinite(value.astype(np.float32)).all()]
    need = "finite numbers"
    require(False, "save_nvfp4: weights", f"NaN or infinity in {files.some(bad)}", need)


@functools.partial(jax.jit, static_argnames=("scales",))
def _finite(leaf: jax.Array, scales: bool) -> jax.Array:
    if scales:  # E4M3 bytes
        return ~jnp.any((leaf & 0x7F) == 0x7F)
    return (
        jnp.all(jnp.isfinite(leaf)) if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.array(True)
    )


def packed_names(
    model: cfg.Model, quant: cfg.Quant, table: Sequence[names.Tensor]
) -> frozenset[str]:
    """Names of the weights that the sampler holds packed."""
    rows = stacks.ids_by_stack(layer_kinds.kinds(model))
    packed: dict[str, set[int]] = {}  # layers whose experts or MLP are
    for segment in qat_plan.side_segments(quant, model, quant.rollout):
        for component in weight_sync.packed_components(segment):
            packed.setdefault(component, set()).update(stacks.ids_in(segment)[component])
    found = set()
    for row in table:
        path, number = row.places[0].slab
        matrix = path[-1] in weight_sync.MATRICES and number is not None
        if matrix and rows[path[1]][number or 0] in packed.get(path[1], ()):
            found.add(row.name)
    return frozenset(found)


def _finder(model: cfg.Model, quant: cfg.Quant, weights: SamplerWeights) -> _Find:
    """Looks up the sampler's leaf that holds a row of a stack, and where: None if it is no stack.

    Layers that are packed and layers that are not are different leaves, in different segments.
    """
    segments = qat_plan.side_segments(quant, model, quant.rollout)
    rows = stacks.ids_by_stack(layer_kinds.kinds(model))

    def find(slab: _Slab) -> tuple[Any, int | None]:
        path, number = slab
        if path[0] != "layers":
            return weights.params[path[0]], number
        assert number is not None, slab
        layer = rows[path[1]][number]
        at = next(i for i, s in enumerate(segments) if s.start <= layer < s.stop)
        leaf: Any = weights.params["segments"][at]
        for key in path[1:]:
            leaf = leaf[key]
        return leaf, stacks.ids_in(segments[at])[path[1]].index(layer)

    return find


def _get(find: _Find, slab: _Slab) -> Any:
    """A row of a stack on the host: an array, or what is packed; row None: the whole leaf."""
    leaf, inside = find(slab)

    def fetch(a: Any) -> np.ndarray:
        return save.fetch(a, inside, a.dtype.name)

    if inside is None or not isinstance(leaf, dict):
        return leaf if inside is None else fetch(leaf)
    codes, scales, global_ = (fetch(leaf[name]) for name in ("codes", "scales", "global"))
    return Packed(codes=codes, scales=scales, global_=global_)


def _values(
    table: Sequence[names.Tensor],
    packed: frozenset[str],
    get: _Get,
    beside: Mapping[str, float],
) -> Iterator[np.ndarray]:
    """The tensors of the checkpoint; of the sampler's weights one row of a leaf is on the host."""
    left = collections.Counter(place.slab for row in table for place in row.places)
    slabs: dict[_Slab, Any] = {}
    for row in table:
        found = []
        for place in row.places:
            slab = place.slab
            if slab not in slabs:
                slabs[slab] = get(slab) if place.index else np.asarray(get(slab))
            found.append((slabs[slab], place.within))
            left[slab] -= 1
            if not left[slab]:
                del slabs[slab]
        if row.name in packed:
            one = _cut(*found[0])
            yield from (one.codes, one.scales.view(ml_dtypes.float8_e4m3fn), one.global_)
        else:
            yield row.join(*(whole[within] for whole, within in found))
    yield from (np.asarray(value, np.float32) for value in beside.values())


def _cut(whole: Packed, within: names.Index) -> Packed:
    """One matrix of a row of a stack; the halves of a fused one share its global scale."""
    numbers = tuple(i for i in within if not isinstance(i, slice))
    global_ = whole.global_[numbers]
    return Packed(codes=whole.codes[within], scales=whole.scales[within], global_=global_)


def _check_widths(table: Sequence[names.Tensor], packed: frozenset[str], multiple: int) -> None:
    good = multiple >= nvfp4_tensors.BLOCK and multiple % nvfp4_tensors.BLOCK == 0
    require(good, "save_nvfp4: multiple", multiple, f"a multiple of {nvfp4_tensors.BLOCK}")
    for row in table:
        if row.name in packed:
            odd = [n for n in row.shape if n % multiple]
            need = f"multiples of {multiple}: servers lay scales out in whole tiles"
            fix = "pad experts or MLPs with zero rows, or multiple=16 for a server that can do less"
            where = f"save_nvfp4: {row.name}"
            require(not odd, where, f"a width of {odd[0] if odd else 0}", need, fix)


def _beside(
    model: cfg.Model,
    quant: cfg.Quant,
    input_scales: Mapping[str, float],
    kv_scale: float,
    packed: frozenset[str],
) -> dict[str, float]:
    """Scales of what is no weight: of the KV cache, and of activations."""
    out = {}
    good = 0 < kv_scale < float("inf") and (quant.kv is not None or kv_scale == 1)
    need = "a finite number > 0; 1 where quant.kv is none"
    require(good, "save_nvfp4: kv_scale", kv_scale, need)
    if quant.kv is not None:
        for i in layer_kinds.layers_with(model, "attention"):
            for which in ("k", "v"):
                out[f"model.layers.{i}.self_attn.{which}_proj.{which}_scale"] = kv_scale
    unknown = [name for name in input_scales if f"{name}.weight" not in packed]
    need = "modules with packed weights"
    require(not unknown, "save_nvfp4: input_scales", files.some(unknown), need)
    bad = [name for name, value in input_scales.items() if not 0 < value < float("inf")]
    require(not bad, "save_nvfp4: input_scales", files.some(bad), "finite numbers > 0")
    return out | {f"{name}.input_scale": value for name, value in input_scales.items()}


def load_quantised(path: str | pathlib.Path) -> tuple[cfg.Model, cfg.Quant, SamplerWeights]:
    """Reads an NVFP4 checkpoint as the sampler's weights, version 0.

    The exact inverse of `save_nvfp4`. Of a checkpoint that another tool made, the quant section
    says which layers are packed; the sampler packs experts and MLPs, so others are refused.
    Raises: ValueError as `load`, and if packed and plain matrices are mixed within a component.
    """
    where = pathlib.Path(path)
    config = config_json.read(where)
    good, fix = config_json.is_nvfp4(config), "trace_jax.load reads checkpoints that are not"
    at = str(where / "config.json")
    got = config_keys.flat(config).get("quantization_config")
    require(good, f"{at}: quantization_config", got, "quant_algo NVFP4", fix)
    with nvfp4_tensors.Dequantised(files.read_headers(where)) as source:
        model, quant = nvfp4_config.read(where, config, source.packed)
        table = names.table(model, names.layout_of(model, _shapes(source)))
        load.check(model, table, source, str(where))
        _check_packed(where, source.packed, packed_names(model, quant, table))
        rest, layers = _read(model, table, source)
    segments = qat_plan.side_segments(quant, model, quant.rollout)
    params = weight_sync.assemble(layers, segments, rest)
    return model, quant, weight_sync.sampler_weights(params, 0)


def _shapes(source: files.Reader) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in source.tensors.items()}


def _check_packed(where: pathlib.Path, found: set[str], wanted: frozenset[str]) -> None:
    wrong = {
        "not packed": {name for name in wanted if name not in found},
        "packed, which the sampler does not do": {name for name in found if name not in wanted},
    }
    listed = [f"{what}: {files.some(some)}" for what, some in wrong.items() if some]
    if listed:
        need = "NVFP4 in all experts (or MLPs) of the layers that have it, and nowhere else"
        fix = "trace_jax.load dequantises any of them"
        raise ValueError(message(str(where), "; ".join(listed), need, fix))


def _read(
    model: cfg.Model, table: Sequence[names.Tensor], source: nvfp4_tensors.Dequantised
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What belongs to no layer, and each layer's tree."""
    shapes = load.leaf_shapes(model, model.compute_dtype)
    rows = stacks.ids_by_stack(layer_kinds.kinds(model))
    rest: dict[str, Any] = {}
    layers: list[dict[str, Any]] = [{} for _ in range(model.layers)]
    for row in table:
        packed = row.name in source.packed
        found = [source.read_packed(row.name)] if packed else row.split(source.read(row.name))
        for place, value in zip(row.places, found, strict=True):
            leaf: Any = shapes
            for key in place.path:
                leaf = leaf[key]
            path, number = place.slab
            if number is None:
                rest[path[0]] = jnp.asarray(value).astype(leaf.dtype)
                continue
            tree = layers[rows[path[1]][number]]
            for key in path[1:-1]:
                tree = tree.setdefault(key, {})
            if isinstance(value, Packed):
                packed_leaf = tree.setdefault(path[-1], _room(leaf.shape[1:]))
                _place(packed_leaf, value, place, row.name)
            else:
                room = tree.setdefault(path[-1], np.empty(leaf.shape[1:], leaf.dtype))
                room[place.within] = value.astype(leaf.dtype)
    return rest, layers


def _room(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    *rows, width = shape
    return {
        "codes": np.empty((*rows, width // 2), np.uint8),
        "scales": np.empty((*rows, width // nvfp4_tensors.BLOCK), np.uint8),
        "global": np.full((*rows[:-1], 1, 1), np.nan, np.float32),
    }


def _place(room: dict[str, np.ndarray], value: Packed, place: names.Place, name: str) -> None:
    """Writes one matrix; the halves of a fused one must have the same global scale."""
    room["codes"][place.within], room["scales"][place.within] = value.codes, value.scales
    numbers = tuple(i for i in place.within if not isinstance(i, slice))
    known = room["global"][numbers]
    same = bool(np.isnan(known).all()) or bool((known == value.global_).all())
    need = f"{known.item()}, as the other half of gate and up has"
    fix = "one global scale for both: requantise, or trace_jax.load to dequantise"
    require(same, f"{name}{GLOBAL}", value.global_.item(), need, fix)
    room["global"][numbers] = value.global_
