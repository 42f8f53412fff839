"""A model and its parameters as a directory that transformers and servers load."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import config as cfg
from trace_jax.checks import message, require
from trace_jax.hf import config_json, config_keys, directory, files, load, names
from trace_jax.types import Params

# keys of another checkpoint's config.json that describe how *it* is stored
_NOT_KEPT = ("text_config", "vision_config", "quantization_config", "architectures", "auto_map")
_NOT_KEPT += ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # heads that are not written
# released hybrids have these in float32 beside BF16; transformers and servers read either
_DECAYS: tuple[names.Path, ...] = (("layers", "linear", "A_log"), ("layers", "linear", "norm"))


def save(
    path: str | pathlib.Path,
    model: cfg.Model,
    params: Params,
    dtype: str = "bfloat16",
    tokenizer: Any = None,
    *,
    like: str | pathlib.Path | None = None,
    max_shard_bytes: int = directory.SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes safetensors (one tensor for each expert), config.json and the tokenizer.

    Written beside `path` and renamed when complete. The host holds one layer of one parameter.

    Args:   params: as `load` and `models.transformer.init` give them. dtype: of the tensors, see
            `dtypes` for the exceptions.
            tokenizer: a `data.tokenizer.Tokenizer`; adds its files and generation_config.json.
            like: a checkpoint directory; what its config.json says beyond our model (context
            length, token ids) is kept, and so are dtypes that differ from its embedding's.
    Raises: ValueError if no model type of transformers computes this model, or if parameters are
            missing, unknown or of another shape, naming them; FileExistsError as `directory.fresh`.
    """
    require(dtype in load.DTYPES, "save: dtype", repr(dtype), f"one of {list(load.DTYPES)}")
    model = with_vocabulary(model, params)
    check(model, params)
    config = describe(model, dtype, tokenizer, like)
    table = names.table(model)
    kinds = dtypes(model, params, table, dtype, like)
    declared = {row.name: (kinds[row.name], row.shape) for row in table}
    with directory.fresh(path, overwrite=overwrite) as new:
        directory.write_json(new / "config.json", config)
        directory.write_tensors(new, declared, values(table, params, kinds), max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(new)


def with_vocabulary(model: cfg.Model, params: Mapping[str, Any]) -> cfg.Model:
    """The model with the size of its embedding."""
    where, need = "save: params", "a nested dict with an embedding (V, D) at 'embed'"
    require(getattr(params.get("embed"), "ndim", 0) == 2, where, sorted(params), need)
    return dataclasses.replace(model, vocab_size=params["embed"].shape[0])


def describe(
    model: cfg.Model, dtype: str, tokenizer: Any = None, like: str | pathlib.Path | None = None
) -> dict[str, Any]:
    """The config.json."""
    config = config_json.config_of(model) | {"dtype": dtype, "torch_dtype": dtype}
    kept: dict[str, Any] = {}
    if like is not None:
        whole = config_keys.flat(config_json.read(like))
        kept = {key: value for key, value in whole.items() if key not in _NOT_KEPT}
        config.pop("max_position_embeddings" if "max_position_embeddings" in kept else "", None)
    if tokenizer is not None:
        kept |= {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    return {**kept, **config}


def dtypes(
    model: cfg.Model,
    params: Params,
    table: Sequence[names.Tensor],
    dtype: str,
    like: str | pathlib.Path | None = None,
) -> dict[str, np.dtype]:
    """The dtype of each tensor of a table.

    That is `dtype`, but for tensors that `like` holds in another dtype than its embedding: they
    stay as they are there if `dtype` is the embedding's, or if theirs is wider. Where `like` says
    nothing, the decays A_log and the norm of Gated DeltaNet are float32 unless `dtype` is exact.
    """
    main = np.dtype(jnp.dtype(dtype))
    exact = {path: _is_exact(params, path, main) for path in _DECAYS}
    main_there, theirs = _dtypes_of(model, like)
    out = {}
    for row in table:
        path = row.places[0].path
        kind = np.dtype(np.float32) if not exact.get(path, True) else main
        there = theirs.get(row.name, theirs.get(row.places[0].slab))
        odd = there is not None and there != main_there
        if there is not None and (main == main_there or (odd and there.itemsize > main.itemsize)):
            kind = there
        out[row.name] = kind
    return out


def _is_exact(params: Params, path: names.Path, dtype: np.dtype) -> bool:
    leaf: Any = params
    for key in path:
        if key not in leaf:
            return True
        leaf = leaf[key]
    leaf = jnp.asarray(leaf)
    return bool(jnp.all(leaf == leaf.astype(dtype).astype(leaf.dtype)))


def _dtypes_of(
    model: cfg.Model, like: str | pathlib.Path | None
) -> tuple[np.dtype | None, dict[Any, np.dtype]]:
    """Dtypes of a checkpoint: of its embedding, and of tensors by our name and by slab."""
    if like is None or not any(pathlib.Path(like).glob("*.safetensors")):
        return None, {}
    stored = files.read_headers(like)
    layout = names.layout_of(model, {name: tensor.shape for name, tensor in stored.items()})
    out: dict[Any, np.dtype] = {}
    for row in names.table(model, layout):
        if row.name in stored and stored[row.name].dtype in load.READABLE:
            kind = min(stored[row.name].dtype, np.dtype(np.float32), key=lambda k: k.itemsize)
            out[f"model.{row.name.removeprefix(layout.prefix)}"] = kind
            out |= {place.slab: kind for place in row.places}
    return out.get("model.embed_tokens.weight"), out


def check(model: cfg.Model, params: Params) -> None:
    """The parameters are those of the model."""
    wanted = _flat(load.leaf_shapes(model, "float32"))
    found = _flat(params)
    both = wanted.keys() & found.keys()
    shapes = [
        f"{name} is {tuple(found[name].shape)}, not {wanted[name].shape}"
        for name in both
        if tuple(found[name].shape) != wanted[name].shape
    ]
    wrong = {
        "missing": wanted.keys() - found.keys(),
        "unknown": found.keys() - wanted.keys(),
        "of another shape than the model says": shapes,
    }
    listed = [f"{len(some)} {what}: {files.some(some)}" for what, some in wrong.items() if some]
    if listed:
        need = f"the {len(wanted)} parameters of {model.family} with {model.layers} layers"
        raise ValueError(message("save: params", "; ".join(listed), need))


def _flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in leaves}


def values(
    table: Sequence[names.Tensor], params: Params, kinds: Mapping[str, np.dtype]
) -> Iterator[np.ndarray]:
    """The tensors of a table, one after another, in their dtypes, which are given by name."""
    left = collections.Counter(
        (place.slab, kinds[row.name]) for row in table for place in row.places
    )
    slabs: dict[Any, np.ndarray] = {}
    for row in table:
        parts = []
        for place in row.places:
            key = place.slab, kinds[row.name]
            if key not in slabs:
                leaf: Any = params
                for step in place.path:
                    leaf = leaf[step]
                slabs[key] = fetch(leaf, place.slab[1], kinds[row.name].name)
            parts.append(slabs[key][place.within])
            left[key] -= 1
            if not left[key]:
                del slabs[key]
        yield row.join(*parts)


def fetch(leaf: Any, number: int | None, dtype: str) -> np.ndarray:
    """A leaf, or one row of a stack, on the host, put together from the devices' parts."""
    leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    out = np.empty(leaf.shape if number is None else leaf.shape[1:], jnp.dtype(dtype))
    for shard in leaf.addressable_shards:
        if shard.replica_id != 0:
            continue
        part, place = shard.data, shard.index
        if number is not None:
            start, stop, _ = place[0].indices(leaf.shape[0])
            if not start <= number < stop:
                continue
            part, place = _row(part, np.int32(number - start)), place[1:]
        out[place] = part.astype(jnp.dtype(dtype))
    return out


@jax.jit
def _row(part: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(part, row, keepdims=False)
