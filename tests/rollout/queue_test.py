"""The queue between engine and trainer: who is taken when, and that nobody is lost or too old."""

import concurrent.futures
import random
import time

import numpy as np
import pytest

from trace_jax.rollout import queue
from trace_jax.rollout.queue import Queue
from trace_jax.types import Prompt, Trajectory

P = 2


def prompt(number: int) -> Prompt:
    return Prompt(uid=f"p{number}", text="", tokens=(1,), answer=None, task="x")


def answer(given: Prompt, version: int) -> list[Trajectory]:
    """One sample of three tokens, the last of them of the next version."""
    return [
        Trajectory(
            prompt=given,
            sample=0,
            tokens_T=np.array([1, 2, 3, 4], np.int32),
            prompt_length=1,
            sampler_logprobs_R=np.zeros(3, np.float32),
            routes_SLX=np.zeros((3, 0, 0), np.int16),
            guidance=None,
            finish_reason="length",
            versions_R=np.array([version, version, version + 1], np.int32),
        )
    ]


class World:
    """An engine that answers when told to, and a data set of ever new prompts."""

    def __init__(self, *, max_version_diff: int, ahead: int) -> None:
        self.futures: dict[str, concurrent.futures.Future] = {}
        self.prompts: dict[str, Prompt] = {}
        self.rounds: list[tuple[int, list[str]]] = []
        self.next = 0
        self.queue = Queue(self.submit, per_step=P, max_version_diff=max_version_diff, ahead=ahead)

    def submit(self, prompts, number):
        self.rounds.append((number, [p.uid for p in prompts]))
        for given in prompts:
            self.prompts[given.uid] = given
            self.futures[given.uid] = concurrent.futures.Future()
        return [self.futures[given.uid] for given in prompts]

    def more(self):
        self.next += P
        return [prompt(i) for i in range(self.next - P, self.next)]

    def finish(self, *numbers: int, version: int = 0) -> None:
        for i in numbers:
            self.futures[f"p{i}"].set_result(answer(prompt(i), version))


def uids(taken) -> list[str]:
    return [group[0].prompt.uid for group in taken.groups]


def test_with_no_difference_allowed_every_step_trains_on_its_own_prompts():
    world = World(max_version_diff=0, ahead=4)
    for version in range(3):
        world.queue.fill(version, world.more)
        assert world.next == (version + 1) * P  # whatever `ahead` says
        world.finish(version * P + 1, version * P, version=version)
        assert uids(world.queue.take(version)) == [f"p{version * P}", f"p{version * P + 1}"]


def test_slow_prompts_are_left_for_later_and_then_waited_for():
    world = World(max_version_diff=1, ahead=2)
    world.queue.fill(0, world.more)
    world.finish(1, 2)
    assert uids(world.queue.take(0)) == ["p1", "p2"]  # p0 is slow: a later round's comes first
    world.queue.fill(1, world.more)
    world.finish(3, 4, 5)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        step = pool.submit(world.queue.take, 1)
        time.sleep(0.2)
        assert not step.done()  # p0 would be too old at the next step
        world.finish(0)
        taken = step.result(timeout=10)
    assert uids(taken) == ["p0", "p3"]
    assert taken.waited_for == 1


