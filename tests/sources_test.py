"""A policy found, read and started from, in every form; made by our own `save`, without torch."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import trace_jax
from trace_jax import loop, overrides, sources, stages
from trace_jax.checkpoint import Checkpointer
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.models import transformer
from trace_jax.rundir import open_run

TINY = overrides.load("tiny_cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of the tiny model, with more rows than the tokenizer has ids."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    model = dataclasses.replace(TINY.model, vocab_size=272)
    params = transformer.init(model, 272, jax.random.key(3))
    trace_jax.save(folder, model, params, dtype="float32", tokenizer=byte_tokenizer())
    return folder, model, params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with one checkpoint, as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    params = transformer.init(TINY.model, 261, jax.random.key(5))
    with (
        open_run(folder, overrides.to_dict(TINY)) as opened,
        Checkpointer(opened.folder("checkpoints"), keep=2) as checkpoints,
    ):
        checkpoints.save(1, {"params": params, "updates": np.int32(0)}, {})
    return folder


def starting(model, folder, **data):
    return dataclasses.replace(
        TINY,
        steps=1,
        warm_start=None,
        model=model,
        data=dataclasses.replace(TINY.data, **data),
        run=dataclasses.replace(TINY.run, init_from=str(folder), plots=False),
    )


def same(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


def test_a_checkpoint_is_found_with_its_model_and_tokenizer(checkpoint):
    folder, model, params = checkpoint
    source = sources.find(folder, "x")
    assert (source.kind, source.tokenizer) == (sources.CHECKPOINT, str(folder))
    assert source.model == model
    loaded, values = sources.load(source)
    assert loaded == dataclasses.replace(model, compute_dtype="float32")
    assert same(values, params)


def test_a_run_is_found_with_its_own_sections(run):
    source = sources.find(run, "x")
    assert (source.kind, source.tokenizer) == (sources.RUN, "byte")
    assert source.model == TINY.model and source.quant == TINY.quant
    model, params = sources.load(source, "bfloat16")
    assert (model.vocab_size, model.compute_dtype) == (261, "bfloat16")
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(params["layers"]["moe"])}
    assert kinds == {"bfloat16", "float32"}  # experts, and the router
    whole = sources.load(source)[1]
    exact = jax.tree.map(lambda a, b: np.array_equal(a, b.astype(a.dtype)), params, whole)
    assert all(jax.tree.leaves(exact))


def test_training_starts_from_a_checkpoint_and_says_so(checkpoint, capsys):
    folder, model, params = checkpoint
    config = starting(model, folder, tokenizer=str(folder))
    position = loop._begin(stages.build(config), started=False)
    assert same(position.state.params, params)
    size = f"{sum(a.size for a in jax.tree.leaves(params)):,} parameters"
    assert f"policy: checkpoint {folder}, qwen3_moe, {size}" in capsys.readouterr().out
    again = loop._begin(stages.build(config), started=True)  # restores its own: reads nothing
    assert not same(again.state.params, params) and not capsys.readouterr().out


def test_training_starts_from_a_run(run, capsys):
    position = loop._begin(stages.build(starting(TINY.model, run)), started=False)
    assert same(position.state.params, sources.load(sources.find(run, "x"))[1])
    assert f"policy: run {run}" in capsys.readouterr().out


def test_another_model_names_every_field_that_differs(checkpoint, tmp_path):
    folder, model, _ = checkpoint
    other = dataclasses.replace(model, expert_ffn=64, rope_theta=77.0, compute_dtype="float32")
    with pytest.raises(ValueError) as caught:
        loop.run(starting(other, folder), tmp_path / "run")
    text = str(caught.value)
    assert text.startswith(f"config.run.init_from {folder}: got another model: ")
    for part in ("model.expert_ffn 64 but 32 there", "model.rope_theta 77.0 but 10000.0 there"):
        assert part in text
    assert "compute_dtype" not in text and "model=trace_jax.hf.model_of(" in text
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_not_set_is_a_difference_too(checkpoint):
    folder, model, params = checkpoint
    with pytest.raises(ValueError, match=r"model.vocab_size None but 272 there"):
        sources.start(str(folder), dataclasses.replace(model, vocab_size=None), params)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(checkpoint, tmp_path):
    folder, model, _ = checkpoint
    small = dataclasses.replace(model, vocab_size=200)
    with pytest.raises(ValueError, match=r"data.tokenizer: got a tokenizer of 261 ids, need at m"):
        loop.run(starting(small, folder), tmp_path / "run")


def test_a_tokenizer_fits_up_to_the_last_row_of_the_embedding(checkpoint):
    model = checkpoint[1]
    sources.require_tokenizer_fits(model.vocab_size, model, "x")
    with pytest.raises(ValueError, match=r"x: got a tokenizer of 273 ids, need at most the 272"):
        sources.require_tokenizer_fits(model.vocab_size + 1, model, "x")


def test_the_line_about_a_policy_warns_of_rounded_matrices_only(checkpoint):
    folder, _, params = checkpoint
    found = sources.find(folder, "x")
    assert "warning" not in sources.describe(found, params)
    rounded = dataclasses.replace(found, kind=sources.NVFP4)
    assert "warning: its matrices are the rounded ones" in sources.describe(rounded, params)


def test_a_run_with_another_model_names_the_parameters(run):
    wider = dataclasses.replace(TINY.model, expert_ffn=TINY.model.expert_ffn * 2)
    shapes = jax.eval_shape(lambda: transformer.init(wider, 261, jax.random.key(0)))
    with pytest.raises(ValueError, match=r"got another model: layers/moe/down .* there; layers/"):
        sources.start(str(run), wider, shapes)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("nothing", "no directory, need a run directory with checkpoints/, or a directory in Hugg"),
        ("empty", "with no config.json"),
        ("no weights", r"with no \*.safetensors"),
        ("no checkpoints", "nothing saved, need a checkpoint"),
        ("unknown model", "model_type"),
        ("bad JSON", "config.json: got "),
    ],
)
def test_what_is_no_source_is_refused_by_name(made, says, run, checkpoint, tmp_path):
    folder = tmp_path / "here"
    if made not in ("nothing", "no checkpoints"):
        folder.mkdir()
    if made in ("no weights", "unknown model", "bad JSON"):
        shutil.copyfile(checkpoint[0] / "config.json", folder / "config.json")
    if made in ("unknown model", "bad JSON"):
        (folder / "model.safetensors").write_bytes(b"")
        text = json.dumps({"model_type": "gpt2"}) if made == "unknown model" else "{"
        (folder / "config.json").write_text(text)
    if made == "no checkpoints":
        shutil.copytree(run, folder, ignore=lambda *_: [])
        shutil.rmtree(folder / "checkpoints")
        (folder / "checkpoints").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        sources.start(str(folder), TINY.model, {})
