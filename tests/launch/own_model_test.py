"""The README's "Bring your own model" runs as it stands: a tiny checkpoint, fresh processes."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import trace_jax
from trace_jax import overrides
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.models import transformer

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECTION = (
    (ROOT / "README.md").read_text().partition("## Bring your own model\n")[2].split("\n## ")[0]
)
BLOCKS = re.findall(r"```(python)?\n(.*?)```", SECTION, re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
PYTHON = [text for kind, text in BLOCKS if kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as the README's reader has it: the repository and checkpoints/mine."""
    here = tmp_path_factory.mktemp("reader")
    (here / "launch").symlink_to(ROOT / "launch")
    model = dataclasses.replace(overrides.load("tiny_cpu").model, vocab_size=272, expert_ffn=64)
    params = transformer.init(model, 272, jax.random.key(3))
    trace_jax.save(here / "checkpoints/mine", model, params, tokenizer=byte_tokenizer())
    named = [text for text in PYTHON if text.startswith("# my_run.py\n")]
    (here / "my_run.py").write_text(named[0])
    return here


def run(folder, *command):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_section_is_what_this_test_thinks_it_is():
    assert [re.search(r"launch/(\w+)\.py", line)[1] for line in COMMANDS] == [
        *("inspect", "generate", "train", "convert", "convert", "generate")
    ]
    assert len(PYTHON) == 2 and all(re.match(r"python launch/\w+\.py --", c) for c in COMMANDS)


@pytest.mark.slow
def test_the_commands_of_the_readme_run_one_after_another(folder):
    output = []
    for line in COMMANDS:
        command = re.findall(r'(?:[^\s"#]|"[^"]*")+', line.partition("   #")[0])[1:]
        command = [part.replace('"', "") for part in command]
        if "train" in line:  # one step shows as much as two
            command += ["--set", "steps=1", "--set", "data.eval_size=4"]
        if "generate" in line:
            command.append("--max_new_tokens=8")
        output.append(run(folder, *command))
    assert "layers/*/moe/gate_up [0-1]" in output[0].stdout
    assert re.search(r"tokens(/s)?, finish: (stop|length)", output[1].stderr)
    assert "policy: checkpoint checkpoints/mine, qwen3_moe" in output[2].stdout
    audit = (folder / "runs/mine/audit.txt").read_text()
    assert "policy at the start: checkpoints/mine\n" in audit
    assert "model.safetensors" in output[3].stdout and (folder / "checkpoints/new").is_dir()
    assert "hf_quant_config.json" in output[4].stdout
    assert re.search(r"tokens(/s)?, finish: (stop|length)", output[5].stderr)
    trained, _ = trace_jax.load(folder / "checkpoints/new", dtype="bfloat16")
    assert trained == trace_jax.load(folder / "checkpoints/mine", dtype="bfloat16")[0]


def test_the_python_of_the_readme_runs(folder):
    code = next(text for text in PYTHON if not text.startswith("# my_run.py"))
    run(folder, "-c", code + "\nassert logits.shape == (1, 3, 272), logits.shape")
    assert (folder / "checkpoints/copy/model.safetensors").is_file()


def test_the_run_of_the_readme_quantises_the_mlps_of_a_dense_model(folder, tmp_path):
    tiny = overrides.load("tiny_cpu").model
    model = dataclasses.replace(tiny, family="qwen3", experts=0, dense_ffn=64, vocab_size=272)
    params = transformer.init(model, 272, jax.random.key(3))
    trace_jax.save(tmp_path / "checkpoints/mine", model, params, tokenizer=byte_tokenizer())
    shown = "from trace_jax import overrides; print(overrides.load('my_run.py').quant.mlps)"
    (tmp_path / "my_run.py").write_text((folder / "my_run.py").read_text())
    assert run(tmp_path, "-c", shown).stdout == "all\n"
