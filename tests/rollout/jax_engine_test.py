import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax.models import moe
from trace_jax.rollout import jax_engine, unpad
from trace_jax.types import Prompt

NOT_A_TOKEN = -7


@pytest.fixture(scope="module")
def pair(tiny):
    return tiny.make_pair()


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.make_prompts(tiny.LENGTHS)


@pytest.fixture(scope="module")
def many(tiny, pair):
    """Answers to one question under four names and 250 keys: 2000 samples."""
    question = tiny.make_prompts((5,))[0]
    asked = [dataclasses.replace(question, uid=f"name {i}") for i in range(4)]
    return [t for key in range(250) for t in pair.sample(asked, key=key)]


@pytest.fixture
def raw(monkeypatch):
    """A list of what the engine handed over, call by call, still padded."""
    seen, real = [], unpad.trajectories

    def spy(prompts, samples, sampled, *rest):
        seen.append(sampled)
        return real(prompts, samples, sampled, *rest)

    monkeypatch.setattr(unpad, "trajectories", spy)
    return seen


def assert_same(a, b, atol=0.0):
    assert [t.tokens_T.tolist() for t in a] == [t.tokens_T.tolist() for t in b]
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(
            one.sampler_logprobs_R, other.sampler_logprobs_R, rtol=0, atol=atol
        )
        np.testing.assert_array_equal(one.routes_SLX, other.routes_SLX)


def until_some_stop(sample):
    """The first answers of which some stop early and some do not."""
    for key in range(50):
        trajectories = sample(key)
        if {t.finish_reason for t in trajectories} == {"stop", "length"}:
            return trajectories
    raise AssertionError("no such answers in 50 calls")


def stopping_params(tiny):
    """Whatever the last hidden state, one of the two stop tokens has by far the largest logit."""
    params = dict(tiny.rough_params())
    row = 50 * np.random.default_rng(1).standard_normal(tiny.MODEL.width).astype(np.float32)
    embed = params["embed"].at[tiny.STOPS[0]].set(row).at[tiny.STOPS[1]].set(-row)
    return params | {"embed": embed}


def test_the_same_key_gives_the_same_answer_and_another_key_another(pair, prompts):
    first = pair.sample(prompts, key=4)
    assert_same(first, pair.sample(prompts, key=4))
    other = pair.sample(prompts, key=5)
    assert [t.tokens_T.tolist() for t in first] != [t.tokens_T.tolist() for t in other]


def test_samples_of_a_prompt_differ_and_come_prompt_by_prompt(pair, prompts):
    got = pair.sample(prompts)
    assert [(t.prompt.uid, t.sample) for t in got] == [(p.uid, g) for p in prompts for g in (0, 1)]
    assert all(t.version == 3 for t in got)
    for t in got:  # the ids as they were given, then the sampled ones (F34, F41)
        assert tuple(t.tokens_T[: t.prompt_length].tolist()) == t.prompt.tokens
    answers = [t.response_T.tolist() for t in got]
    assert sum(a != b for a, b in zip(answers[::2], answers[1::2], strict=True)) >= 3


def test_a_prompt_asked_twice_in_one_call_gets_fresh_answers_and_in_two_calls_the_same(
    pair, prompts
):
    got = pair.sample([prompts[0], prompts[2], prompts[0]])
    assert_same(got[:2], pair.sample([prompts[0]]))
    # two identical groups would be counted as two independent ones
    first, again = ([t.response_T.tolist() for t in part] for part in (got[:2], got[4:]))
    assert first != again


def test_an_answer_does_not_depend_on_the_rest_of_the_batch(pair, prompts):
    together = pair.sample(prompts)
    alone = [t for p in prompts for t in pair.sample([p])]  # the same buckets, others padding
    assert_same(together, alone)
    assert_same(pair.sample(prompts[::-1])[-2:], together[:2])


def test_one_program_serves_a_bucket_and_another_bucket_changes_no_answer(tiny, pair, prompts):
    """Lengths 1 to 8 and 1 to 4 prompts are one bucket; 5 prompts, or 9 tokens, are another."""
    expected = pair.sample(prompts)
    with jax.log_compiles(), CompileCounter() as compiled:
        pair.sample(prompts[:1])
        pair.sample(tiny.make_prompts((8, 1, 2), seed=9))
        assert compiled.names == []
        longer = tiny.make_prompts((9,), seed=9)
        larger = pair.sample([*prompts, *longer])
        assert compiled.names.count("sample") == 1
        pair.sample([*longer, *prompts[1:], *tiny.make_prompts((16,), seed=8)])
        assert compiled.names.count("sample") == 1
    assert_same(larger[:8], expected, atol=1e-5)


