"""A Hugging Face checkpoint directory as a model and its parameters."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from trace_jax import config as cfg
from trace_jax import weight_sync
from trace_jax.checks import message, require
from trace_jax.hf import config_json, files, names
from trace_jax.hf.fill import fill
from trace_jax.models import transformer
from trace_jax.types import Params

DTYPES = ("float32", "bfloat16")
READABLE = tuple(np.dtype(files.DTYPES[name]) for name in ("F64", "F32", "F16", "BF16"))
_MOST = 12  # names listed in an error, of each kind

# The sharding of each leaf: a function of its path, or a tree like the parameters. None: one device
Shardings = Callable[[names.Path], Any] | Mapping[str, Any] | None


def load(
    path: str | pathlib.Path, dtype: str = "float32", shardings: Shardings = None
) -> tuple[cfg.Model, Params]:
    """Reads a checkpoint as transformers writes it, or as `save_nvfp4` does (dequantised).

    The host never holds the model twice: see `fill`.

    Args:    dtype: "float32" | "bfloat16", of the matrices and the model's compute dtype. What is
             used in float32 arithmetic (norms, router, decay) is float32 in both.
             shardings: where each leaf lives, as `jax.sharding.Sharding`: a function from its path,
             ("layers", "moe", "gate_up"), or a tree like the parameters. None: the default device.
    Returns: the model, with `compute_dtype` as given, and its parameters.
    Raises:  FileNotFoundError or ValueError that names the file and all tensors that are missing,
             unknown, of another shape or of a dtype that holds no weights.
    """
    require(dtype in DTYPES, "load: dtype", repr(dtype), f"one of {list(DTYPES)}")
    directory = pathlib.Path(path)
    config = config_json.read(directory)
    model = config_json.model_of(config, dtype, str(directory / "config.json"))
    stored = files.read_headers(directory)
    with open_source(directory, config, stored) as source:
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        table = names.table(model, names.layout_of(model, shapes))
        skipped = check(model, table, source, str(directory))
        params = fill(source, table, leaf_shapes(model, dtype), _sharding_of(shardings))
    if skipped:
        logging.info("%s: left out %s", directory, skipped)
    return model, params


def open_source(
    directory: pathlib.Path, config: config_json.Json, stored: dict[str, files.Stored]
) -> Any:
    """The tensors of a directory; those in NVFP4 appear as the float32 matrices that they mean."""
    if not config_json.is_nvfp4(config):
        return files.Reader(stored)
    from trace_jax.hf import nvfp4_tensors  # needs the formats

    logging.info("%s: NVFP4 weights, dequantised exactly to float32", directory)
    return nvfp4_tensors.Dequantised(stored)


def leaf_shapes(model: cfg.Model, dtype: str) -> Params:
    """Shape and dtype of every parameter."""
    require(
        model.vocab_size is not None, "config.model.vocab_size", None, "the rows of the embedding"
    )
    shapes = jax.eval_shape(
        lambda key: transformer.init(model, int(model.vocab_size or 0), key), jax.random.key(0)
    )

    def like(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kind = jnp.float32 if weight_sync.is_float32(path[-1].key) else jnp.dtype(dtype)
        return jax.ShapeDtypeStruct(leaf.shape, kind)

    return jax.tree_util.tree_map_with_path(like, shapes)


def check(model: cfg.Model, table: Sequence[names.Tensor], source: Any, where: str) -> str:
    """Every tensor of the table is there, in its shape, and nothing else but known parts.

    Returns: what is left out, with counts; "" if nothing.
    Raises:  ValueError that lists everything that is wrong.
    """
    found, wanted = source.tensors, {row.name: row for row in table}
    extra, parts = [], dict.fromkeys(names.LEFT_OUT, 0)
    for name in found.keys() - wanted.keys():
        part = names.left_out(name)
        if part is not None:
            parts[part] += 1
        elif name == "lm_head.weight" and model.tie_embeddings:
            _check_tied(source, next(n for n in wanted if n.endswith("embed_tokens.weight")), where)
            parts["copy of the tied embedding"] = 1
        else:
            extra.append(name)
    both = found.keys() & wanted.keys()
    shapes = [
        f"{name} is {found[name].shape}, not {wanted[name].shape}"
        for name in both
        if tuple(found[name].shape) != wanted[name].shape
    ]
    dtypes = [
        f"{name} is {found[name].dtype}" for name in both if found[name].dtype not in READABLE
    ]
    wrong = {
        "missing": wanted.keys() - found.keys(),
        "unknown": extra,
        "of another shape than config.json says": shapes,
        "of a dtype that holds no weights": dtypes,
    }
    listed = [
        f"{len(some)} {what}: {files.some(some, _MOST)}" for what, some in wrong.items() if some
    ]
    if listed:
        need = f"the {len(wanted)} tensors of {model.family} with {model.layers} layers"
        raise ValueError(message(where, "; ".join(listed), need))
    return ", ".join(f"{count} tensors ({part})" for part, count in parts.items() if count)


def _check_tied(source: Any, embed: str, where: str) -> None:
    """A head beside a tied embedding must be the embedding."""
    need = "no lm_head.weight, or one equal to the embedding, as config.json ties them"
    fix = "if the head is its own, set tie_word_embeddings to false"
    same = embed in source.tensors and source.tensors[embed].shape == (
        source.tensors["lm_head.weight"].shape
    )
    rows = source.tensors["lm_head.weight"].shape[0] if same else 0
    for start in range(0, rows, 4096):
        stop = min(start + 4096, rows)
        head, other = (source.rows(name, start, stop) for name in ("lm_head.weight", embed))
        same = same and np.array_equal(head, other, equal_nan=True)
    require(same, f"{where}: lm_head.weight", "another one than the embedding", need, fix)


def _sharding_of(shardings: Shardings) -> Callable[[names.Path], Any]:
    if shardings is None:
        return lambda path: None
    if callable(shardings):
        return shardings

    def look_up(path: names.Path) -> Any:
        found: Any = shardings
        for key in path:
            need = f"a sharding at {'/'.join(path)}"
            good = isinstance(found, Mapping) and key in found
            require(good, "load: shardings", f"nothing at {key}", need)
            found = found[key]
        return found

    return look_up
