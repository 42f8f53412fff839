"""The process in which verifiers run. Started by `pool`, one item at a time, killed if it hangs.

It limits itself (memory, CPU time, no core dumps) and dies with its parent. It is no sandbox: a
reward function that executes a model's code must isolate it on its own.

Parent to worker: pickled messages over a socket, trusted. Worker to parent: JSON only, because a
verifier has handled untrusted text and the parent must not unpickle what it says.
"""

import json
import math
import multiprocessing.connection
import numbers
import os
import resource
import threading
import time

import numpy as np

from trace_jax.reward.score import Scorer, load_scorer
from trace_jax.types import Prompt

_REASON_LENGTH = 300  # characters of an error that travel


def main(fd: int, spec: str, deadline_s: float, memory_mb: int) -> None:
    """Loads the scorer, says so, then answers (index, prompt, text) with (index, reward)."""
    parent = os.getppid()
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    channel = multiprocessing.connection.Connection(fd)
    try:
        scorer = load_scorer(spec)
    except ValueError as error:
        _send(channel, {"error": str(error)})
        return
    _limit_memory(memory_mb)
    _send(channel, {"ready": True})
    while True:
        try:
            index, prompt, text = channel.recv()
        except EOFError:  # the pool was closed
            return
        _limit_cpu(deadline_s)
        _send(channel, {"index": index, **judge(scorer, prompt, text)})


def judge(scorer: Scorer, prompt: Prompt, text: str) -> dict[str, float | str]:
    """{"reward": finite number} or {"failure": reason}; an exception of the scorer is a reason."""
    try:
        value = scorer(prompt, text)
    except Exception as error:  # user code: any exception is a failure of this item, counted
        return {"failure": f"{type(error).__name__}: {error}"[:_REASON_LENGTH]}
    if isinstance(value, np.ndarray | np.generic) and np.shape(value) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
        return {"failure": f"returned {type(value).__name__}, not a number"}
    try:
        reward = float(value)
    except OverflowError:
        return {"failure": "returned a number beyond float"}
    if not math.isfinite(reward):
        return {"failure": f"returned {reward}"}
    return {"reward": reward}


def _send(channel: multiprocessing.connection.Connection, reply: dict[str, object]) -> None:
    channel.send_bytes(json.dumps(reply).encode())


def _limit_memory(memory_mb: int) -> None:
    """On top of what the imports took, so that the limit means the same for every scorer."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: macOS, which does not enforce RLIMIT_AS either
        return
    _lower(resource.RLIMIT_AS, taken + memory_mb * 2**20)


def _limit_cpu(deadline_s: float) -> None:
    """The kernel ends a busy loop whose parent was killed; the pool's deadline comes first."""
    _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + deadline_s) + 5)


def _lower(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
