"""convert, generate and inspect from the command line: output, and one line for each bad input."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import trace_jax
from trace_jax import overrides
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.models import transformer

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "mine"
    model = dataclasses.replace(overrides.load("tiny_cpu").model, vocab_size=272, expert_ffn=64)
    params = transformer.init(model, 272, jax.random.key(3))
    trace_jax.save(folder, model, params, tokenizer=byte_tokenizer())
    return folder


def launch(name, *flags, text=None):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    return subprocess.run(
        [sys.executable, f"launch/{name}.py", *flags],
        cwd=ROOT,
        env=environment,
        input=text or "",
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("convert", [], "--src: got nothing, need a path"),
        ("convert", ["--src=a", "--dst=b", "--upcycle=8"], "--upcycle: got 8, need EXPERTSxPER_T"),
        ("convert", ["--src=a/b", "--dst=launch"], "--dst: got launch, which exists"),
        ("convert", ["--nonsense=1"], "nonsense"),
        ("generate", [], "--model: got nothing, need a checkpoint"),
        ("generate", ["--model=nowhere"], "--model: got nowhere, no directory"),
        ("generate", ["--model={mine}", "--quant=int4"], "--quant: got 'int4', need one of"),
        ("generate", ["--model={mine}", "--prompt=x", "--nothinking"], "thinking=False and no sw"),
        ("generate", ["question"], "got ['question'], need --name=value flags only"),
        ("inspect", [], "--model: got nothing, need a directory or the name"),
        ("inspect", ["--model=Qwen9"], "--model: got Qwen9, no directory, need a directory, or o"),
        ("inspect", ["--model={mine}", "--set", "model.width=1"], "--set: got model.width=1, need"),
        ("inspect", ["--model={mine}", "--set", "quant.acts=int8"], "config.quant.acts"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(name, flags, says, mine):
    done = launch(name, *(flag.replace("{mine}", str(mine)) for flag in flags))
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith("error:")


def test_each_line_of_a_pipe_is_a_prompt_of_its_own(mine):
    flags = [f"--model={mine}", "--temperature=0", "--max_new_tokens=4", "--quant=bf16"]
    done = launch("generate", *flags, text="reverse abc\n\n  reverse abc \n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(", finish: ") == 2
    half = len(done.stdout) // 2  # greedy, and the second knows nothing of the first
    assert done.stdout[:half] == done.stdout[half:] and done.stdout.endswith("\n")


def test_inspect_prints_one_json_object_with_the_facts(mine):
    done = launch("inspect", f"--model={mine}", "--json", "--set", "quant.kv=none")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["vocab_size"] == 272 and found["kind"] == "checkpoint"
    assert found["tokenizer"]["stop"] == {"<|im_end|>": 258}
    assert found["kv_token_bytes"] == found["kv_bf16_token_bytes"] == 2 * 2 * 32 * 2


def test_inspect_knows_models_by_name():
    done = launch("inspect", "--model=Qwen3.5-35B-A3B")
    assert done.returncode == 0, done.stderr
    assert "linear + moe" in done.stdout and "family qwen3_5_moe" in done.stdout


def test_the_standard_library_keeps_its_inspect_module():
    # launch/inspect.py is first on the path of every launcher
    code = "import sys; sys.path.insert(0, 'launch'); import inspect; inspect.signature(print)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