def test_deadlines_of_several_steps_to_come_are_seen_in_time():
    world = World(max_version_diff=3, ahead=4)
    world.queue.fill(0, world.more)
    world.finish(6, 7)
    assert uids(world.queue.take(0)) == ["p6", "p7"]
    world.queue.fill(1, world.more)
    world.finish(8, 9, version=1)
    # p0..p5 are due by the step of version 3: six, and steps 2 and 3 have room for four
    assert world.queue.take(1, stop=lambda: True) is None
    world.finish(4, 5)
    assert uids(world.queue.take(1)) == ["p4", "p5"]


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("max_version_diff", [0, 1, 3])
def test_no_prompt_is_lost_repeated_or_too_old_whoever_finishes_when(max_version_diff, ahead):
    rng = random.Random(max_version_diff * 10 + ahead)
    world = World(max_version_diff=max_version_diff, ahead=ahead)
    seen: list[str] = []
    for version in range(60):
        world.queue.fill(version, world.more)
        open_ = [uid for uid, future in world.futures.items() if not future.done()]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            step = pool.submit(world.queue.take, version)
            rng.shuffle(open_)
            for uid in open_:  # some finish under these weights, in any order, until it goes on
                if step.done() and rng.random() < 0.8:
                    continue
                born = min(v for v in range(version + 1) if uid in first_seen(world, v, version))
                world.futures[uid].set_result(answer(world.prompts[uid], born))
            taken = step.result(timeout=20)
        assert len(taken.groups) == P
        ages = queue.metrics(taken, version, max_version_diff)
        assert ages["rollout/staleness_max_versions"] <= max_version_diff
        seen += uids(taken)
    assert len(seen) == len(set(seen)) == 60 * P
    late = {f"p{i}" for i in range(world.next)} - set(seen)
    assert late == {uid for _, _, uid in world.queue.state()["waiting"]}


def first_seen(world: World, version: int, now: int) -> set[str]:
    """Uids submitted by a version: rounds are submitted in order, as many as there is room for."""
    room = world.queue._room // P
    return {uid for number, uids in world.rounds if number < version + room for uid in uids}


def test_a_token_older_than_allowed_is_refused():
    world = World(max_version_diff=1, ahead=1)
    world.queue.fill(5, world.more)
    world.finish(0, 1, version=3)
    with pytest.raises(ValueError, match=r"oldest token of p0: got 3, need 4 or newer .* 5"):
        world.queue.take(5)


def test_what_the_engine_could_not_answer_ends_the_wait_at_once():
    world = World(max_version_diff=3, ahead=2)
    world.queue.fill(0, world.more)
    world.futures["p3"].set_exception(RuntimeError("the last server is gone"))
    with pytest.raises(RuntimeError, match="the last server is gone"):
        world.queue.take(0)


def test_a_stop_ends_the_wait_and_takes_nothing():
    world = World(max_version_diff=0, ahead=1)
    world.queue.fill(0, world.more)
    assert world.queue.take(0, stop=lambda: True) is None
    assert [uid for _, _, uid in world.queue.state()["waiting"]] == ["p0", "p1"]


def test_a_checkpoint_keeps_what_is_pending_and_it_is_sampled_again_with_its_own_round():
    world = World(max_version_diff=2, ahead=3)
    world.queue.fill(0, world.more)
    world.finish(1, 4)
    world.queue.take(0)
    state = world.queue.state()
    assert state == {
        "rounds": 3,
        "waiting": [(0, 0, "p0"), (1, 0, "p2"), (1, 1, "p3"), (2, 1, "p5")],
    }

    other = World(max_version_diff=2, ahead=3)
    other.next = world.next
    other.queue.restore(state, [prompt(i) for i in range(6)])
    assert other.queue.state() == state  # a checkpoint before anything was submitted again
    other.queue.fill(1, other.more)
    assert other.rounds == [(0, ["p0"]), (1, ["p2", "p3"]), (2, ["p5"]), (3, ["p6", "p7"])]
    with pytest.raises(ValueError, match=r"pending prompt: got 'p5', need a prompt of the data"):
        World(max_version_diff=2, ahead=3).queue.restore(state, [prompt(i) for i in range(5)])


def test_ages_are_of_tokens_and_their_fractions_sum_to_one():
    world = World(max_version_diff=3, ahead=1)
    world.queue.fill(0, world.more)
    world.finish(0, version=0)
    world.finish(1, version=2)
    found = queue.metrics(world.queue.take(3), 3, 3)
    ages = [found[f"rollout/staleness_{k}_fraction"] for k in range(4)]
    np.testing.assert_allclose(ages, [1 / 6, 2 / 6, 1 / 6, 2 / 6])
    assert found["rollout/staleness_max_versions"] == 3
