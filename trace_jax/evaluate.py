"""Held-out accuracy of the policy that really rolls out: the FP4 one, sampled, not greedy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from trace_jax.checks import require
from trace_jax.data.tokenizer import Tokenizer
from trace_jax.reward.pool import RewardPool, count_failures
from trace_jax.rollout.jax_engine import Generate
from trace_jax.types import Mean, Prompt, Scored
from trace_jax.weight_sync import SamplerWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Answers to held-out prompts."""

    accuracy: Mean  # reward over scored samples; a failed verifier is not counted
    failed: int  # samples whose verifier failed
    scored: tuple[Scored, ...]
    texts: tuple[str, ...]

    def examples(self, count: int) -> list[dict[str, Any]]:
        """The first answer to each of the first `count` prompts, for people to read."""
        out: dict[str, dict[str, Any]] = {}
        for item, text in zip(self.scored, self.texts, strict=True):
            prompt = item.trajectory.prompt
            if len(out) == count:
                break
            out.setdefault(
                prompt.uid,
                {
                    "prompt": prompt.text,
                    "answer": prompt.answer,
                    "response": text,
                    "reward": item.reward,
                    "failure": item.failure,
                    "finish_reason": item.trajectory.finish_reason,
                },
            )
        return list(out.values())


def evaluate(
    generate: Generate,
    weights: SamplerWeights,
    prompts: Sequence[Prompt],
    pool: RewardPool,
    tokenizer: Tokenizer,
    key: jax.Array,
    *,
    samples: int,
    prompts_per_call: int,
) -> Evaluation:
    """Samples each prompt `samples` times and scores the answers.

    Prompts go through in chunks of the training size, so nothing compiles anew. The same key gives
    every evaluation the same random numbers: differences come from the weights.

    Raises: ValueError if not a single answer could be scored.
    """
    scored: list[Scored] = []
    texts: list[str] = []
    for start in range(0, len(prompts), prompts_per_call):
        chunk = prompts[start : start + prompts_per_call]
        trajectories = generate(weights, chunk, samples, key)
        answers = [tokenizer.response_text(t.response_T.tolist()) for t in trajectories]
        scored += pool.score_all(trajectories, answers)
        texts += answers
    rewards = [item.reward for item in scored if item.reward is not None]
    require(
        len(rewards) > 0,
        "evaluation: scored answers",
        f"0 of {len(scored)} ({count_failures(scored)})",
        "at least one",
        "repair the reward function; a failed verifier is never a reward of zero",
    )
    return Evaluation(
        accuracy=Mean(total=float(sum(rewards)), count=float(len(rewards))),
        failed=len(scored) - len(rewards),
        scored=tuple(scored),
        texts=tuple(texts),
    )
