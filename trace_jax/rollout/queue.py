"""Prompts that are being sampled while the trainer trains, and how old their answers may get.

Prompts are submitted in rounds of P, a step's worth each. A prompt submitted under version v has
no token older than v, so the step of version v + d is the last that may train on it: its deadline.
A step of version s takes P groups of those that are done, earliest deadline first, and before that
waits until every later step can still meet its own deadlines: for each k there are at most (k+1) P
groups left that are due by step s+k+1. As no more than (d+1) P are ever pending, that can always
be had: no group is dropped for its age, and a slow prompt is waited for in time. With d = 0 every
step trains on its own prompts, as if sampling and training took turns.
"""

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trace_jax.checks import require
from trace_jax.rollout.engine import Group
from trace_jax.types import Prompt, Trajectory

# (prompts, number of their round) -> a future per prompt
Submit = Callable[[Sequence[Prompt], int], list[concurrent.futures.Future[Group]]]
_PATIENCE_S = 1.0  # between two looks at `stop` while waiting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A prompt that was submitted and not trained on."""

    round: int
    place: int  # within the round: with it the order of submission
    prompt: Prompt
    version: int  # of the weights when it was submitted: no token of it is older
    future: concurrent.futures.Future[Group]

    @property
    def oldest(self) -> int:
        """The oldest version in its answers, or what it may be while they are not there."""
        if not self.future.done():
            return self.version
        return min(trajectory.version for trajectory in self.future.result())

    @property
    def order(self) -> tuple[int, int]:
        """Of submission."""
        return self.round, self.place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """The groups of one step, in the order of their submission."""

    groups: list[Group]
    wait_s: float  # that the trainer waited for them
    waited_for: int  # groups that later steps could not have waited for, and were not done
    left: int  # groups still pending

    @property
    def trajectories(self) -> list[Trajectory]:
        """All samples of all groups."""
        return [trajectory for group in self.groups for trajectory in group]


class Queue:
    """Submitted prompts in order. Not thread-safe: the loop is its only user."""

    def __init__(self, submit: Submit, *, per_step: int, max_version_diff: int, ahead: int) -> None:
        """Args: per_step: P. max_version_diff: d. ahead: rounds that are in flight or wait, 1 or
        more; with 1 the engine works in turn with the trainer, with 2 beside it.
        """
        self._submit = submit
        self._per_step = per_step
        self._max_version_diff = max_version_diff
        self._room = per_step * min(ahead, max_version_diff + 1)
        self._rounds = 0  # submitted so far
        self._pending: list[Pending] = []
        self._again: dict[int, list[tuple[int, Prompt]]] = {}  # of a checkpoint, by round

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the number of rounds, and (round, place, uid) of the pending."""
        waiting = [(*p.order, p.prompt.uid) for p in self._pending]
        waiting += [(r, i, p.uid) for r, places in self._again.items() for i, p in places]
        return {"rounds": self._rounds, "waiting": sorted(waiting)}

    def restore(self, state: Mapping[str, Any], prompts: Iterable[Prompt]) -> None:
        """Remembers what was pending when a checkpoint was written; `fill` submits it again.

        Args:   prompts: all that the run trains on.
        Raises: ValueError if one of the pending is not among them.
        """
        known = {prompt.uid: prompt for prompt in prompts}
        self._rounds = state["rounds"]
        for number, place, uid in state["waiting"]:
            need, fix = "a prompt of the data", "continue with the data that the run began with"
            require(uid in known, "checkpoint: pending prompt", repr(uid), need, fix)
            self._again.setdefault(number, []).append((place, known[uid]))

    def fill(self, version: int, more: Callable[[], Sequence[Prompt]]) -> None:
        """Submits rounds of `more` until enough are ahead, none of which can become too old."""
        for number, places in sorted(self._again.items()):
            self._add(number, [place for place, _ in places], [p for _, p in places], version)
        self._again = {}
        while len(self._pending) + self._per_step <= self._room:
            prompts = more()
            self._add(self._rounds, range(len(prompts)), prompts, version)
            self._rounds += 1

    def _add(
        self, number: int, places: Iterable[int], prompts: Sequence[Prompt], version: int
    ) -> None:
        futures = self._submit(prompts, number)
        for place, prompt, future in zip(places, prompts, futures, strict=True):
            self._pending.append(
                Pending(round=number, place=place, prompt=prompt, version=version, future=future)
            )

    def take(self, version: int, stop: Callable[[], bool] = lambda: False) -> Taken | None:
        """The P groups of the step of this version; None if `stop` said so while waiting.

        Raises: the error of a prompt that the engine could not answer, as soon as it is known.
                ValueError if fewer than P are pending, or if a token is older than allowed.
        """
        need, got = f"at least {self._per_step}", len(self._pending)
        require(got >= self._per_step, "rollout queue: pending prompts", got, need, "call fill")
        start, waited_for = time.perf_counter(), 0
        while True:
            done = [p for p in self._pending if p.future.done()]
            for pending in done:
                pending.future.result()  # raises what went wrong
            blocking = self._blocking(version, done)
            if not blocking and len(done) >= self._per_step:
                break
            if stop():
                return None
            waited_for = max(waited_for, len(blocking))
            open_ = [p.future for p in self._pending if not p.future.done()]
            first = concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(open_, timeout=_PATIENCE_S, return_when=first)
        chosen = sorted(done, key=lambda p: (p.oldest, p.order))[: self._per_step]
        for pending in chosen:
            self._check_age(pending, version)
        taken = {pending.order for pending in chosen}
        self._pending = [p for p in self._pending if p.order not in taken]
        return Taken(
            groups=[p.future.result() for p in sorted(chosen, key=lambda p: p.order)],
            wait_s=time.perf_counter() - start,
            waited_for=waited_for,
            left=len(self._pending),
        )

    def _blocking(self, version: int, done: Sequence[Pending]) -> list[Pending]:
        """Groups not done, without one of which some step to come could not meet its deadlines."""
        finished = {p.order for p in done}
        found: dict[tuple[int, int], Pending] = {}
        for k in range(self._max_version_diff + 1):
            due = [p for p in self._pending if p.oldest + self._max_version_diff <= version + k]
            now = len(due) - k * self._per_step  # of them that this step has to take
            open_ = [p for p in due if p.order not in finished]
            if now > len(due) - len(open_):
                found |= {p.order: p for p in open_}
        return list(found.values())

    def _check_age(self, pending: Pending, version: int) -> None:
        oldest = pending.oldest
        where = f"rollout: version of the oldest token of {pending.prompt.uid}"
        need = f"{version - self._max_version_diff} or newer for the step of version {version}"
        require(version - oldest <= self._max_version_diff, where, oldest, need)


def metrics(taken: Taken, version: int, max_version_diff: int) -> dict[str, float]:
    """Ages of the tokens (a histogram: fractions that sum to 1), and what waiting cost."""
    ages = version - np.concatenate([t.versions_R for t in taken.trajectories])
    counts = collections.Counter(ages.tolist())
    return {
        "rollout/staleness_max_versions": float(ages.max()),
        "rollout/step_s": taken.wait_s,
        "rollout/waited_for": float(taken.waited_for),
        "rollout/pending": float(taken.left),
        **{
            f"rollout/staleness_{age}_fraction": counts[age] / len(ages)
            for age in range(max_version_diff + 1)
        },
    }
