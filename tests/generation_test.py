"""Answers from a checkpoint; oracle: the plain forward of the whole conversation at every step."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from trace_jax import generation, overrides, sources
from trace_jax.data.tokenizer import byte_tokenizer
from trace_jax.models import transformer

TINY = overrides.load("tiny_cpu")
QUESTION = [{"role": "user", "content": "reverse abc"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    model = dataclasses.replace(TINY.model, vocab_size=272)
    params = transformer.init(model, 272, jax.random.key(3))
    trace_jax.save(folder, model, params, dtype="bfloat16", tokenizer=byte_tokenizer())
    return sources.find(folder, "x")


def ask(source, precision="bf16", conversation=QUESTION, turn=0, **sampling):
    fields = {"temperature": 0.0, "max_new_tokens": 12} | sampling
    pieces = []
    answer = generation.make_answer(source, precision, generation.Sampling(**fields))
    reply = answer(conversation, turn, pieces.append)
    assert "".join(pieces) == reply.text
    return reply


def test_greedy_answers_take_the_likeliest_token_of_the_plain_forward(source, monkeypatch):
    seen = []
    push = generation.TextStream.push
    monkeypatch.setattr(
        generation.TextStream,
        "push",
        lambda self, token: (seen.append(token), push(self, token))[1],
    )
    reply = ask(source)
    prompt = byte_tokenizer().chat_ids(QUESTION)
    model, params = sources.load(source)
    logits = trace_jax.logits(model, params, jnp.asarray([[*prompt, *seen]], jnp.int32))
    logits = np.asarray(logits)[0, len(prompt) - 1 :]
    assert len(seen) >= 4 and reply.tokens in (len(seen), len(seen) + 1)
    spread = logits.std()
    for row, token in zip(logits, seen, strict=False):
        assert row.max() - row[token] < 0.1 * spread  # the engine computes in BF16


def test_the_same_seed_and_turn_give_the_same_answer(source):
    hot = {"temperature": 1.5, "max_new_tokens": 12}
    answers = [
        generation.make_answer(source, "bf16", generation.Sampling(seed=seed, **hot))
        for seed in (3, 4)
    ]
    first, second = answers
    text = first(QUESTION, 0, len).text
    assert first(QUESTION, 0, len).text == text
    assert first(QUESTION, 1, len).text != text
    assert second(QUESTION, 0, len).text != text


def test_the_finish_reason_and_the_text_of_an_answer(source, tmp_path):
    reply = ask(source, max_new_tokens=5)
    assert (reply.tokens, reply.finish_reason) == (5, "length")
    assert "5 tokens" in str(reply) and "finish: length" in str(reply)
    # a model that says "A", then stops: two embeddings that answer each other, and a tied head
    model, params = sources.load(source)
    params = jax.tree.map(jnp.zeros_like, params)
    params["final_norm"] += 1
    params["embed"] = params["embed"].at[258, 0].set(9.0).at[257, 0].set(1.0)
    trace_jax.save(tmp_path / "stop", model, params, tokenizer=byte_tokenizer())
    reply = ask(sources.find(tmp_path / "stop", "x"))
    assert (reply.text, reply.tokens, reply.finish_reason) == ("", 1, "stop")


def test_fp4_runs_from_the_packed_codes_of_a_checkpoint(source):
    _, quant, weights = generation.sampler_weights(source, "fp4")
    _, plain, whole = generation.sampler_weights(source, "bf16")
    assert (quant.rollout, plain.rollout) == ("fp4", "bf16")
    assert weights.bytes < 0.7 * whole.bytes
    assert set(weights.params["segments"][0]["moe"]["gate_up"]) == {"codes", "scales", "global"}
    assert ask(source, "fp4").tokens >= 1


def test_a_run_answers_with_its_own_quant_section(source):
    own = dataclasses.replace(TINY.quant, weights="mxfp4", trainer="trace")
    found = generation.quant_of(dataclasses.replace(source, quant=own), "fp4")
    assert (found.weights, found.trainer) == ("mxfp4", "qat")
    dense = dataclasses.replace(source.model, experts=0, dense_ffn=64)
    assert generation.quant_of(dataclasses.replace(source, model=dense), "fp4").mlps == "all"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -1.0}, "temperature: got -1.0, need >= 0"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"max_new_tokens": 10**8}, r"max_new_tokens: got 100000000, need 1\.\.\d+, the context"),
        ({"temperature": float("inf")}, "--temperature: got inf"),
        ({"seed": 2**32}, "--seed: got 4294967296, need 0..4294967295"),
        ({"dtype": "float16"}, "--dtype: got 'float16', need one of"),
        ({"thinking": True}, "thinking=True and no switch"),
    ],
)
def test_sampling_out_of_bounds_is_refused(fields, says, source):
    with pytest.raises(ValueError, match=says):
        ask(source, **fields)


def test_the_longest_answer_is_the_context_that_the_checkpoint_gives(source, tmp_path):
    shutil.copytree(source.path, tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    path = tmp_path / "c" / "config.json"
    path.write_text(json.dumps(config | {"max_position_embeddings": 77}))
    assert generation.longest(sources.find(tmp_path / "c", "x")) == 77
    config.pop("max_position_embeddings", None)
    path.write_text(json.dumps(config))
    assert generation.longest(sources.find(tmp_path / "c", "x")) == generation.LONGEST


def test_speed_leaves_out_the_first_tokens_and_the_notes_say_why(source, caplog):
    notes, sampling = [], generation.Sampling(temperature=0.0, max_new_tokens=12, dtype="float32")
    answer = generation.make_answer(source, "bf16", sampling, notes.append)
    with jax.log_compiles(True), caplog.at_level("WARNING"):
        replies = [answer(QUESTION, turn, len) for turn in range(2)]
    assert [note.split()[0] for note in notes] == ["loading", "compiling"]
    assert sum("jit(advance)" in text for text in caplog.messages if "Finished XLA" in text) == 1
    assert all(reply.timed < reply.tokens for reply in replies)
    quick = generation.Reply(text="", tokens=1, seconds=1.0, timed=0, finish_reason="stop")
    assert str(quick) == "1 tokens, finish: stop"


def test_an_unknown_precision_is_refused(source):
    with pytest.raises(ValueError, match=r"--quant: got 'int4', need one of"):
        ask(source, "int4")
