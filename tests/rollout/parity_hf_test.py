"""The engine's prefill and decode against transformers' own, with caches on both sides.

Prompts of different length in one batch: transformers gets each alone, prefilled, then token by
token, and must give the engine's samples the log-probs that the engine reports.
"""

import jax
import numpy as np
import pytest

import trace_jax
from tests import hf_models, slow
from trace_jax import config as cfg
from trace_jax import weight_sync
from trace_jax.rollout import jax_engine
from trace_jax.types import Prompt

hf_models.need_torch()
import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

BF16 = cfg.Quant(rollout="bf16", trainer="bf16")
LENGTHS, NEW = (1, 7, 20), 12
NAMES = slow.only(hf_models.NAMES, fast=("qwen3_moe", "llama", "qwen3_next"))


def cached_logprobs(theirs, tokens_T, prompt_length):
    """log softmax of each response token, nats: prefill, then one token a call."""
    ids = torch.from_numpy(tokens_T.astype(np.int64))[None]
    found, cache, start = [], DynamicCache(config=theirs.config), 0
    with torch.no_grad():
        for stop in range(prompt_length, len(tokens_T)):
            out = theirs(ids[:, start:stop], cache=cache, use_cache=True)
            start = stop
            found.append(torch.log_softmax(out.logits[0, -1].float(), -1)[tokens_T[stop]].item())
    return np.array(found)


@pytest.mark.parametrize("name", NAMES)
def test_engine_samples_with_the_probabilities_of_transformers(tmp_path, name):
    theirs = hf_models.tiny(name, tmp_path / name)
    model, params = trace_jax.load(tmp_path / name)
    draw = np.random.default_rng(0)
    prompts = []
    for length in LENGTHS:
        ids = draw.integers(2, theirs.config.vocab_size, length)
        prompts.append(
            Prompt(uid=str(length), text="", tokens=tuple(map(int, ids)), answer=None, task="t")
        )
    rollout = cfg.Rollout(max_new_tokens=NEW, bucket_tokens=8, bucket_batch=2)
    generate = jax_engine.make_generate(model, BF16, rollout, stop_ids=(1,), pad_id=0)
    weights = weight_sync.make_sync(model, BF16)(params, 0)
    trajectories = generate(weights, prompts, 2, jax.random.key(4))
    assert len(trajectories) == 2 * len(LENGTHS)
    for t in trajectories:
        want = cached_logprobs(theirs, t.tokens_T, t.prompt_length)
        assert len(want) == len(t.response_T) > 0 and np.std(want) > 0.1
        np.testing.assert_allclose(t.sampler_logprobs_R, want, rtol=0, atol=2e-4)
