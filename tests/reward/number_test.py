"""The reward that reads the last number of an answer."""

from decimal import Decimal

import pytest

from trace_jax.reward import score
from trace_jax.reward.pool import RewardPool
from trace_jax.types import Prompt


def prompt(answer):
    return Prompt(uid="p", text="?", tokens=(1,), answer=answer, task="t")


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("16", "16", 1.0),
        ("2 * 8 = 16.", "16", 1.0),
        ("The answer is **1,976**.", "1976", 1.0),
        ("26 - 76 = -50", "-50", 1.0),
        ("10-3", "3", 1.0),  # an operator, not a sign
        ("$16.50", "16.5", 1.0),
        ("\\boxed{16} for sure, 17", "16", 1.0),
        ("<think>99</think> 16", "16", 1.0),
        ("<think>16", "16", 0.0),
        ("16 or 17", "16", 0.0),
        ("sixteen", "16", 0.0),
        ("", "16", 0.0),
        ("x16", "16", 0.0),
        ("160", "16", 0.0),
        ("50", "-50", 0.0),
        ("9" * 100_000, "16", 0.0),
    ],
)
def test_number_reward_compares_the_last_number(text, answer, reward):
    assert score.number(prompt(answer), text) == reward


@pytest.mark.parametrize("answer", [None, "", "Friday"])
def test_number_reward_fails_without_a_gold_number(answer):
    with pytest.raises(ValueError, match=r"p: got answer .*, need a number"):
        score.number(prompt(answer), "16")


def test_number_reward_runs_without_a_process_of_its_own():
    with RewardPool("number") as pool:
        assert pool._inline is score.number


def test_last_number_is_exact():
    assert score.last_number("0.1 and 0.10") == Decimal("0.1")
    assert score.last_number("none") is None
