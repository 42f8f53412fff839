"""The whole run: stopped and killed runs equal an undisturbed one, and bad input loses nothing."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from trace_jax import loop, overrides
from trace_jax.checkpoint import Checkpointer
from trace_jax.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent
TINY = overrides.load(ROOT / "configs/tiny_cpu.py")
# lagging weights, a reference and two minibatches: everything a checkpoint has to hold
SETTINGS = ("steps=6", "rollout.version_lag=1", "loss.kl_coef=0.01", "optim.minibatches=2")
SETTINGS += ("run.checkpoint_every=2", "run.eval_every=3", "warm_start.check_every=2")


def command(workdir: pathlib.Path) -> list[str]:
    # in the run that is stopped and killed all guidance waits on disk, in the other one in memory
    settings = (*SETTINGS, f"run.guidance_mib={4096 if workdir.name == 'straight' else 0}")
    options = [part for setting in settings for part in ("--set", setting)]
    config = "--config=configs/tiny_cpu.py"
    return [sys.executable, "launch/train.py", config, f"--workdir={workdir}", *options]


# all four processes compile the same programs: once is enough
SHARED = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}


def start(workdir: pathlib.Path) -> subprocess.Popen:
    return subprocess.Popen(
        command(workdir), cwd=ROOT, env=SHARED, stdout=subprocess.PIPE, text=True
    )


def finish(workdir: pathlib.Path) -> None:
    done = subprocess.run(command(workdir), cwd=ROOT, env=SHARED, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def wait_for(workdir: pathlib.Path, stage: str, step: int, process: subprocess.Popen) -> None:
    """Returns once the line of that step is in metrics.jsonl."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        path = workdir / "metrics.jsonl"
        rows = read_metrics(path) if path.exists() else []
        if any(row["stage"] == stage and row["step"] >= step for row in rows):
            return
        assert process.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.01)
    raise TimeoutError(f"{stage} step {step} never came")


def stop(process: subprocess.Popen, number: signal.Signals) -> str:
    process.send_signal(number)
    text, _ = process.communicate(timeout=300)
    return text


def facts(workdir: pathlib.Path) -> list[dict]:
    """The metrics without what a clock or a memory budget says."""
    timed = ("_s", "/s")
    rows = read_metrics(workdir / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if not (k.endswith(timed) or k.startswith("guide/store_"))}
        for row in rows
    ]


def spilled(workdir: pathlib.Path) -> float:
    """Bytes of guidance that went to disk."""
    rows = read_metrics(workdir / "metrics.jsonl")
    return sum(row.get("guide/store_spilled_bytes", 0.0) for row in rows)


