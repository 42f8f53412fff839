"""What a checkpoint holds and the proof of it: leaf paths, dtypes, shapes and SHA-256 sums."""

import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.checks import require

Manifest = dict[str, dict[str, Any]]  # leaf path -> {"dtype", "shape", "sha256"}


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path ("params/layers/w"); a dataclass has those of its nested dict."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in flat]
    out = dict(named)
    require(len(out) == len(named), "checkpoint arrays", [n for n, _ in named], "one leaf per path")
    return out


def describe(tree: Any) -> Manifest:
    """One entry a leaf, with the sum of its bytes (None where this process cannot see it whole)."""
    out: Manifest = {}
    for path, leaf in leaves(tree).items():
        dtype: Any = getattr(leaf, "dtype", None)
        require(
            isinstance(leaf, np.ndarray | jax.Array)
            and getattr(dtype, "kind", None) != "O"
            and not jnp.issubdtype(dtype, jax.dtypes.extended),
            f"checkpoint arrays {path}",
            dtype or type(leaf).__name__,
            "a jax or numpy array",
            "put host values into `extra`; store a key as its jax.random.key_data.",
            TypeError,
        )
        where, need = (
            f"checkpoint arrays {path}",
            "at least one element (Orbax stores no empty array)",
        )
        require(leaf.size > 0, where, f"shape {leaf.shape}", need, "leave it out, or pad it.")
        whole = isinstance(leaf, np.ndarray) or leaf.is_fully_addressable
        sha256 = hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() if whole else None
        out[path] = {"dtype": str(dtype), "shape": list(leaf.shape), "sha256": sha256}
    return out


def differences(manifest: Manifest, like: Any) -> list[str]:
    """`path: saved <dtype[shape]>, now <dtype[shape]>` for each leaf that `like` has otherwise."""
    saved = {path: f"{entry['dtype']}{entry['shape']}" for path, entry in manifest.items()}
    wanted = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves(like).items()}
    return [
        f"{path}: saved {saved.get(path, 'nothing')}, now {wanted.get(path, 'nothing')}"
        for path in dict.fromkeys((*wanted, *saved))
        if saved.get(path) != wanted.get(path)
    ]


def plain_json(value: Any, where: str) -> Any:
    """The value as JSON gives it back: numpy scalars as numbers, tuples as lists."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    fix = "store bytes as base64 text, arrays among the arrays."
    require(isinstance(value, dict), where, type(value).__name__, "a JSON value", fix, TypeError)
    for key in value:
        require(isinstance(key, str), where, f"key {key!r}", "text keys", None, TypeError)
    return {k: plain_json(v, f"{where}.{k}") for k, v in value.items()}


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the SHA-256 of its own JSON text beside it."""
    text = json.dumps(record, sort_keys=True)
    return {"record": record, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def is_sealed(sealed: Any) -> bool:
    """Whether a sealed record is as it was written."""
    return isinstance(sealed, dict) and "record" in sealed and seal(sealed["record"]) == sealed


def list_files(folder: pathlib.Path, name: str) -> None:
    """Writes the SHA-256 of every file under `folder` into `folder/name`, in one step."""
    sums = {str(p.relative_to(folder)): _file_sum(p) for p in folder.rglob("*") if p.is_file()}
    text = json.dumps(seal(sums), indent=1, sort_keys=True)
    temporary = folder / f"{name}.tmp"
    temporary.write_text(text)
    os.replace(temporary, folder / name)


def damaged_files(folder: pathlib.Path, name: str) -> list[str]:
    """Files of the listing that are missing or altered; the listing itself if it is."""
    try:
        sealed = json.loads((folder / name).read_bytes())
    except (ValueError, OSError):
        return [name]
    if not is_sealed(sealed):
        return [name]
    sums = sealed["record"]
    return [file for file in sums if _file_sum(folder / file) != sums[file]]


def _file_sum(path: pathlib.Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