class CompileCounter:
    """Names of the functions that JAX traced for compilation meanwhile."""

    def __enter__(self):
        self.names, self.loggers = [], []
        outer = self

        class Handler(logging.Handler):
            def emit(self, record):
                text = record.getMessage()
                if text.startswith("Compiling "):
                    name = text.split()[1].removeprefix("jit(").rstrip(")")
                    outer.names.append(name)

        self.handler = Handler()
        self.logger = logging.getLogger("jax._src.interpreters.pxla")
        self.propagate, self.logger.propagate = self.logger.propagate, False
        self.logger.addHandler(self.handler)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self.handler)
        self.logger.propagate = self.propagate


def test_first_tokens_follow_the_softmax_at_the_temperature(tiny, pair, many):
    """Chi-square over the vocabulary; and the log-probs are at that temperature (F20)."""
    first = np.array([t.response_T[0] for t in many])
    reported = {int(t.response_T[0]): float(t.sampler_logprobs_R[0]) for t in many}
    batch = tiny.collate([many[0]] * 8)
    probs = []
    for token in range(tiny.VOCAB):  # the trainer's probability of each possible first token
        tokens_BT = batch.tokens_BT.copy()
        tokens_BT[:, many[0].prompt_length] = token
        changed = dataclasses.replace(batch, tokens_BT=tokens_BT)
        logprobs_BS, _ = pair.log_probs(pair.params, changed)
        probs.append(float(np.exp(logprobs_BS[0, many[0].prompt_length - 1])))
    assert sum(probs) == pytest.approx(1, abs=1e-5)
    for token, logprob in reported.items():
        assert logprob == pytest.approx(np.log(probs[token]), abs=1e-5)
    expected = np.array(probs) * len(first)
    counts = np.bincount(first, minlength=tiny.VOCAB)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = np.sum((observed - wanted) ** 2 / wanted)
    freedom = len(observed) - 1
    assert freedom >= 4
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations


def test_without_preference_every_draw_is_uniform_and_independent(tiny, pair, prompts):
    """Embeddings of zero make all logits zero: log-probs are -log V, and steps are unrelated."""
    params = pair.params | {"embed": jnp.zeros_like(pair.params["embed"])}
    weights = pair.sync(params, 0)
    repeats, pairs = 0, 0
    for key in range(40):
        for t in pair.generate(weights, prompts, 2, jax.random.key(key)):
            np.testing.assert_allclose(t.sampler_logprobs_R, -np.log(tiny.VOCAB), rtol=1e-6)
            repeats += int(np.sum(t.response_T[1:] == t.response_T[:-1]))
            pairs += len(t.response_T) - 1
    expected = pairs / tiny.VOCAB
    assert abs(repeats - expected) < 4 * np.sqrt(expected)


def test_an_answer_ends_with_its_first_stop_token_or_at_the_maximum(tiny, many):
    longest, at_the_end = tiny.ROLLOUT.max_new_tokens, 0
    for t in many:
        stops = np.isin(t.response_T, tiny.STOPS)
        assert not stops[:-1].any()
        assert t.finish_reason == ("stop" if stops[-1] else "length")
        assert t.finish_reason == "stop" or len(t.response_T) == longest
        at_the_end += bool(stops[-1]) and len(t.response_T) == longest
    assert at_the_end > 0  # a stop token exactly at the maximal length is a stop (F43)
    assert {t.finish_reason for t in many} == {"stop", "length"}


def test_decoding_ends_when_every_answer_has(tiny, pair, prompts, raw):
    weights = pair.sync(stopping_params(tiny), 0)
    got = pair.generate(weights, prompts[:3], 2, jax.random.key(0))
    assert {len(t.response_T) for t in got} == {1}
    assert int(raw[-1].steps) == 1
    pair.sample(prompts[:3])
    assert int(raw[-1].steps) == tiny.ROLLOUT.max_new_tokens


def test_padding_and_finished_rows_have_no_route(tiny, pair, prompts, raw):
    got = until_some_stop(lambda key: pair.sample(prompts[:3], key=key))
    (prompt_routes,), (routes,) = raw[-1].prompt_routes, raw[-1].response_routes
    lengths = [len(t.response_T) for t in got] + [0, 0]
    for row, length in enumerate(lengths):
        assert np.all(routes[:, row, : max(length - 1, 0)] >= 0)
        assert np.all(routes[:, row, max(length - 1, 0) :] == -1)
    for row, length in enumerate([len(p.tokens) for p in prompts[:3]] + [0]):
        assert np.all(prompt_routes[:, row, :length] >= 0)
        assert np.all(prompt_routes[:, row, length:] == -1)
    assert raw[-1].length_B.tolist() == lengths


