"""Quantised weights as the sampler holds them, and the table that compares recipes."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from tests.ptq.conftest import MODEL, batches
from trace_jax import config as cfg
from trace_jax import formats, weight_sync
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.models import transformer
from trace_jax.ptq import calibration, compare, hscale, quantise, texts

QUANT = cfg.Quant(mlps="all", keep_last=1, kv=None)


@pytest.fixture(scope="module")
def hessian(params):
    return calibration.calibrate(MODEL, params, batches(0))


@pytest.fixture(scope="module")
def weights(params, hessian):
    return quantise.quantise(MODEL, QUANT, params, hessian, version=7)


def test_packed_weights_are_the_samplers_with_other_scales(params, weights):
    plain = weight_sync.make_sync(MODEL, QUANT)(params, 7)
    assert (weights.version, weights.bytes) == (7, plain.bytes)
    before, after = (jax.tree_util.tree_leaves_with_path(w.params) for w in (plain, weights))
    moved = set()
    for (path, a), (same, b) in zip(before, after, strict=True):
        assert path == same and a.shape == b.shape and a.dtype == b.dtype
        if not np.array_equal(a, b):
            moved.add(tuple(getattr(key, "key", "") for key in path)[-3:])
    matrices = [(c, n) for c in ("moe", "mlp") for n in ("gate_up", "down")]
    assert moved == {(*m, leaf) for m in matrices for leaf in ("codes", "scales")}


def test_each_row_of_the_stacks_is_searched_with_its_own_hessian(params, hessian, weights):
    """The first MoE row is layer 0, the second layer 2: layer 1 is dense."""
    format = formats.get("nvfp4")
    values = quantise.dequantised(MODEL, QUANT, params, weights)["layers"]
    for component, rows in (("moe", (0, 1)), ("mlp", (0,))):
        for name in ("gate_up", "down"):
            for row in rows:
                w = params["layers"][component][name][row]
                h = jnp.asarray(hessian.diagonal(component, name)[row])
                alone = hscale.pack_weight(w, h, format)
                want = quantise.values(alone, format, w.shape[-1])
                np.testing.assert_array_equal(values[component][name][row], want)
    kept = (values["moe"][name][2] for name in ("gate_up", "down"))  # keep_last: the last layer
    for leaf, name in zip(kept, ("gate_up", "down"), strict=True):
        np.testing.assert_array_equal(leaf, params["layers"]["moe"][name][2])


def test_nothing_to_quantise_is_refused(params, hessian):
    with pytest.raises(ValueError, match="got no quantised weights"):
        off = cfg.Quant(rollout="bf16", trainer="bf16", mlps="all")
        quantise.quantise(MODEL, off, params, hessian)


def test_exported_weights_decode_to_what_was_chosen(params, hessian, tmp_path):
    quant = cfg.Quant(mlps="all")
    weights = quantise.quantise(MODEL, quant, params, hessian)
    trace_jax.save_nvfp4(tmp_path / "out", MODEL, quant, weights, multiple=16)
    _, reread, again = trace_jax.load_quantised(tmp_path / "out")
    assert reread.weights == "nvfp4"
    want, found = (w.params["segments"] for w in (weights, again))
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_rows_say_what_numpy_says(params, hessian):
    data = batches(9)
    recipes = {name: compare.RECIPES[name] for name in ("nvfp4", "nvfp4+hscale")}
    rows = compare.compare(MODEL, QUANT, params, hessian, data, recipes)
    reference, plain, better = (rows[n] for n in ("reference", "nvfp4", "nvfp4+hscale"))
    assert (reference.kl, reference.weight_error) == (0, 0)
    assert set(reference.output_error) == {0.0}
    assert better.weighted_error < 0.9 * plain.weighted_error
    quant = dataclasses.replace(QUANT, weights="nvfp4")
    packed = weight_sync.make_sync(MODEL, quant)(params, 0)
    approximate = quantise.dequantised(MODEL, quant, params, packed)
    kl, nll, count = 0.0, 0.0, 0
    for tokens, valid in data:
        p, q = (
            np.asarray(jax.nn.log_softmax(trace_jax.logits(MODEL, w, tokens, valid)), np.float64)
            for w in (params, approximate)
        )
        for b, t in np.argwhere(valid[:, :-1] & valid[:, 1:]):
            kl += np.sum(np.exp(p[b, t]) * (p[b, t] - q[b, t]))
            nll -= q[b, t, tokens[b, t + 1]]
            count += 1
    np.testing.assert_allclose(plain.kl, kl / count, rtol=1e-3)
    np.testing.assert_allclose(plain.perplexity, np.exp(nll / count), rtol=1e-5)
    assert plain.output_error[3] == 0 and min(plain.output_error[:3]) > 0.02  # layer 3 is kept
    lines = compare.table(rows).splitlines()
    assert len(lines) == 5 and lines[3].startswith("| nvfp4 | 0.")


def test_weight_errors_are_relative_root_mean_squares(params, hessian):
    bigger = jax.tree.map(lambda a: a * 1.25, params)
    found = quantise.weight_errors(MODEL, params, bigger, hessian)
    np.testing.assert_allclose(found, (0.25, 0.25), rtol=1e-6)
    mlp = {**params["layers"]["mlp"]}
    mlp["down"] = mlp["down"].at[0, 3, 5].add(2.0)
    changed = {**params, "layers": {**params["layers"], "mlp": mlp}}
    plain, weighted = quantise.weight_errors(MODEL, params, changed, hessian)
    power, weighted_power = 0.0, 0.0
    for component in ("moe", "mlp"):
        for name in ("gate_up", "down"):
            w = np.asarray(params["layers"][component][name], np.float64) ** 2
            power += w.sum()
            h = hessian.diagonal(component, name).astype(np.float64)
            weighted_power += (w * h[..., None, :]).sum()
    np.testing.assert_allclose(plain, np.sqrt(4 / power), rtol=1e-6)
    h = float(hessian.diagonal("mlp", "down")[0, 5])
    np.testing.assert_allclose(weighted, np.sqrt(4 * h / weighted_power), rtol=1e-6)


def test_text_becomes_batches_without_overlap_or_loss():
    tokenizer = byte_tokenizer()
    found = texts.batches(tokenizer, texts.python_manual(), tokens=70, context=8, rows=4)
    assert [tokens.shape for tokens, _ in found] == [(4, 8)] * 3
    ids = np.concatenate([tokens[valid] for tokens, valid in found])
    assert ids.tolist() == list(texts.python_manual().encode()[:70])
    with pytest.raises(ValueError, match="tokens of the text: got 3, need at least 5"):
        texts.batches(tokenizer, "abc", tokens=5, context=4, rows=1)


@pytest.mark.slow
def test_launcher_prints_the_table(tmp_path):
    dense = {"family": "qwen3", "experts": 0, "dense_layers": ()}
    model = dataclasses.replace(MODEL, vocab_size=261, layers=1, **dense)
    params = transformer.init(model, 261, jax.random.key(1))
    trace_jax.save(tmp_path / "tiny", model, params, tokenizer=byte_tokenizer())
    root = pathlib.Path(__file__).resolve().parents[2]
    sizes = ("--calibration_tokens=64", "--evaluation_tokens=64", "--context=16")
    run = subprocess.run(
        [sys.executable, "launch/ptq.py", f"--model={tmp_path / 'tiny'}", *sizes],
        cwd=root, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    names = [line.split(" | ")[0].strip("| ") for line in run.stdout.splitlines() if "|" in line]
    assert names[2:] == ["reference", *compare.RECIPES]
