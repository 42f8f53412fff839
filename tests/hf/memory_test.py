"""Loading holds the model once: peak host memory of a process that does nothing else."""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax.hf import config_json, directory, names

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST = 1.3  # peak over the checkpoint's size

CHILD = """
import json, pathlib, re, sys
import jax
import trace_jax.hf.load
jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(4)))

def resident(name):  # ru_maxrss would count the parent's memory too: exec hands it down
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+) kB", status)[1]) * 1024

before = resident("VmRSS")
model, params = trace_jax.load(sys.argv[1], dtype="bfloat16")
jax.block_until_ready(params)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
peak = resident("VmHWM") - before
print(json.dumps({"bytes": size, "peak": peak}))
"""


def synthetic(path, model, shard_bytes):
    """A BF16 checkpoint of noise; returns its size in bytes."""
    table = names.table(model)
    declared = {row.name: (ml_dtypes.bfloat16, row.shape) for row in table}
    largest = max(int(np.prod(row.shape)) for row in table)
    noise = np.random.default_rng(0).standard_normal(largest, np.float32)
    noise = noise.astype(ml_dtypes.bfloat16)
    path.mkdir(exist_ok=True)
    directory.write_json(path / "config.json", config_json.config_of(model))
    values = (noise[: np.prod(row.shape)].reshape(row.shape) for row in table)
    directory.write_tensors(path, declared, values, shard_bytes)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def peak_over_size(path, size):
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] == pytest.approx(size, rel=0.05)  # float32 router and norms, headers
    print(f"{size / 1e9:.2f} GB, {len(list(path.glob('*.safetensors')))} files: peak over size "
          f"{found['peak'] / size:.3f}")  # fmt: skip
    return found["peak"] / size


def moe(layers, width, ffn, vocab):
    return cfg.Model(
        width=width, layers=layers, heads=8, kv_heads=2, head_dim=128, experts=32, expert_ffn=ffn,
        experts_per_token=4, vocab_size=vocab, tie_embeddings=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shard_bytes", [500 * 10**6, 10**10])
def test_two_gigabytes_are_loaded_once(shard_bytes, tmp_path):
    size = synthetic(tmp_path / "big", moe(12, 1024, 768, 32_000), shard_bytes)
    assert 1.9e9 < size < 2.2e9
    assert peak_over_size(tmp_path / "big", size) < MOST


def test_checkpoint_is_loaded_once(tmp_path):
    # large enough that what Python and XLA allocate beside (tens of MB) does not matter
    size = synthetic(tmp_path / "small", moe(12, 512, 384, 8_000), 10**8)
    assert 4e8 < size < 6e8
    assert peak_over_size(tmp_path / "small", size) < MOST
