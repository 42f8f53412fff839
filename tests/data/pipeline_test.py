"""Oracles: counting how often each prompt comes, and examples padded by hand."""

import collections
import itertools
import json

import grain
import numpy as np
import pytest

from trace_jax.data.pipeline import prompt_batches, supervised_batches
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.types import Prompt


def prompts(count, answer="ab"):
    tokenizer = byte_tokenizer()
    return [
        Prompt(
            uid=str(i),
            text="x" * (i % 5 + 1),
            tokens=tuple(tokenizer.prompt_ids("x" * (i % 5 + 1))),
            answer=answer if i % 2 else answer + answer,
            task="t",
        )
        for i in range(count)
    ]


def uids(batches):
    return [tuple(p.uid for p in batch) for batch in batches]


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def test_prompt_batches_show_every_prompt_once_an_epoch_in_a_new_order():
    batches = take(prompt_batches(prompts(10), prompts_per_step=4, seed=0), 15)  # 6 epochs
    flat = list(itertools.chain.from_iterable(uids(batches)))
    epochs = [tuple(flat[i : i + 10]) for i in range(0, 60, 10)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert len(set(epochs)) == 6 and all(len(batch) == 4 for batch in batches)


def test_prompt_batches_depend_on_the_seed_alone():
    streams = [
        uids(take(prompt_batches(prompts(32), prompts_per_step=4, seed=s), 8)) for s in (1, 1, 2)
    ]
    assert streams[0] == streams[1] != streams[2]


@pytest.mark.parametrize("done", [0, 1, 2, 3, 7])  # within an epoch, across one, at its end
def test_prompt_batches_resume_exactly_from_a_json_state(done):
    def fresh():
        return prompt_batches(prompts(7), prompts_per_step=3, seed=5)

    straight = uids(take(fresh(), done + 12))
    stopped = fresh()
    take(stopped, done)
    state = json.loads(json.dumps(stopped.get_state()))
    resumed = fresh()
    take(resumed, 2)  # whatever it has seen before must not matter
    resumed.set_state(state)
    assert uids(take(resumed, 12)) == straight[done:]


def test_prompt_batches_are_a_grain_iterator_that_its_orbax_handler_stores(tmp_path):
    source = prompt_batches(prompts(7), prompts_per_step=3, seed=5)
    take(source, 4)
    handler = grain.checkpoint.CheckpointHandler()
    handler.save(tmp_path, source)
    target = prompt_batches(prompts(7), prompts_per_step=3, seed=5)
    handler.restore(tmp_path, target)
    assert uids(take(target, 5)) == uids(take(source, 5))


def test_fewer_prompts_than_a_step_are_refused():
    with pytest.raises(ValueError, match="3 prompts, need >= prompts_per_step=4"):
        prompt_batches(prompts(3), prompts_per_step=4, seed=0)


def supervised(count=6, batch=4):
    return supervised_batches(
        prompts(count), byte_tokenizer(), batch=batch, seed=3, bucket_tokens=8
    )


def test_supervised_batch_trains_exactly_the_answer_and_its_stop_token():
    by_tokens = {(*p.tokens, *p.answer.encode(), 258): p for p in prompts(6)}
    seen = collections.Counter()
    for batch in take(supervised(), 3):  # two epochs
        assert batch.tokens_BT.shape == (4, 16)  # longest: 2 + 5 + 2 + 1 or 2 + 4 + 4 + 1 = 11
        assert batch.routes_LBSX is None and batch.guidance is None
        for row in range(4):
            ids = tuple(batch.tokens_BT[row][batch.valid_BT[row]].tolist())
            prompt = by_tokens[ids]
            seen[prompt.uid] += 1
            assert batch.tokens_BT[row].tolist() == [*ids, *[256] * (16 - len(ids))]
            trained = batch.tokens_BT[row, 1:][batch.loss_mask_BS[row]]
            assert trained.tolist() == [*prompt.answer.encode(), 258]
        assert batch.tokens_BT.dtype == np.int32 and batch.loss_mask_BS.shape == (4, 15)
        np.testing.assert_array_equal(batch.sampler_logprobs_BS, np.zeros((4, 15), np.float32))
        np.testing.assert_array_equal(batch.advantages_B, np.ones(4, np.float32))
    assert dict(seen) == {str(i): 2 for i in range(6)}


def test_supervised_batches_resume_exactly_and_keep_one_shape():
    straight = take(supervised(), 6)
    stopped = supervised()
    take(stopped, 2)
    resumed = supervised()
    resumed.set_state(json.loads(json.dumps(stopped.get_state())))
    for want, got in zip(straight[2:], take(resumed, 4), strict=True):
        np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
        np.testing.assert_array_equal(got.loss_mask_BS, want.loss_mask_BS)


def test_supervised_batches_refuse_a_prompt_without_an_answer():
    bare = [Prompt(uid="bare", text="x", tokens=(1,), answer=None, task="t")]
    with pytest.raises(ValueError, match="warm start: bare: got no answer"):
        supervised_batches(bare, byte_tokenizer(), batch=1, seed=0, bucket_tokens=8)
