"""Chats with a checkpoint in FP4 or BF16 on the embedded engine; the text streams as it is sampled.

    python launch/generate.py --model=checkpoints/mine --prompt="What is 2 + 2?"
    python launch/generate.py --model=checkpoints/mine --quant=bf16 --temperature=0 --nothinking
    python launch/generate.py --model=runs/demo_cpu --prompt="reverse runrig"
    python launch/generate.py --model=checkpoints/mine < questions.txt

--model is a checkpoint in Hugging Face layout, an NVFP4 export (in FP4 it runs from its own codes)
or a run directory. Without --prompt it asks for turns of a conversation on a terminal (Ctrl-D ends
it, Ctrl-C only the answer), and takes each line of a pipe as a prompt of its own. Text goes to
stdout, tokens per second and the finish reason go to stderr.
"""

import sys

from absl import flags

from launch import cli

_MODEL = flags.DEFINE_string("model", None, "a checkpoint, NVFP4 export or run directory")
_PROMPT = flags.DEFINE_string("prompt", None, "one question; without it: stdin")
_SYSTEM = flags.DEFINE_string("system", None, "a system prompt")
_QUANT = flags.DEFINE_string("quant", "fp4", "fp4 | bf16: what the engine runs in")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "0 is greedy")
_TOP_P = flags.DEFINE_float("top_p", None, "sample from the likeliest tokens that add up to this")
_TOP_K = flags.DEFINE_integer("top_k", None, "sample from that many likeliest tokens")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "of what is not FP4")
_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "longest answer")
_THINKING = flags.DEFINE_bool("thinking", None, "switch of the chat template (default: its own)")
_SEED = flags.DEFINE_integer("seed", 0, "of the sampling", lower_bound=0, upper_bound=2**32 - 1)


def main() -> None:
    if _MODEL.value is None:
        raise ValueError("--model: got nothing, need a checkpoint, NVFP4 export or run directory.")

    from trace_jax import generation, sources

    source = sources.find(_MODEL.value, "--model")
    sampling = generation.Sampling(
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        top_k=_TOP_K.value,
        max_new_tokens=_TOKENS.value,
        thinking=_THINKING.value,
        seed=_SEED.value,
        dtype=_DTYPE.value,
    )
    answer = generation.make_answer(source, _QUANT.value, sampling, note=_note)
    first = [] if _SYSTEM.value is None else [{"role": "system", "content": _SYSTEM.value}]
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    sys.stdin.reconfigure(errors="replace")
    if _PROMPT.value is not None:
        _say(answer, first, _PROMPT.value, 0)
        return
    if not sys.stdin.isatty():
        for turn, line in enumerate(filter(None, map(str.strip, sys.stdin))):
            _say(answer, first, line, turn)
        return
    conversation, turn = first, 0
    while (line := _ask()) is not None:
        conversation, turn = _say(answer, conversation, line, turn, chat=True), turn + 1


def _note(text):
    print(f"[{text}]", file=sys.stderr, flush=True)


def _say(answer, conversation, question, turn, chat=False):
    """Streams the answer; returns the conversation with it. In a chat Ctrl-C ends it early."""
    conversation = [*conversation, {"role": "user", "content": question}]
    pieces = []

    def write(piece):
        pieces.append(piece)
        print(piece, end="", flush=True)

    try:
        reply = str(answer(conversation, turn, write))
    except KeyboardInterrupt:
        if not chat:
            raise
        reply = "interrupted; Ctrl-D ends the conversation"
    print(flush=True)
    _note(reply)
    return [*conversation, {"role": "assistant", "content": "".join(pieces)}]


def _ask():
    """The next line with something on it; None at the end."""
    try:
        while not (line := input("> ").strip()):
            pass
    except EOFError:
        print()
        return None
    return line


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