def final_arrays(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    with Checkpointer(workdir / "checkpoints", keep=2) as checkpoints:
        restored = checkpoints.restore_latest()
    assert restored is not None
    leaves = jax.tree_util.tree_leaves_with_path(restored.arrays)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_a_run_stopped_and_killed_equals_an_undisturbed_one_in_every_array_and_metric(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    finish(straight)

    process = start(broken)
    wait_for(broken, "warm_start", 1, process)
    text = stop(process, signal.SIGINT)  # Ctrl-C in the warm start: saved
    assert process.returncode == 130
    assert "stopped and saved at warm_start" in text

    process = start(broken)
    wait_for(broken, "rl", 3, process)  # one step past the checkpoint at step 2
    stop(process, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL

    finish(broken)
    for got, expected in zip(facts(broken), facts(straight), strict=True):
        assert got == expected, (got["stage"], got["step"])
    assert spilled(broken) > 0 == spilled(straight)
    assert not any((broken / "guidance").glob("*.guidance"))  # the killed run left some
    arrays = final_arrays(broken)
    assert arrays.keys() == final_arrays(straight).keys()
    for name, leaf in final_arrays(straight).items():
        np.testing.assert_array_equal(arrays[name], leaf, err_msg=name)


def small(tmp_path: pathlib.Path, **data: object):
    """One GRPO step on the user's own file, without a warm start."""
    section = dataclasses.replace(TINY.data, task=None, task_args=(), eval_size=4, **data)
    return dataclasses.replace(TINY, steps=1, warm_start=None, data=section)


def write_jsonl(path: pathlib.Path, count: int = 24) -> str:
    lines = [json.dumps({"prompt": f"say {i}", "answer": str(i)}) for i in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_rewards_that_are_nan_are_counted_and_dropped_not_zero(tmp_path, monkeypatch):
    verifier = "def judge(prompt, text):\n    return float('nan') if '1' in prompt.text else 0.5\n"
    (tmp_path / "nan_verifier.py").write_text(verifier)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    path = write_jsonl(tmp_path / "data.jsonl")
    config = small(tmp_path, path=path, train_size=20, reward="nan_verifier:judge")
    loop.run(config, tmp_path / "run")
    row = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert row["reward/failed"] > 0
    assert row["reward/mean"] == 0.5  # of the others
    for name, leaf in final_arrays(tmp_path / "run").items():
        assert np.isfinite(leaf.astype(np.float32)).all(), name


def test_a_run_whose_every_verifier_fails_is_an_error_not_a_zero(tmp_path, monkeypatch):
    (tmp_path / "failing_verifier.py").write_text("def judge(prompt, text):\n    raise OSError\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    path = write_jsonl(tmp_path / "data.jsonl")
    config = small(tmp_path, path=path, train_size=20, reward="failing_verifier:judge")
    with pytest.raises(ValueError, match=r"evaluation: scored answers: got 0 of 4"):
        loop.run(config, tmp_path / "run")
    assert final_arrays(tmp_path / "run")  # what there was is intact


def test_bad_data_is_refused_before_a_run_directory_exists(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        loop.run(small(tmp_path, path=str(tmp_path / "nothing.jsonl")), tmp_path / "run")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl.*1.*answer"):
        loop.run(small(tmp_path, path=str(tmp_path / "bad.jsonl")), tmp_path / "run")
    unknown = dataclasses.replace(TINY, data=dataclasses.replace(TINY.data, task="spel_backward"))
    with pytest.raises(ValueError, match="spell_backward"):  # the close match is named
        loop.run(unknown, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_starting_from_another_model_is_refused(tmp_path):
    first = dataclasses.replace(TINY, steps=0, warm_start=None)
    loop.run(first, tmp_path / "first")
    wider = dataclasses.replace(
        first,
        model=dataclasses.replace(TINY.model, expert_ffn=64),
        run=dataclasses.replace(TINY.run, init_from=str(tmp_path / "first")),
    )
    with pytest.raises(ValueError, match="got another model"):
        loop.run(wider, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_a_run_that_started_elsewhere_no_longer_needs_its_origin(tmp_path):
    first = dataclasses.replace(TINY, steps=0, warm_start=None)
    loop.run(first, tmp_path / "first")
    origin = dataclasses.replace(TINY.run, init_from=str(tmp_path / "first"))
    second = dataclasses.replace(first, run=origin)
    before = loop.run(second, tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert loop.run(second, tmp_path / "second") == before
    with pytest.raises(FileNotFoundError, match="a run directory with checkpoints"):
        loop.run(second, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_too_few_prompts_are_refused_before_a_run_directory_exists(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", count=6)
    with pytest.raises(ValueError, match="need >= prompts_per_step=4"):
        loop.run(small(tmp_path, path=path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_alarms_are_counted_in_every_step_and_each_kind_is_printed_once(capsys):
    position, out = object.__new__(loop.Position), object.__new__(loop.Outputs)
    position.rl_steps = 3
    object.__setattr__(out, "alarms", set())
    counted = []
    for agreement in (0.99, 0.5, 0.4):
        numbers = {"quant/nan_scales": 0.1, "guide/agreement": agreement}
        loop._raise_alarms(position, out, numbers)
        counted.append(numbers["run/alarms"])
    assert counted == [1, 2, 2]
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2
    assert printed[0].startswith("alarm at step 3: quant/nan_scales: got 0.1, need 0. Fix: ")
    assert printed[1].startswith("alarm at step 3: guide/agreement: got 0.5, need 0.9 or more")