def test_padding_and_finished_rows_reach_no_expert(tiny, prompts, monkeypatch):
    """Counts the routes that the experts really see, call by call."""
    model = dataclasses.replace(tiny.MODEL, layers=1)
    rollout = dataclasses.replace(tiny.ROLLOUT, max_new_tokens=5)
    seen, real = [], moe.expert_mlp

    def spy(routes_BTX, *rest):
        jax.debug.callback(lambda routes: seen.append(np.asarray(routes)), routes_BTX, ordered=True)
        return real(routes_BTX, *rest)

    monkeypatch.setattr(moe, "expert_mlp", spy)
    pair = tiny.make_pair(model=model, rollout=rollout)
    cut = jax.tree.map(lambda a: a[:1], pair.params["layers"])
    weights = pair.sync(pair.params | {"layers": cut}, 0)

    def sample(key):
        seen.clear()
        found = pair.generate(weights, prompts[:3], 2, jax.random.key(key))
        jax.effects_barrier()
        return found

    got = until_some_stop(sample)
    lengths = np.array([len(t.response_T) for t in got] + [0, 0])
    assert lengths.min(where=lengths > 0, initial=9) < lengths.max()
    rows = [int(np.sum(np.all(routes >= 0, axis=-1))) for routes in seen]
    assert rows[0] == sum(len(p.tokens) for p in prompts[:3])
    # answer of n tokens: n-1 of them are processed, in steps 1 to n-1
    assert rows[1:] == [int(np.sum(lengths - 1 > step)) for step in range(lengths.max() - 1)]


def test_new_weights_answer_like_a_fresh_engine(tiny, pair, prompts):
    """Nothing of the old version survives an update (F35)."""
    old = pair.sample(prompts)
    updated = tiny.rough_params(seed=1)
    got = pair.generate(pair.sync(updated, 4), prompts, 2, jax.random.key(0))
    fresh = jax_engine.make_generate(
        tiny.MODEL, tiny.BF16, tiny.ROLLOUT, stop_ids=tiny.STOPS, pad_id=tiny.PAD
    )
    assert_same(got, fresh(pair.sync(updated, 4), prompts, 2, jax.random.key(0)))
    assert [t.tokens_T.tolist() for t in got] != [t.tokens_T.tolist() for t in old]
    assert {t.version for t in got} == {4}


def test_the_trainer_may_donate_its_parameters_after_a_sync(tiny, pair, prompts):
    theirs = jax.tree.map(jnp.copy, pair.params)
    weights = pair.sync(theirs, 3)
    jax.tree.map(lambda leaf: leaf.delete(), theirs)
    got = pair.generate(weights, prompts, 2, jax.random.key(0))
    assert_same(got, pair.sample(prompts))


def test_a_sequence_key_depends_on_prompt_and_sample_only():
    make = jax.jit(functools.partial(jax_engine.sequence_keys, samples=3))
    seeds = jnp.array([5, 9], jnp.uint32)
    data = np.asarray(jax.random.key_data(make(jax.random.key(0), seeds)))
    swapped = np.asarray(jax.random.key_data(make(jax.random.key(0), seeds[::-1])))
    np.testing.assert_array_equal(data[:3], swapped[3:])
    assert len(np.unique(data, axis=0)) == 6


@pytest.mark.parametrize("truncated", [{"top_p": 0.9}, {"top_k": 5}])
def test_truncated_sampling_is_refused(tiny, truncated):
    rollout = dataclasses.replace(tiny.ROLLOUT, **truncated)
    with pytest.raises(ValueError, match=r"top_p, top_k: got .*, need none\. Fix: "):
        jax_engine.make_generate(tiny.MODEL, tiny.BF16, rollout, stop_ids=[1], pad_id=0)


def test_an_empty_prompt_is_refused_by_name(tiny, pair, prompts):
    empty = dataclasses.replace(prompts[0], uid="nothing", tokens=())
    with pytest.raises(ValueError, match="prompt nothing: tokens: got 0, need at least one"):
        pair.sample([prompts[1], empty])
    with pytest.raises(ValueError, match="prompts: got 0"):
        pair.sample([])


def test_prompts_are_padded_to_whole_buckets(tiny, prompts):
    rollout = cfg.Rollout(bucket_tokens=8, bucket_batch=8)
    tokens_PT, length_P = unpad.pad_prompts(prompts[:3], 2, rollout, NOT_A_TOKEN)
    assert length_P.tolist() == [3, 5, 7, 0]
    assert tokens_PT.shape == (4, 8)
    for row, prompt in enumerate(prompts[:3]):
        padding = [NOT_A_TOKEN] * (8 - len(prompt.tokens))
        assert tokens_PT[row].tolist() == [*prompt.tokens, *padding]
    assert unpad.pad_prompts(prompts[:1], 16, rollout, 0)[0].shape == (1, 8)  # more than a bucket


def test_a_prompt_asked_twice_in_a_call_has_two_seeds_and_the_first_is_its_own():
    one, other = (
        Prompt(uid=uid, text="", tokens=(1,), answer=None, task="t") for uid in ("a", "b")
    )
    alone, twice = jax_engine.prompt_seeds([one]), jax_engine.prompt_seeds([one, other, one])
    assert twice[0] == alone[0]
    assert len(set(twice)) == 3
