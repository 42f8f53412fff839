"""Endless Grain streams over prompts: shuffled anew every epoch, resumable at any batch.

An iterator's `get_state()` is a small JSON-able dict; `set_state` on a fresh iterator over the same
prompts and seed gives exactly the batches that would have followed. `grain.checkpoint` and Orbax
store it as it is. Batches cross epochs, so the last prompts of an epoch are never dropped.
"""

from collections.abc import Sequence

import grain
import numpy as np

from trace_jax.checks import require
from trace_jax.data.tokenizer import Tokenizer
from trace_jax.types import Batch, Prompt

# The items are in memory and batches are tiny: a thread would cost more than it saves, and without
# one the state is exactly what the caller has seen.
_READ = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def prompt_batches(
    prompts: Sequence[Prompt], *, prompts_per_step: int, seed: int
) -> grain.DatasetIterator:
    """An endless iterator of tuples of P prompts.

    A batch that crosses two epochs may hold a prompt twice; they are two groups (see
    `batching.collect`).
    Raises: ValueError if there are fewer prompts than one step takes.
    """
    _require_enough(len(prompts), "prompts_per_step", prompts_per_step)
    dataset = grain.MapDataset.source(list(prompts)).seed(seed).shuffle().repeat()
    batches = dataset.batch(prompts_per_step, batch_fn=tuple)
    return iter(batches.to_iter_dataset(_READ))


def supervised_batches(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    batch: int,
    seed: int,
    bucket_tokens: int,
) -> grain.DatasetIterator:
    """An endless iterator of supervised `Batch`es: the loss is on the answer and its stop token.

    All have one shape (batch, T), T the longest example rounded up to `bucket_tokens`, so that the
    step compiles once. Advantages are 1 and sampler log-probs 0: with the importance correction
    off, the policy-gradient loss of such a batch is the cross-entropy.

    Raises: ValueError if a prompt has no answer to learn, or there are fewer prompts than `batch`.
    """
    _require_enough(len(prompts), "warm_start.batch", batch)
    examples = [_example(prompt, tokenizer) for prompt in prompts]
    longest = max(len(ids) for ids, _ in examples)
    length = -(-longest // bucket_tokens) * bucket_tokens

    def pad(rows: Sequence[tuple[np.ndarray, int]]) -> Batch:
        return _pad_supervised(rows, length=length, pad_id=tokenizer.pad_id)

    dataset = grain.MapDataset.source(examples).seed(seed).shuffle().repeat()
    return iter(dataset.batch(batch, batch_fn=pad).to_iter_dataset(_READ))


def _example(prompt: Prompt, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Ids of prompt, answer and stop token; and the length of the prompt."""
    need = "an answer to learn from"
    fix = "--set warm_start=none, or data with answers"
    require(prompt.answer is not None, f"warm start: {prompt.uid}", "no answer", need, fix)
    assert prompt.answer is not None
    answer = (*tokenizer.encode(prompt.answer), tokenizer.stop_ids[0])
    return np.array((*prompt.tokens, *answer), np.int32), len(prompt.tokens)


def _pad_supervised(rows: Sequence[tuple[np.ndarray, int]], *, length: int, pad_id: int) -> Batch:
    tokens_BT = np.full((len(rows), length), pad_id, np.int32)
    valid_BT = np.zeros((len(rows), length), bool)
    loss_mask_BS = np.zeros((len(rows), length - 1), bool)
    for row, (ids, prompt_length) in enumerate(rows):
        tokens_BT[row, : len(ids)] = ids
        valid_BT[row, : len(ids)] = True
        loss_mask_BS[row, prompt_length - 1 : len(ids) - 1] = True
    return Batch(
        tokens_BT=tokens_BT,
        valid_BT=valid_BT,
        loss_mask_BS=loss_mask_BS,
        sampler_logprobs_BS=np.zeros(loss_mask_BS.shape, np.float32),
        advantages_B=np.ones(len(rows), np.float32),
        routes_LBSX=None,
        guidance=None,
    )


def _require_enough(count: int, name: str, per_batch: int) -> None:
    fix = f"lower {name}, or raise data.train_size"
    require(count >= per_batch, "data pipeline", f"{count} prompts", f">= {name}={per_batch}", fix)
