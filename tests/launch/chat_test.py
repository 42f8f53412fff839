"""A conversation on a terminal: Ctrl-C ends an answer, Ctrl-D the conversation."""

import dataclasses
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import trace_jax
from trace_jax import overrides
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.models import transformer

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that never stops: it answers everything with the letters that follow each other."""
    folder = tmp_path_factory.mktemp("checkpoints") / "endless"
    model = dataclasses.replace(overrides.load("tiny_cpu").model, vocab_size=272, expert_ffn=64)
    params = transformer.init(model, 272, jax.random.key(3))
    params = jax.tree.map(jnp.zeros_like, params)
    params["final_norm"] += 1
    params["embed"] = params["embed"].at[65, 0].set(1.0).at[257, 0].set(0.5)
    trace_jax.save(folder, model, params, tokenizer=byte_tokenizer())
    return folder


class Terminal:
    """A launcher on a terminal of its own."""

    def __init__(self, *command):
        self.text = ""
        self._file, theirs = pty.openpty()
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        # a shell starts jobs in the background with Ctrl-C ignored, which would be inherited
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, **streams
        )
        signal.signal(signal.SIGINT, before)
        os.close(theirs)

    def wait(self, pattern, limit=120):
        """Reads until the pattern is in what came since the last call."""
        new, until = "", time.monotonic() + limit
        while not re.search(pattern, new):
            assert time.monotonic() < until, self.text + new
            if select.select([self._file], [], [], 0.2)[0]:
                new += os.read(self._file, 65536).decode(errors="replace")
        self.text += new

    def send(self, keys):
        os.write(self._file, keys)

    def interrupt(self):
        """What the terminal does on Ctrl-C, to this process alone."""
        self._process.send_signal(signal.SIGINT)

    def code(self):
        while True:
            try:
                if not os.read(self._file, 65536):
                    break
            except OSError:  # the other side has closed it
                break
        os.close(self._file)
        return self._process.wait(timeout=60)


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(endless):
    flags = [f"--model={endless}", "--temperature=0", "--max_new_tokens=30000", "--quant=bf16"]
    terminal = Terminal("launch/generate.py", *flags)
    terminal.wait("> ")
    for _ in range(2):
        terminal.send(b"hi\n")
        terminal.wait("A" * 20)
        terminal.interrupt()
        terminal.wait(r"interrupted; Ctrl-D ends the conversation\]\s+> ")
    terminal.send(b"\x04")
    assert terminal.code() == 0
    assert terminal.text.count("[loading ") == 1 and terminal.text.count("[compiling ") >= 1


@pytest.mark.slow
def test_ctrl_c_ends_a_single_answer_with_130(endless):
    flags = [f"--model={endless}", "--temperature=0", "--max_new_tokens=30000", "--quant=bf16"]
    terminal = Terminal("launch/generate.py", *flags, "--prompt=hi")
    terminal.wait("A" * 20)
    terminal.interrupt()
    assert terminal.code() == 130
