"""Text from a checkpoint on the embedded engine, piece by piece: what `launch/generate.py` does."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax

import trace_jax
from trace_jax import config as cfg
from trace_jax import sources, weight_sync
from trace_jax.checks import require
from trace_jax.data.text_stream import TextStream
from trace_jax.data.tokenizer import load_tokenizer
from trace_jax.rollout import draws, stream
from trace_jax.weight_sync import SamplerWeights

PRECISIONS = ("fp4", "bf16")
Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are chosen; checked when `make_answer` is called."""

    temperature: float = 0.7  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 256
    thinking: bool | None = None  # None: the chat template's default
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer, when it is finished."""

    text: str
    tokens: int  # the stop token included
    seconds: float  # prefill included, and compilation where it was the first of its length
    finish_reason: str  # "stop" | "length"

    def __str__(self) -> str:
        speed = self.tokens / max(self.seconds, 1e-9)
        return f"{self.tokens} tokens, {speed:.1f} tokens/s, finish: {self.finish_reason}"


# (conversation, turn, write) -> Reply; `write` gets the text as it comes
Answer = Callable[[Sequence[Message], int, Callable[[str], object]], Reply]


def quant_of(source: sources.Source, precision: str) -> cfg.Quant:
    """The quant section to sample with: a run's own, or the defaults for this kind of model."""
    require(precision in PRECISIONS, "--quant", repr(precision), f"one of {PRECISIONS}")
    if precision == "bf16":
        return cfg.Quant(rollout="bf16", trainer="bf16")
    if source.quant is not None and source.quant.rollout == "fp4":
        return dataclasses.replace(source.quant, trainer="qat")
    return cfg.Quant(trainer="qat", mlps="experts" if source.model.experts else "all")


def sampler_weights(
    source: sources.Source, precision: str
) -> tuple[cfg.Model, cfg.Quant, SamplerWeights]:
    """What the engine runs with. An NVFP4 export in FP4 runs from its own codes.

    Raises: what loading raises.
    """
    quant = quant_of(source, precision)
    if source.kind == sources.NVFP4 and precision == "fp4":
        return trace_jax.load_quantised(source.path)
    model, params = sources.load(source, dtype="bfloat16")
    return model, quant, weight_sync.make_sync(model, quant)(params, 0)


def make_answer(source: sources.Source, precision: str, sampling: Sampling) -> Answer:
    """Loads a checkpoint and builds `answer(conversation, turn, write) -> Reply`.

    The same seed, turn and conversation give the same answer.

    Raises: ValueError for sampling out of bounds, or a tokenizer that does not fit the model.
    """
    draw = draws.make_draw(sampling.temperature, sampling.top_p, sampling.top_k)
    most = sampling.max_new_tokens
    require(most >= 1, "--max_new_tokens", most, ">= 1")
    tokenizer = load_tokenizer(source.tokenizer)
    # a template that lacks the switch shows before the weights are read
    tokenizer.chat_ids([{"role": "user", "content": "?"}], thinking=sampling.thinking)
    model, quant, weights = sampler_weights(source, precision)
    sources.require_tokenizer_fits(tokenizer.vocab_size, model, str(source.path))
    rollout = cfg.Rollout(group_size=1, max_new_tokens=most, bucket_tokens=64, bucket_batch=1)
    ids = {"stop_ids": tokenizer.stop_ids, "pad_id": tokenizer.pad_id}
    tokens_of = stream.make_stream(model, quant, rollout, **ids, draw=draw)

    def answer(conversation: Sequence[Message], turn: int, write: Callable[[str], object]) -> Reply:
        prompt = tokenizer.chat_ids(conversation, thinking=sampling.thinking)
        key = jax.random.fold_in(jax.random.key(sampling.seed), turn)
        text, pieces, count, last = TextStream(tokenizer), [], 0, -1
        start = time.perf_counter()

        def show(piece: str) -> None:
            if piece:
                pieces.append(piece)
                write(piece)

        for ids in tokens_of(weights, prompt, key):
            for token in ids:
                count, last = count + 1, token
                if token not in tokenizer.stop_ids:
                    show(text.push(token))
        show(text.flush())
        return Reply(
            text="".join(pieces),
            tokens=count,
            seconds=time.perf_counter() - start,
            finish_reason="stop" if last in tokenizer.stop_ids else "length",
        )

    return answer
