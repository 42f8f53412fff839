"""Where a policy comes from: a run directory, a Hugging Face checkpoint, or an NVFP4 export of one.

Training starts from it (`run.init_from`); converting, generating and inspecting read it.
"""

import dataclasses
import pathlib
from typing import Any

import jax

import trace_jax
from trace_jax import config as cfg
from trace_jax import overrides, weight_sync
from trace_jax.checkpoint import Checkpointer
from trace_jax.checks import require
from trace_jax.hf import config_json
from trace_jax.rundir import read_run
from trace_jax.types import Params

RUN, CHECKPOINT, NVFP4 = "run", "checkpoint", "NVFP4 export"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A directory that holds a policy."""

    path: pathlib.Path
    kind: str  # RUN | CHECKPOINT | NVFP4
    model: cfg.Model  # vocab_size is known, unless it is a run's and that of its tokenizer
    tokenizer: str  # for `load_tokenizer`
    quant: cfg.Quant | None = None  # a run's own


def find(directory: str | pathlib.Path, where: str) -> Source:
    """What is in a directory, without reading its weights.

    Args:    where: what the user wrote the directory for, to begin an error with.
    Raises:  FileNotFoundError if there is no such directory, or nothing in it to start from;
             ValueError if its configuration is of no model that we compute.
    """
    path = pathlib.Path(directory)
    need = "a run directory with checkpoints/, or a directory in Hugging Face layout"
    require(path.is_dir(), where, f"{directory}, no directory", need, error=FileNotFoundError)
    if (path / "checkpoints").is_dir():
        config = overrides.from_dict(read_run(path).config())
        fields = {"model": config.model, "quant": config.quant}
        return Source(path=path, kind=RUN, tokenizer=config.data.tokenizer, **fields)
    fix = "a checkpoint has config.json and *.safetensors; a run has checkpoints/"
    for pattern in ("config.json", "*.safetensors"):
        found = f"{directory}, with no {pattern}"
        require(any(path.glob(pattern)), where, found, need, fix, error=FileNotFoundError)
    config = config_json.read(path)
    model = config_json.model_of(config, where=str(path / "config.json"))
    kind = NVFP4 if config_json.is_nvfp4(config) else CHECKPOINT
    return Source(path=path, kind=kind, model=model, tokenizer=str(path))


def load(source: Source, dtype: str = "float32") -> tuple[cfg.Model, Params]:
    """The model and its parameters; of an NVFP4 export the values that its codes stand for.

    Args:   dtype: of the matrices, and the model's compute dtype, "float32" | "bfloat16".
    Raises: what `trace_jax.load` raises; ValueError if a run has no checkpoint yet.
    """
    if source.kind != RUN:
        return trace_jax.load(source.path, dtype=dtype)
    params = run_params(source.path, str(source.path))
    rows = int(params["embed"].shape[0])
    model = dataclasses.replace(source.model, vocab_size=rows, compute_dtype=dtype)

    def cast(path: Any, leaf: Any) -> jax.Array:
        kind = "float32" if weight_sync.is_float32(path[-1].key) else dtype
        return jax.numpy.asarray(leaf).astype(kind)

    return model, jax.tree_util.tree_map_with_path(cast, params)


def run_params(run: str | pathlib.Path, where: str) -> Params:
    """The policy of a run's newest checkpoint that is intact, numpy float32.

    Raises: ValueError or FileNotFoundError if there is none.
    """
    folder = pathlib.Path(run) / "checkpoints"
    need, fix = "a run directory with checkpoints/", "give the --workdir of a finished run"
    require(folder.is_dir(), where, run, need, fix, error=FileNotFoundError)
    with Checkpointer(folder, keep=None) as checkpoints:
        restored = checkpoints.restore_latest()
    need, fix = "a checkpoint", "let that run save one"
    require(restored is not None, f"{folder}", "nothing saved", need, fix)
    assert restored is not None
    return restored.arrays["params"]


def start(directory: str, model: cfg.Model, like: Params) -> tuple[Params, str]:
    """The policy that a run of `model` starts from, float32, and a line that says what it is.

    Args:   like: parameters of the run's own model, or their shapes.
    Raises: ValueError naming every field of the model, or parameter, that differs.
    """
    where = "config.run.init_from"
    source = find(directory, where)
    if source.kind == RUN:
        params = run_params(directory, where)
    else:
        require_same_model(model, source, where)
        params = trace_jax.load(source.path, dtype="float32")[1]
    different = _shape_differences(params, like)
    fix = "use the same model section and tokenizer as that run"
    need = "the model of this config"
    more = f" and {len(different) - 5} more" if len(different) > 5 else ""
    got = f"another model: {'; '.join(different[:5])}{more}"
    require(not different, f"{where} {directory}", got, need, fix)
    params = jax.tree.map(lambda a: jax.numpy.asarray(a, "float32"), params)
    return params, describe(source, params)


def describe(source: Source, params: Params) -> str:
    """One line: what was loaded, from where; a warning if precision was lost on the way."""
    count = sum(int(a.size) for a in jax.tree.leaves(params))
    line = f"policy: {source.kind} {source.path}, {source.model.family}, {count:,} parameters"
    if source.kind == NVFP4:
        line += "; warning: its matrices are the rounded ones, the BF16 checkpoint has better"
    return line


def require_same_model(model: cfg.Model, source: Source, where: str) -> None:
    """Raises ValueError unless the sections are equal; each may compute in its own dtype."""
    fields = [f.name for f in dataclasses.fields(cfg.Model) if f.name != "compute_dtype"]
    different = [
        f"model.{name} {getattr(model, name)!r} but {getattr(source.model, name)!r} there"
        for name in fields
        if getattr(model, name) != getattr(source.model, name)
    ]
    fix = (
        f'model=trace_jax.hf.model_of("{source.path}") in the config\'s file, or the entry of '
        "trace_jax.models.known"
    )
    need = "the checkpoint's model section"
    got = f"another model: {'; '.join(different)}"
    require(not different, f"{where} {source.path}", got, need, fix)


def require_tokenizer_fits(ids: int, model: cfg.Model, where: str) -> None:
    """Raises ValueError if the tokenizer has ids that the model has no embedding for.

    Args: ids: `Tokenizer.vocab_size`. Checkpoints pad their vocabulary: more rows than ids is fine.
    """
    size = model.vocab_size
    fix = "take the tokenizer of the checkpoint: data.tokenizer=DIR"
    need = f"at most the {size} of config.model.vocab_size"
    require(size is None or ids <= size, where, f"a tokenizer of {ids} ids", need, fix)


def _shape_differences(ours: Params, theirs: Params) -> list[str]:
    """Parameters that one side lacks, or has in another shape, by path."""

    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(p, simple=True, separator="/"): a.shape for p, a in leaves}

    here, there = shapes(theirs), shapes(ours)
    return [
        f"{path} {here.get(path, 'absent')} but {there.get(path, 'absent')} there"
        for path in sorted(here.keys() | there.keys())
        if here.get(path) != there.get(path)
    ]
