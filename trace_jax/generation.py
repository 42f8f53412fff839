"""Text from a checkpoint on the embedded engine, piece by piece: what `launch/generate.py` does."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax

import trace_jax
from trace_jax import config as cfg
from trace_jax import sources, weight_sync
from trace_jax.checks import require
from trace_jax.data.text_stream import TextStream
from trace_jax.data.tokenizer import load_tokenizer
from trace_jax.hf import config_json, config_keys
from trace_jax.rollout import draws, stream
from trace_jax.weight_sync import SamplerWeights

PRECISIONS = ("fp4", "bf16")
DTYPES = ("bfloat16", "float32")
LONGEST = 32768  # tokens of an answer, where a checkpoint does not say
Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are chosen; checked when `make_answer` is called."""

    temperature: float = 0.7  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 256
    thinking: bool | None = None  # None: the chat template's default
    seed: int = 0  # below 2**32
    dtype: str = "bfloat16"  # | "float32", of what is not quantised


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer, when it is finished."""

    text: str
    tokens: int  # the stop token included
    seconds: float  # after the first tokens: prefill, and compilation, are not in it
    timed: int  # tokens that came in these seconds
    finish_reason: str  # "stop" | "length"

    def __str__(self) -> str:
        speed = f"{self.timed / max(self.seconds, 1e-9):.1f} tokens/s, " if self.timed else ""
        return f"{self.tokens} tokens, {speed}finish: {self.finish_reason}"


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
    source: sources.Source, precision: str, dtype: str = "bfloat16"
) -> tuple[cfg.Model, cfg.Quant, SamplerWeights]:
    """What the engine runs with. An NVFP4 export in FP4 runs from its own codes.

    Raises: what loading raises.
    """
    quant = quant_of(source, precision)
    if source.kind == sources.NVFP4 and precision == "fp4":
        model, quant, weights = trace_jax.load_quantised(source.path)
        return dataclasses.replace(model, compute_dtype=dtype), quant, weights
    model, params = sources.load(source, dtype=dtype)
    return model, quant, weight_sync.make_sync(model, quant)(params, 0)


def _check(sampling: Sampling, source: sources.Source, precision: str) -> None:
    """Raises ValueError for what no answer can be made with."""
    quant_of(source, precision)
    most = longest(source)
    got, need = sampling.max_new_tokens, f"1..{most}, the context of the model"
    require(1 <= got <= most, "--max_new_tokens", got, need)
    require(math.isfinite(sampling.temperature), "--temperature", sampling.temperature, "a number")
    require(0 <= sampling.seed < 2**32, "--seed", sampling.seed, "0..4294967295")
    require(sampling.dtype in DTYPES, "--dtype", repr(sampling.dtype), f"one of {DTYPES}")


def longest(source: sources.Source) -> int:
    """Tokens that a model was made for: max_position_embeddings, or LONGEST where none is given."""
    if source.kind == sources.RUN:
        return LONGEST
    given = config_keys.flat(config_json.read(source.path)).get("max_position_embeddings")
    return given if isinstance(given, int) and given > 0 else LONGEST


def make_answer(
    source: sources.Source,
    precision: str,
    sampling: Sampling,
    note: Callable[[str], object] = lambda text: None,
) -> Answer:
    """Loads a checkpoint and builds `answer(conversation, turn, write) -> Reply`.

    The same seed, turn and conversation give the same answer.

    Args:   note: told what takes long, when it begins: loading, compiling.
    Raises: ValueError for sampling out of bounds, or a tokenizer that does not fit the model.
    """
    draw = draws.make_draw(sampling.temperature, sampling.top_p, sampling.top_k)
    _check(sampling, source, precision)
    tokenizer = load_tokenizer(source.tokenizer, "--model")
    # a template that lacks the switch shows before the weights are read
    tokenizer.chat_ids([{"role": "user", "content": "?"}], thinking=sampling.thinking)
    note(f"loading {source.path}")
    model, quant, weights = sampler_weights(source, precision, sampling.dtype)
    sources.require_tokenizer_fits(tokenizer.vocab_size, model, str(source.path))
    rollout = cfg.Rollout(
        group_size=1, max_new_tokens=sampling.max_new_tokens, bucket_tokens=64, bucket_batch=1
    )
    ids = {"stop_ids": tokenizer.stop_ids, "pad_id": tokenizer.pad_id}
    tokens_of = stream.make_stream(model, quant, rollout, **ids, draw=draw)
    compiled: set[int] = set()  # lengths of prompts, in buckets

    def answer(conversation: Sequence[Message], turn: int, write: Callable[[str], object]) -> Reply:
        prompt = tokenizer.chat_ids(conversation, thinking=sampling.thinking)
        require(len(prompt) > 0, "prompt", "no tokens", "some, of --prompt or the chat template")
        key = jax.random.fold_in(jax.random.key(sampling.seed), turn)
        text, pieces, count, last = TextStream(tokenizer), [], 0, -1
        if (bucket := -(-len(prompt) // rollout.bucket_tokens)) not in compiled:
            note("compiling for prompts of this length")
            compiled.add(bucket)
        start, untimed = time.perf_counter(), 0

        def show(piece: str) -> None:
            if piece:
                pieces.append(piece)
                write(piece)

        for chunk, ids in enumerate(tokens_of(weights, prompt, key)):
            for token in ids:
                count, last = count + 1, token
                if token not in tokenizer.stop_ids:
                    show(text.push(token))
            if chunk < 2:  # of prefill and of the first chunk, whose programs may be compiled
                start, untimed = time.perf_counter(), count
        show(text.flush())
        return Reply(
            text="".join(pieces),
            tokens=count,
            seconds=time.perf_counter() - start,
            timed=count - untimed,
            finish_reason="stop" if last in tokenizer.stop_ids else "length",
        )

    return answer
