"""Checkpoints from one form to another: import, export, quantise, upcycle.

Everything that can be wrong is looked for before anything is written. The result is written beside
its place and moved there when it is whole, so that what was cut short is never taken for a
checkpoint.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trace_jax
from trace_jax import config as cfg
from trace_jax import formats, sources, upcycle
from trace_jax.checks import message, require
from trace_jax.data.tokenizer import Tokenizer, load_tokenizer
from trace_jax.hf import gguf
from trace_jax.progress import Progress, progress
from trace_jax.ptq import calibration, quantise, texts
from trace_jax.types import Params
from trace_jax.weight_sync import SamplerWeights

DTYPES = ("bfloat16", "float32")
HSCALE = "hscale"
# What belongs to a tokenizer in a checkpoint directory, copied as it is.
TOKENIZER_FILES = ("tokenizer*", "chat_template*", "additional_chat_templates", "vocab.*")
TOKENIZER_FILES += ("merges.txt", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("generation_config.json",)
MOST_EXPERTS = 4096
CALIBRATION_BATCH, CALIBRATION_TOKENS = 8, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to do. See `launch/convert.py` for the meaning of each."""

    src: str
    dst: str
    dtype: str = "bfloat16"
    quantise: str | None = None  # a 4-bit format that ModelOpt can spell, or "hscale[:FORMAT]"
    calibration: str | None = None  # text file for hscale, a document a line
    upcycle: tuple[int, int] | None = None  # experts, and how many a token uses
    seed: int = 0  # of the new routers


def run(request: Request) -> pathlib.Path:
    """Does it and returns the directory that was written.

    Raises: ValueError or FileNotFoundError that names every problem, before anything is written.
    """
    problems = find_problems(request)
    if problems:
        raise ValueError("\n".join(problems))
    dst = pathlib.Path(request.dst)
    dst.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=dst.parent, prefix=f".{dst.name}.") as work,
        progress(3, "converting") as bar,
    ):
        made = pathlib.Path(work) / "made"
        with _source(request, pathlib.Path(work)) as source:
            _convert(request, source, made, bar)
        if dst.exists():
            dst.rmdir()  # found empty
        made.rename(dst)
    return dst


def find_problems(request: Request) -> list[str]:
    """Everything that is wrong with a request, each in the house form."""
    found: list[str] = []

    def check(good: bool, *text: Any) -> bool:
        if not good:
            found.append(message(*text))
        return good

    dst = pathlib.Path(request.dst)
    occupied = dst.exists() and (not dst.is_dir() or any(dst.iterdir()))
    fix = "name another one, or remove it; nothing is ever overwritten"
    if check(not occupied, "--dst", f"{dst}, which exists", "a new or empty directory", fix):
        above = next((p for p in dst.absolute().parents if p.exists()), pathlib.Path("/"))
        writable = above.is_dir() and os.access(above, os.W_OK) and above.parts[:2] != ("/", "proc")
        check(writable, "--dst", f"{dst}, in {above}", "a directory that can be written")
    inside = pathlib.Path(request.src).resolve() in dst.resolve().parents
    check(not inside, "--dst", f"{dst}, inside --src", "a directory outside of it")
    check(0 <= request.seed < 2**32, "--seed", request.seed, "0..4294967295")
    check(request.dtype in DTYPES, "--dtype", repr(request.dtype), f"one of {DTYPES}")
    model = None
    if not is_gguf(request.src):
        try:
            model = sources.find(request.src, "--src").model
        except (ValueError, FileNotFoundError, RuntimeError) as error:
            found.append(str(error))
    elif request.src.endswith((".gguf", ".whl", ".zip")):
        there = pathlib.Path(request.src).is_file()
        check(there, "--src", f"{request.src}, no file", "a GGUF file or a wheel with one in it")
    found += _quantise_problems(request)
    if request.upcycle is not None:
        experts, used = request.upcycle
        need = "EXPERTSxPER_TOKEN with 1 <= PER_TOKEN <= EXPERTS, such as 8x2"
        check(1 <= used <= experts, "--upcycle", f"{experts}x{used}", need)
        most = f"at most {MOST_EXPERTS} experts: each is a copy of the dense MLPs"
        check(experts <= MOST_EXPERTS, "--upcycle", f"{experts}x{used}", most)
        dense = model is None or model.experts == 0
        check(dense, "--upcycle", f"{request.src}, which has experts", "a dense model")
        if dense and model is not None:
            need = f"one of {list(upcycle.FAMILIES)}"
            known = model.family in upcycle.FAMILIES
            check(known, "--upcycle", f"{request.src}, of family {model.family}", need)
    return found


def _quantise_problems(request: Request) -> list[str]:
    found = []
    name, _, base = (request.quantise or "").partition(":")
    hscale = name == HSCALE
    if request.quantise is not None:
        text = (base or "nvfp4") if hscale else request.quantise
        try:
            good = formats.get(text).name == "nvfp4"
        except ValueError as error:
            found.append(f"--quantise: {error}")
        else:
            need = "nvfp4, 4over6 or hscale[:FORMAT]: what NVFP4 checkpoints can hold"
            if not good:
                found.append(message("--quantise", request.quantise, need))
    if hscale != (request.calibration is not None):
        got = request.calibration or "nothing"
        need = "a text file, a document a line" if hscale else "--quantise=hscale with it"
        found.append(message("--calibration", got, need))
    elif request.calibration and not pathlib.Path(request.calibration).is_file():
        found.append(message("--calibration", f"{request.calibration}, no file", "a text file"))
    elif request.calibration:
        try:
            texts.load(request.calibration, "--calibration")
        except ValueError as error:
            found.append(str(error))
    return found


