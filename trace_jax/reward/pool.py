"""Rewards from verifiers that may fail, hang or eat memory, none of which becomes a reward of 0.

Verifiers run in fresh Python processes (never forked: JAX has threads), each with a deadline per
item and a memory limit. One that hangs is killed and replaced; an exception, NaN, infinity or a
non-number is a failure with its reason. Everything is bounded: `score_all` returns within about
(items / workers) * deadline, and a few seconds more for each process that had to be replaced.
"""

import collections
import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from trace_jax.checks import message, require
from trace_jax.reward import score, worker
from trace_jax.types import Scored, Trajectory

# -c instead of multiprocessing's spawn: that would import the main script again, which fails in a
# notebook and runs an unguarded script a second time.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from trace_jax.reward.worker import main; "
    "main(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))"
)
_REPLY_BYTES = 65_536
_MAX_FAILED_STARTS = 3  # in a row: the machine cannot run verifiers at all


class RewardPool:
    """Scores responses; a context manager that owns its processes.

    Args:    reward: see `score`. "exact" and "number" are linear and call
             nothing foreign, so they run in this process and start no worker.
             workers: processes.
             deadline_s: seconds of wall time an item may take.
             memory_mb: address space a worker may take beyond its imports.
             start_s: seconds within which a worker must have imported the verifier.
    Raises:  ValueError if the reward function cannot be imported; it is tried here, not at the
             first step.
    """

    def __init__(
        self,
        reward: str,
        *,
        workers: int = 2,
        deadline_s: float = 5.0,
        memory_mb: int = 2048,
        start_s: float = 120.0,
    ) -> None:
        score.check_spec(reward)
        require(workers >= 1, "RewardPool: workers", workers, ">= 1")
        good = math.isfinite(deadline_s) and deadline_s > 0
        require(good, "RewardPool: deadline_s", deadline_s, "> 0 and finite")
        self._inline = score.load_scorer(reward) if reward in score.INLINE else None
        self._lock = threading.Lock()  # one score_all at a time; callers may be any threads
        self._closed = False
        self._failed_starts = 0
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._args = (reward, str(deadline_s), str(memory_mb))
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        if self._inline is None:
            self._workers.extend(_Worker(self._args, start_s) for _ in range(workers))
            try:
                self._await_ready()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        self._closed = True
        _kill_all(self._workers)

    def score_all(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Scored]:
        """The trajectories with their rewards, in order.

        Args:    texts: the decoded response of each trajectory, without the stop token.
        Returns: Scored, with reward None and a reason where the verifier failed.
        Raises:  RuntimeError if the pool is closed, or workers cannot be started any more.
        """
        need = f"{len(trajectories)}, one for each trajectory"
        require(len(texts) == len(trajectories), "RewardPool.score_all: texts", len(texts), need)
        with self._lock:
            if self._closed:
                raise RuntimeError(message("RewardPool", "a closed pool", "an open one"))
            items = [(t.prompt, text) for t, text in zip(trajectories, texts, strict=True)]
            if self._inline is not None:
                replies = [worker.judge(self._inline, *item) for item in items]
            else:
                replies = self._judge_all(items)
        return [_scored(t, reply) for t, reply in zip(trajectories, replies, strict=True)]

    def _judge_all(self, items: Sequence[tuple[Any, str]]) -> list[dict[str, Any]]:
        """Hands out items to idle workers until every item has a reply."""
        waiting = collections.deque(range(len(items)))
        replies: dict[int, dict[str, Any]] = {}
        try:
            while len(replies) < len(items):
                for slot, one in enumerate(self._workers):
                    if one.state == "idle" and waiting:
                        if one.give(waiting[0], items[waiting[0]], self._deadline_s):
                            waiting.popleft()
                        else:  # it died while idle, which is not the item's fault
                            self._replace(slot)
                for slot, index, reply in self._events():
                    if index is not None:
                        replies[index] = reply
                    elif "error" in reply:
                        self._start_failed(slot, reply["error"])
        finally:  # also on Ctrl-C: no worker may answer a question of this call later
            for slot, one in enumerate(self._workers):
                if one.state == "busy":
                    self._replace(slot)
        return [replies[index] for index in range(len(items))]

    def _await_ready(self) -> None:
        """Waits until every worker has imported the verifier, or says why one could not."""
        while any(one.state == "starting" for one in self._workers):
            for _, _, reply in self._events():
                if "error" in reply:
                    raise ValueError(reply["error"])

    def _events(self) -> list[tuple[int, int | None, dict[str, Any]]]:
        """Waits for replies, deaths and deadlines: (worker, item or None, reply)."""
        active = {one.channel: slot for slot, one in enumerate(self._workers) if one.until}
        until = min(self._workers[slot].until for slot in active.values())
        timeout = max(0.0, until - time.monotonic())
        ready = multiprocessing.connection.wait(list(active), timeout)
        now = time.monotonic()
        events = []
        for channel, slot in active.items():
            one = self._workers[slot]
            if channel not in ready and now < one.until:
                continue
            index = one.index
            reply = one.take() if channel in ready else one.overdue()
            if "ready" in reply:
                self._failed_starts = 0
            elif one.state == "dead" and index is not None:
                self._replace(slot)
            events.append((slot, index, reply))
        return events

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        if not self._closed:
            self._workers[slot] = _Worker(self._args, self._start_s)

    def _start_failed(self, slot: int, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            got = f"{self._failed_starts} failed starts in a row ({reason})"
            raise RuntimeError(message("RewardPool: worker", got, "a verifier that starts"))
        self._replace(slot)


class _Worker:
    """One process: "starting" -> "idle" <-> "busy", and "dead" at any time."""

    def __init__(self, args: tuple[str, str, str], start_s: float) -> None:
        self.channel, theirs = multiprocessing.Pipe()
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",  # types.py imports jax; the accelerator is the trainer's
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        spec, deadline_s, memory_mb = args
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        command = (sys.executable, "-c", _BOOT, path, str(theirs.fileno()), spec)
        try:
            self._process = subprocess.Popen(
                (*command, deadline_s, memory_mb),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a verifier prints is not the job's output
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, and the kill takes children
            )
        finally:
            theirs.close()
        self._reaped = False
        self.state = "starting"
        self.until = time.monotonic() + start_s  # when to give up; 0 while idle or dead
        self.index: int | None = None  # of the item it judges

    def give(self, index: int, item: tuple[Any, str], deadline_s: float) -> bool:
        """Starts an item; False if the process is gone."""
        try:
            self.channel.send((index, *item))
        except OSError:  # broken pipe
            return False
        self.state, self.index, self.until = "busy", index, time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        return True

    def take(self) -> dict[str, Any]:
        """The reply that has arrived; the death of the process is one too."""
        try:
            reply = json.loads(self.channel.recv_bytes(_REPLY_BYTES))
            valid = isinstance(reply, dict) and reply.get("index") == self.index
        except (EOFError, OSError, ValueError):  # died, reply too long, not JSON
            valid, reply = False, {}
        if not valid:
            return self._died(f"verifier process died ({self._exit_reason()})")
        if "error" in reply:
            self.state, self.until = "dead", 0.0
            return reply
        self.state, self.index, self.until = "idle", None, 0.0
        return reply

    def overdue(self) -> dict[str, Any]:
        """What to say when the time is up; the process is killed."""
        starting = self.state == "starting"
        return self._died(
            "import took too long" if starting else f"timeout after {self._deadline_s:g} s"
        )

    def kill(self) -> None:
        """Kills the process with its children and reaps it; does nothing the second time."""
        if self._reaped:
            return
        self.state, self.until = "dead", 0.0
        # Before the process is reaped its id cannot belong to anything else.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reaped = True
        self.channel.close()

    def _died(self, reason: str) -> dict[str, Any]:
        starting = self.state == "starting"
        self.kill()
        return {"error": reason} if starting else {"failure": reason}

    def _exit_reason(self) -> str:
        """How the process ended; looks without reaping it, so that `kill` is still safe."""
        give_up = time.monotonic() + 1.0
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (found := os.waitid(os.P_PID, self._process.pid, flags)) is None:
            if time.monotonic() > give_up:
                return "it closed its channel or broke the protocol"
            time.sleep(0.01)
        if found.si_code == os.CLD_EXITED:
            return f"exit code {found.si_status}"
        return f"signal {found.si_status}, perhaps out of memory"


def count_failures(scored: Sequence[Scored]) -> dict[str, int]:
    """How many verifiers failed, by kind (the reason up to its first colon)."""
    reasons = [s.failure or "unknown" for s in scored if s.reward is None]
    return dict(collections.Counter(reason.split(":")[0] for reason in reasons))


def _scored(trajectory: Trajectory, reply: dict[str, Any]) -> Scored:
    reward = reply.get("reward")
    if isinstance(reward, int | float) and math.isfinite(reward):
        return Scored(trajectory=trajectory, reward=float(reward))
    return Scored(
        trajectory=trajectory, reward=None, failure=str(reply.get("failure", "no reward"))
    )


def _kill_all(workers: Sequence[_Worker]) -> None:
    for one in workers:
        one.kill()
