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
from trace_jax.hf import config_json, directory, files, load, names
from trace_jax.types import Params

# keys of another checkpoint's config.json that describe how *it* is stored
_NOT_KEPT = ("text_config", "vision_config", "quantization_config", "architectures", "auto_map")


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

    Args:   params: as `load` and `models.transformer.init` give them. dtype: of all tensors.
            tokenizer: a `data.tokenizer.Tokenizer`; adds its files and generation_config.json.
            like: a checkpoint directory; what its config.json says beyond our model (context
            length, token ids) is kept.
    Raises: ValueError if no model type of transformers computes this model, or if parameters are
            missing, unknown or of another shape, naming them; FileExistsError as `directory.fresh`.
    """
    require(dtype in load.DTYPES, "save: dtype", repr(dtype), f"one of {list(load.DTYPES)}")
    model = with_vocabulary(model, params)
    check(model, params)
    config = describe(model, dtype, tokenizer, like)
    table = names.table(model)
    declared = {row.name: (jnp.dtype(dtype), row.shape) for row in table}
    with directory.fresh(path, overwrite=overwrite) as new:
        directory.write_json(new / "config.json", config)
        directory.write_tensors(new, declared, values(table, params, dtype), max_shard_bytes)
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
        whole = config_json.read(like)
        kept = {**whole, **whole.get("text_config", {})}
        kept = {key: value for key, value in kept.items() if key not in _NOT_KEPT}
        config.pop("max_position_embeddings" if "max_position_embeddings" in kept else "", None)
    if tokenizer is not None:
        kept |= {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    return {**kept, **config}


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


def values(table: Sequence[names.Tensor], params: Params, dtype: str) -> Iterator[np.ndarray]:
    """The tensors of a table, one after another, in their dtype."""
    left = collections.Counter(place.slab for row in table for place in row.places)
    slabs: dict[Any, np.ndarray] = {}
    for row in table:
        parts = []
        for place in row.places:
            key = place.slab
            if key not in slabs:
                leaf: Any = params
                for step in place.path:
                    leaf = leaf[step]
                slabs[key] = fetch(leaf, key[1], dtype)
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