def is_gguf(src: str) -> bool:
    """Whether this names a GGUF file, a wheel, or a package with one, and not a directory."""
    path = pathlib.Path(src)
    return (not path.exists() and "/" not in src) or path.suffix in (".gguf", ".whl", ".zip")


@contextlib.contextmanager
def _source(request: Request, work: pathlib.Path) -> Iterator[sources.Source]:
    """The directory to read; a GGUF file is unpacked to one first."""
    if not is_gguf(request.src):
        yield sources.find(request.src, "--src")
        return
    plain = request.quantise is None and request.upcycle is None
    # a file quantised to few bits holds values that BF16 would round once more
    dtype = request.dtype if plain else "float32"
    try:
        gguf.import_gguf(request.src, work / "gguf", dtype=dtype)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(str(error).replace("import_gguf: source", "--src", 1)) from error
    yield sources.find(work / "gguf", "--src")


def _convert(request: Request, source: sources.Source, made: pathlib.Path, bar: Progress) -> None:
    bar.update(1, now="reading")
    if is_gguf(request.src) and request.quantise is None and request.upcycle is None:
        source.path.rename(made)  # import_gguf has written just what is wanted
        return
    model, params = sources.load(source, "float32" if request.dtype == "float32" else "bfloat16")
    if request.upcycle is not None:
        experts, used = request.upcycle
        key = jax.random.key(request.seed)
        model, params = upcycle.upcycle(
            model, params, experts=experts, experts_per_token=used, key=key
        )
    bar.update(1, now="writing")
    kept: dict[str, Any] = {"like": source.path}
    if source.kind == sources.RUN:
        kept = {"tokenizer": load_tokenizer(source.tokenizer)}
    if request.quantise is None:
        trace_jax.save(made, model, params, dtype=request.dtype, **kept)
    else:
        _save_quantised(request, source, model, params, made, kept)
    if source.kind != sources.RUN:
        copy_tokenizer(source.path, made)
    bar.update(1, now="done")


def _save_quantised(
    request: Request,
    source: sources.Source,
    model: cfg.Model,
    params: Params,
    made: pathlib.Path,
    kept: dict[str, Any],
) -> None:
    name, _, base = (request.quantise or "").partition(":")
    format = (base or "nvfp4") if name == HSCALE else str(request.quantise)
    mlps = "experts" if model.experts else "all"
    quant = cfg.Quant(trainer="qat", weights=format, mlps=mlps)
    weights: SamplerWeights | Params = params
    if name == HSCALE:
        tokenizer = load_tokenizer(source.tokenizer, "--src")
        sources.require_tokenizer_fits(tokenizer.vocab_size, model, request.src)
        batches = calibration_batches(tokenizer, pathlib.Path(str(request.calibration)))
        hessian = calibration.calibrate(model, params, batches)
        weights = quantise.quantise(model, quant, params, hessian)
    trace_jax.save_nvfp4(made, model, quant, weights, **kept)


def calibration_batches(
    tokenizer: Tokenizer, path: pathlib.Path
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """(tokens_BT, valid_BT) of a text file, a document a line, cut to CALIBRATION_TOKENS.

    Raises: ValueError if there is no text in it.
    """
    text = texts.load(str(path), "--calibration")
    lines = [line for line in text.splitlines() if line.strip()]
    require(len(lines) > 0, "--calibration", f"{path}, without text", "a document a line")
    shape = (CALIBRATION_BATCH, CALIBRATION_TOKENS)
    for start in range(0, len(lines), CALIBRATION_BATCH):
        tokens_BT, valid_BT = np.full(shape, tokenizer.pad_id, np.int32), np.zeros(shape, bool)
        for row, line in enumerate(lines[start : start + CALIBRATION_BATCH]):
            ids = tokenizer.encode(line)[:CALIBRATION_TOKENS]
            tokens_BT[row, : len(ids)], valid_BT[row, : len(ids)] = ids, True
        yield jnp.asarray(tokens_BT), jnp.asarray(valid_BT)


def copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> list[str]:
    """Copies the files of a checkpoint's tokenizer, those that are there; returns their names."""
    found = {path for pattern in TOKENIZER_FILES for path in source.glob(pattern)}
    for path in sorted(found):
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target / path.name)
    return sorted(path.name for path in found)


def describe(directory: pathlib.Path) -> str:
    """What was written, and what to do with it next."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    lines = [f"{p.stat().st_size:>15,}  {p.relative_to(directory)}" for p in files]
    total = sum(p.stat().st_size for p in files)
    lines.append(f"{total:>15,}  bytes in {len(files)} files of {directory}")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    lines.append(f"{config['model_type']}; next: python launch/inspect.py --model={directory}")
    return "\n".join(lines)
