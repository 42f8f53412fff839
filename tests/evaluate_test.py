"""Evaluation covers every prompt, in chunks, and does not count verifiers that failed."""

import jax
import numpy as np

from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.evaluate import evaluate
from trace_jax.reward.pool import RewardPool
from trace_jax.types import Prompt, Scored, Trajectory
from trace_jax.weight_sync import SamplerWeights


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(uid=str(i), text=f"q{i}", tokens=(1, 2), answer=str(i), task="t")
        for i in range(count)
    ]


def sampler(calls: list):
    """A sampler that answers each prompt with its uid and notes what it was asked."""

    def generate(weights, chunk, samples, key):
        calls.append((len(chunk), samples, jax.random.key_data(key).tolist()))
        return [trajectory(p, s) for p in chunk for s in range(samples)]

    return generate


def trajectory(prompt: Prompt, sample: int) -> Trajectory:
    answer = [*prompt.uid.encode(), 258]
    length = len(prompt.tokens) + len(answer)
    return Trajectory(
        prompt=prompt,
        sample=sample,
        tokens_T=np.array([*prompt.tokens, *answer], np.int32),
        prompt_length=2,
        sampler_logprobs_R=np.zeros(len(answer), np.float32),
        routes_SLX=np.zeros((length - 1, 1, 1), np.int16),
        guidance=None,
        finish_reason="stop",
        versions_R=np.zeros(len(answer), np.int32),
    )


class Pool(RewardPool):
    """Right answers of sample 0 are rewarded; the verifier of prompt 3 always fails."""

    def __init__(self):
        super().__init__("exact")

    def score_all(self, trajectories, texts):
        return [self.score(t, x) for t, x in zip(trajectories, texts, strict=True)]

    def score(self, t, text):
        if t.prompt.uid == "3":
            return Scored(trajectory=t, reward=None, failure="broken")
        return Scored(trajectory=t, reward=float(text == t.prompt.answer and t.sample == 0))


def test_every_prompt_is_asked_once_per_sample_and_failures_are_not_zeros():
    calls: list = []
    key = jax.random.key(5)
    result = evaluate(
        sampler(calls),
        SamplerWeights(params={}, version=0, bytes=0),
        prompts(5),
        Pool(),
        byte_tokenizer(),
        key,
        samples=2,
        prompts_per_call=2,
    )
    assert [call[:2] for call in calls] == [(2, 2), (2, 2), (1, 2)]
    assert len({str(call[2]) for call in calls}) == 1  # every call under the same key
    assert result.failed == 2
    assert result.accuracy.value == 4 / 8  # one of two samples, four prompts that were judged
    kept = result.examples(2)
    assert [(k["prompt"], k["response"]) for k in kept] == [("q0", "0"), ("q1", "1")]
