"""One answer at a time, token by token, from the embedded engine: for chats, not for training."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.rollout import unpad
from trace_jax.rollout.jax_engine import Begun, Core, Decoded, Draw
from trace_jax.types import Prompt
from trace_jax.weight_sync import SamplerWeights

# (weights, tokens of the prompt, key, ids a chunk, uid of the prompt) -> chunks of sampled ids
Stream = Callable[..., Iterator[list[int]]]


def make_stream(
    model: cfg.Model,
    quant: cfg.Quant,
    rollout: cfg.Rollout,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    draw: Draw | None = None,
) -> Stream:
    """Builds `stream(weights, tokens, key, chunk=4, uid="") -> iterator of lists of new ids`.

    The ids are those of `jax_engine.make_generate` for a prompt of that `uid` and its first sample,
    if `draw` is None. The last one is a stop token unless `max_new_tokens` ended the answer. Prompt
    lengths in one bucket share a compilation; the state is donated from chunk to chunk.

    Args: draw: (logits_BV, keys_B, step) -> (ids, log-probs), instead of sampling from the full
          distribution at the temperature.
    """
    # guidance is for a trainer: nothing is recorded
    quant = dataclasses.replace(quant, trainer="bf16")
    rollout = dataclasses.replace(rollout, bucket_batch=1)
    core = Core(model, quant, rollout, tuple(stop_ids), pad_id, custom_draw=draw)

    @jax.jit
    def begin(params, tokens_PT, length_P, seed_P, key) -> Begun:
        return core.begin(params, tokens_PT, length_P, seed_P, key, samples=1)

    @functools.partial(jax.jit, donate_argnames=("state",))
    def advance(params, begun: Begun, state: Decoded, stop: jax.Array) -> Decoded:
        return core.advance(params, dataclasses.replace(begun, state=state), stop)

    def stream(
        weights: SamplerWeights,
        tokens: Sequence[int],
        key: jax.Array,
        chunk: int = 4,
        uid: str = "",
    ) -> Iterator[list[int]]:
        require(chunk >= 1, "stream: chunk", chunk, ">= 1 ids")
        prompt = Prompt(uid=uid, text="", tokens=tuple(tokens), answer=None, task="")
        tokens_PT, length_P = unpad.pad_prompts([prompt], 1, rollout, pad_id)
        seed_P = np.array([zlib.crc32(uid.encode())], np.uint32)
        begun = begin(weights.params, tokens_PT, length_P, seed_P, key)
        state, sent = begun.state, 0
        begun = dataclasses.replace(begun, state=None)
        while True:
            count, ended = int(state.length_B[0]), bool(state.done_B[0])
            if count > sent:
                # sliced on the host: a slice on the device is compiled for each pair of bounds
                yield np.asarray(state.tokens_BR)[0, sent:count].tolist()
            sent = count
            if ended or count >= rollout.max_new_tokens:
                return
            stop = jnp.int32(min(count + chunk, rollout.max_new_tokens))
            state = advance(weights.params, begun, state, stop)

    return stream
