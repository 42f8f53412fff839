"""Oracles: verifiers whose behaviour is spelled out in the response they judge."""

import os
import pathlib
import threading
import time

import numpy as np
import pytest

from trace_jax.reward.pool import RewardPool, count_failures
from trace_jax.types import Prompt, Trajectory

VERIFIER = "misbehaving_verifiers:by_name"
DEADLINE_S = 1.5


@pytest.fixture(scope="module", autouse=True)
def on_path():
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(os.path.dirname(__file__))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def pool(on_path):
    with RewardPool(VERIFIER, workers=2, deadline_s=DEADLINE_S, memory_mb=1024) as pool:
        yield pool


def trajectory(text="question", answer="kwof", finish_reason="stop", task="t", **extra):
    return Trajectory(
        prompt=Prompt(uid=text, text=text, tokens=(1,), answer=answer, task=task, extra=extra),
        sample=0,
        tokens_T=np.array([1, 2], np.int32),
        prompt_length=1,
        sampler_logprobs_R=np.zeros(1, np.float32),
        routes_SLX=np.zeros((1, 1, 1), np.int16),
        guidance=None,
        finish_reason=finish_reason,
        versions_R=np.zeros(1, np.int32),
    )


def judge(pool, *texts):
    return pool.score_all([trajectory() for _ in texts], list(texts))


@pytest.mark.parametrize(
    ("text", "reward"),
    [("length", 8.0), ("number -2.5", -2.5), ("bool", 1.0), ("numpy", 0.5), ("else", 0.0)],
)
def test_pool_returns_the_number_of_the_users_function(pool, text, reward):
    (scored,) = judge(pool, text)
    assert (scored.reward, scored.failure) == (reward, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("number nan", "returned nan"),
        ("number inf", "returned inf"),
        ("huge", "returned a number beyond float"),
        ("text", "returned str, not a number"),
        ("none", "returned NoneType, not a number"),
        ("raise", "ZeroDivisionError: of the verifier"),
        ("memory", "MemoryError"),
    ],
)
def test_pool_counts_a_failure_and_never_a_zero(pool, text, reason):
    (scored,) = judge(pool, text)
    assert scored.reward is None and scored.failure.startswith(reason)


def test_pool_kills_hangs_and_crashes_and_keeps_every_other_reward_in_order(pool):
    texts = ["number 1", "tower", "number 2", "sleep", "number 3", "exit", "killed", "number 4"]
    start = time.monotonic()
    before = {s.reward for s in judge(pool, *["process"] * 8)}
    scored = judge(pool, *texts)
    assert [s.reward for s in scored] == [1, None, 2, None, 3, None, None, 4]
    assert [s.failure for s in scored if s.reward is None] == [
        "timeout after 1.5 s",
        "timeout after 1.5 s",
        "verifier process died (exit code 0)",
        "verifier process died (signal 9, perhaps out of memory)",
    ]
    assert count_failures(scored)["timeout after 1.5 s"] == 2
    for pid in before:  # the hanging ones are gone, not abandoned
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert time.monotonic() - start < 60


def test_pool_works_from_a_thread_and_for_several_at_once(pool):
    results = {}

    def work(name):
        texts = [f"number {name}{i}" for i in range(20)]
        results[name] = [s.reward for s in judge(pool, *texts)]

    threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [float(f"{n}{i}") for i in range(20)] for n in (1, 2, 3)}


def test_pool_keeps_order_when_items_take_different_times_and_takes_an_empty_list(pool):
    texts = ["sleep" if i == 0 else f"number {i}" for i in range(30)]
    assert [s.reward for s in judge(pool, *texts)] == [None, *range(1, 30)]
    assert pool.score_all([], []) == []
    with pytest.raises(ValueError, match="texts: got 0, need 1"):
        pool.score_all([trajectory()], [])


def test_interrupted_pool_does_not_mix_answers_of_two_calls(pool, monkeypatch):
    while len({s.reward for s in judge(pool, *["process"] * 8)}) < 2:  # until both are idle
        pass
    monkeypatch.setattr(pool, "_events", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        judge(pool, "number 1", "number 2")
    monkeypatch.undo()
    assert [s.reward for s in judge(pool, "number 3")] == [3]


def test_pool_kills_the_children_of_a_hanging_verifier_too(pool, tmp_path):
    (scored,) = judge(pool, f"child {tmp_path / 'pid'}")
    assert scored.failure.startswith("timeout")
    stat = pathlib.Path("/proc", (tmp_path / "pid").read_text(), "stat")
    give_up = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("no_such_module:f", "import failed .ModuleNotFoundError: .*no_such_module"),
        ("misbehaving_verifiers:by_nam", r"need a function of .*\['by_name'\]"),
        ("misbehaving_verifiers:not_a_function", "need a function of"),
    ],
)
def test_pool_refuses_a_function_that_cannot_be_loaded_at_once(reward, says):
    with pytest.raises(ValueError, match=says):
        RewardPool(reward, workers=1)


@pytest.mark.parametrize("reward", ["exacct", "a b:c", "module:", ":f", "m:f()"])
def test_pool_refuses_a_malformed_name_without_starting_anything(reward):
    with pytest.raises(ValueError, match="module:function"):
        RewardPool(reward)


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("kwof", "stop", 1.0),
        (r"it is \boxed{ kwof }", "stop", 1.0),
        ("kwof", "length", 1.0),  # the answer was complete when the limit cut it off
        ("kwo", "length", 0.0),
        ("kwof!", "stop", 0.0),
        ("Kwof", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_exact_reward_compares_the_extracted_answer(text, finish_reason, reward):
    with RewardPool("exact") as pool:
        (scored,) = pool.score_all([trajectory(finish_reason=finish_reason)], [text])
    assert scored.reward == reward


def test_exact_reward_ignores_white_space_and_fails_without_a_gold_answer():
    with RewardPool("exact") as pool:
        gold = [trajectory(answer=" a\n b "), trajectory(answer=None)]
        first, second = pool.score_all(gold, ["a  b", "a"])
    assert first.reward == 1.0
    assert second.reward is None and "gold answer" in second.failure
    with pytest.raises(RuntimeError, match="closed"):
        pool.score_all(gold, ["a", "b"])


def test_task_reward_is_reasoning_gyms_score_but_only_when_it_is_full():
    entry = {"question": "spell fowk", "answer": "kwof", "metadata": {}}
    t = trajectory(task="spell_backward", entry=entry, task_args={})
    texts = ["kwof", "KWOF", "kwo", "kwof junk", r"so \boxed{kwof}"]
    with RewardPool("task", workers=1, deadline_s=30.0) as pool:
        scored = pool.score_all([t] * 5, texts)
        broken = pool.score_all([trajectory(task="spell_backward")], ["kwof"])
    # reasoning-gym itself gives 0.75 and 0.8 to the third and the fourth
    assert [s.reward for s in scored] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert broken[0].reward is None and "KeyError" in broken[0].failure
