"""Two steps of training for a dense and a hybrid model, guided, and continued from a checkpoint."""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import loop, overrides
from trace_jax.checkpoint import Checkpointer
from trace_jax.metrics import read_metrics
from trace_jax.qat import plan as qat_plan

ROOT = pathlib.Path(__file__).parent.parent
SETTINGS = ("data.prompts_per_step=2", "data.train_size=16", "data.eval_size=2", "steps=2")
SETTINGS += ("rollout.group_size=2", "rollout.max_new_tokens=4", "rollout.bucket_batch=4")
SETTINGS += ("optim.micro_batch=4", "warm_start.max_steps=2", "warm_start.batch=4")
SETTINGS += ("warm_start.check_every=2", "run.keep_checkpoints=3", "run.samples_kept=0")
# as many samples as in training, so that evaluation needs no program of its own
SETTINGS += ("run.eval_samples=2",)
SMALL = {"width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}
MODELS = {
    "dense": cfg.Model(**SMALL, layers=2, family="qwen3", experts=0, dense_ffn=32),
    "hybrid": cfg.Model(
        **SMALL,
        family="qwen3_5_moe",
        layers=4,
        full_attention_every=2,
        linear_key_heads=2,
        linear_value_heads=2,
        linear_key_dim=8,
        linear_value_dim=8,
        gated_attention=True,
        zero_centred_norm=True,
        rotary_fraction=0.5,
        experts=4,
        expert_ffn=16,
        shared_ffn=16,
        vocab_size=288,  # more than the tokenizer has, as in real checkpoints
    ),
}


def arrays(workdir):
    with Checkpointer(workdir / "checkpoints", keep=None) as checkpoints:
        restored = checkpoints.restore_latest()
    assert restored is not None
    return restored.arrays


def facts(workdir):
    """The metrics without what a clock says."""
    rows = read_metrics(workdir / "metrics.jsonl")
    timed = ("_s", "/s")
    kept = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in rows]
    return [{k: v for k, v in row.items() if not k.startswith("guide/store_")} for row in kept]


@pytest.mark.slow  # whole programs of two models are compiled
@pytest.mark.parametrize("name", MODELS)
def test_two_steps_train_and_a_continued_run_is_the_same(tmp_path, name):
    model = MODELS[name]
    config = overrides.override(overrides.load(ROOT / "configs/tiny_cpu.py"), list(SETTINGS))
    quant = dataclasses.replace(config.quant, mlps="all")
    config = dataclasses.replace(config, model=model, quant=quant)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    loop.run(config, straight, show=False)

    rows = read_metrics(straight / "metrics.jsonl")
    first, second = (row for row in rows if "parity/logprob_abs_diff_nats" in row)
    spec = qat_plan.guidance_spec(quant, model)
    expected = qat_plan.bytes_per_token(spec, model)
    for row in (first, second):
        assert row["guide/agreement"] > 0.95
        assert row["guide/bytes_per_token"] == expected > 0
        assert row["parity/logprob_abs_diff_nats"] < 0.05
        assert ("parity/route_mismatch" in row) == (name == "hybrid")
    audit = (straight / "audit.txt").read_text()
    ffn = "mlp" if name == "dense" else "moe"
    layers = f"[0-{model.layers - 1}]"
    for wanted in (f"layers/*/{ffn}/gate_up {layers}", f"layers/*/{ffn}/down {layers}"):
        assert any(line.startswith(wanted) and "nvfp4" in line for line in audit.splitlines())

    shutil.copytree(straight, broken)
    newest = max((broken / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(newest)
    loop.run(config, broken, show=False)
    assert facts(broken) == facts(straight)
    got, want = arrays(broken), arrays(straight)
    assert set(got) == set(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
