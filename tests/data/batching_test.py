"""Oracles: every trajectory read back out of the batch by its own lengths, and masks by hand."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from trace_jax.data import batching
from trace_jax.guidance.record import Guidance, GuidanceSpec, SiteRecord
from trace_jax.types import Batch, Prompt, Scored, Trajectory

L, X = 3, 2
ONE = "nvfp4:global_rule=one"
SPEC = GuidanceSpec(
    kind="codes", layers=((0, 2), (0, 2)), sites=("expert_in", "k"), formats=("nvfp4", ONE)
)


def make_guidance(rng, S, spec=SPEC):
    def site(per_token, global_scale):
        lead = (len(spec.layers[0]), S, *per_token)
        return SiteRecord(
            bits=rng.integers(1, 256, (*lead, 8), np.uint8),
            scales=rng.integers(1, 256, (*lead, 1), np.uint8),
            global_scale=rng.random((*lead, 1), np.float32) + 1 if global_scale else None,
        )

    return Guidance(sites={"expert_in": site((), True), "k": site((2,), False)}, spec=spec)


def make(seed, prompt_length, response_length, *, uid="p", sample=0, reward=1.0, **fields):
    """A scored trajectory in which every number differs from padding."""
    rng = np.random.default_rng(seed)
    T = prompt_length + response_length
    tokens_T = rng.integers(1, 200, T).astype(np.int32)
    tokens = tuple(int(t) for t in tokens_T[:prompt_length])
    values = {
        "prompt": Prompt(uid=uid, text="q", tokens=tokens, answer="a", task="t"),
        "sample": sample,
        "tokens_T": tokens_T,
        "prompt_length": prompt_length,
        "sampler_logprobs_R": -rng.random(response_length, np.float32) - 0.1,
        "routes_SLX": rng.integers(0, 8, (T - 1, L, X)).astype(np.int16),
        "guidance": make_guidance(rng, T - 1),
        "finish_reason": "stop",
        "versions_R": np.zeros(response_length, np.int32),
    }
    failure = None if reward is not None else "timeout"
    return Scored(trajectory=Trajectory(**values | fields), reward=reward, failure=failure)


SHAPES = [(3, 4), (1, 1), (5, 2), (2, 9)]


def make_batch(rows=6, **fields):
    scored = [make(i, p, r) for i, (p, r) in enumerate(SHAPES)]
    values = {"length": None, "bucket_tokens": 8, "pad_id": 250, "rows": rows} | fields
    advantages_B = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    return scored, batching.collate(scored, advantages_B, **values)


def test_collate_lets_every_trajectory_be_read_back_exactly():
    scored, batch = make_batch()
    assert batch.tokens_BT.shape == (6, 16)  # longest 11, bucket 8
    for row, item in enumerate(scored):
        t = item.trajectory
        T = len(t.tokens_T)
        np.testing.assert_array_equal(batch.tokens_BT[row, :T], t.tokens_T)
        np.testing.assert_array_equal(np.flatnonzero(batch.valid_BT[row]), np.arange(T))
        got = batch.routes_LBSX[:, row, : T - 1].transpose(1, 0, 2)
        np.testing.assert_array_equal(got, t.routes_SLX)
        for name, site in t.guidance.sites.items():
            stacked = batch.guidance.sites[name]
            np.testing.assert_array_equal(stacked.bits[:, row, : T - 1], site.bits)
            np.testing.assert_array_equal(stacked.scales[:, row, : T - 1], site.scales)
            if site.global_scale is not None:
                got = stacked.global_scale[:, row, : T - 1]
                np.testing.assert_array_equal(got, site.global_scale)
    assert batch.guidance.sites["k"].global_scale is None and batch.guidance.spec == SPEC
    np.testing.assert_array_equal(batch.advantages_B, np.float32([0.5, -1, 2, 0, 0, 0]))


def test_collate_masks_position_s_where_token_s_plus_1_was_sampled():
    _, batch = make_batch(bucket_tokens=4)
    mask_BS = batch.loss_mask_BS.astype(int).tolist()
    assert mask_BS[0] == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]  # 3 prompt + 4 sampled, T = 12
    assert mask_BS[1] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]  # 1 + 1
    assert mask_BS[2] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]  # 5 + 2
    assert mask_BS[3] == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]  # 2 + 9


def test_collate_aligns_tokens_and_log_probs_with_the_mask():
    scored, batch = make_batch()
    for row, item in enumerate(scored):
        mask_S = batch.loss_mask_BS[row]
        np.testing.assert_array_equal(batch.tokens_BT[row, 1:][mask_S], item.trajectory.response_T)
        got = batch.sampler_logprobs_BS[row][mask_S]
        np.testing.assert_array_equal(got, item.trajectory.sampler_logprobs_R)
    assert not batch.sampler_logprobs_BS[~batch.loss_mask_BS].any()


def test_collate_fills_padding_with_what_the_batch_documents():
    _, batch = make_batch()
    pad_BT, pad_BS = ~batch.valid_BT, ~batch.valid_BT[:, 1:]  # token s+1 exists iff s was processed
    assert (batch.tokens_BT[pad_BT] == 250).all()
    assert not batch.valid_BT[4:].any() and not batch.loss_mask_BS[4:].any()
    assert (batch.routes_LBSX[:, pad_BS] == -1).all()
    assert (batch.routes_LBSX[:, ~pad_BS] >= 0).all()
    for leaf in jax.tree.leaves(batch.guidance):
        assert not leaf[:, pad_BS].any() and leaf[:, ~pad_BS].all()


def test_collate_keeps_the_dtypes_that_a_step_compiles_for():
    _, batch = make_batch()
    dtypes = [batch.tokens_BT.dtype, batch.valid_BT.dtype, batch.loss_mask_BS.dtype]
    dtypes += [batch.sampler_logprobs_BS.dtype, batch.advantages_B.dtype, batch.routes_LBSX.dtype]
    assert dtypes == [np.int32, bool, bool, np.float32, np.float32, np.int32]
    assert {leaf.dtype for leaf in jax.tree.leaves(batch.guidance)} == {
        np.dtype(np.uint8),
        np.dtype(np.float32),
    }


def test_collate_takes_a_given_length_and_refuses_one_that_does_not_fit():
    assert make_batch(length=24)[1].tokens_BT.shape == (6, 24)
    for length in (8, 20):  # too short; no multiple of 8
        with pytest.raises(ValueError, match="a multiple of 8 and >= 11"):
            make_batch(length=length)
    with pytest.raises(ValueError, match="rows: got 3, need >= the 4"):
        make_batch(rows=3)


def test_collate_of_bf16_rollouts_has_no_guidance():
    scored = [make(i, 2, 3, guidance=None) for i in range(2)]
    args = {"length": None, "bucket_tokens": 4, "pad_id": 0, "rows": 2}
    batch = batching.collate(scored, np.zeros(2, np.float32), **args)
    assert batch.guidance is None and batch.routes_LBSX.shape == (L, 2, 7, X)
    mixed = [make(0, 2, 3), make(1, 2, 3, guidance=None)]
    with pytest.raises(ValueError, match=r"guidance: .*same sites and spec"):
        batching.collate(mixed, np.zeros(2, np.float32), **args)
    other = make_guidance(
        np.random.default_rng(0), 4, dataclasses.replace(SPEC, layers=((0, 1), (0, 1)))
    )
    with pytest.raises(ValueError, match=r"guidance: .*same sites and spec"):
        batching.collate([mixed[0], make(1, 2, 3, guidance=other)], np.zeros(2, np.float32), **args)
    with pytest.raises(ValueError, match="got no trajectory"):
        batching.collate([], np.zeros(0, np.float32), **args)


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("field", ["sampler_logprobs_R", "routes_SLX", "guidance"])
def test_collate_refuses_records_one_too_short_or_long_and_names_them(field, off):
    rng = np.random.default_rng(0)
    values = {
        "sampler_logprobs_R": np.zeros(4 + off, np.float32),
        "routes_SLX": np.zeros((6 + off, L, X), np.int16),
        "guidance": make_guidance(rng, 6 + off),
    }
    bad = make(0, 3, 4, uid="the_prompt", sample=5, **{field: values[field]})
    with pytest.raises(ValueError, match=rf"the_prompt#5: {field}.*got length"):
        batching.check_trajectory(bad.trajectory)


def test_check_trajectory_refuses_tokens_that_are_not_the_prompts():
    tokens_T = np.arange(7, dtype=np.int32)
    with pytest.raises(ValueError, match="do not start with the prompt"):
        batching.check_trajectory(make(0, 3, 4, tokens_T=tokens_T).trajectory)
    with pytest.raises(ValueError, match="prompt_length 7 of 7"):
        short = dataclasses.replace(make(0, 3, 4).trajectory, prompt_length=7)
        batching.check_trajectory(short)


def test_collect_groups_by_prompt_and_counts_failures_apart():
    rewards = {("a", 0): 1.0, ("a", 1): None, ("b", 0): None, ("b", 1): None, ("c", 0): 0.0}
    order = [("c", 0), ("a", 1), ("b", 1), ("a", 0), ("b", 0)]
    scored = [
        make(i, 1, 1, uid=u, sample=s, reward=rewards[u, s]) for i, (u, s) in enumerate(order)
    ]
    got = batching.collect(scored)
    assert [(s.trajectory.prompt.uid, s.trajectory.sample) for s in got.scored] == [
        ("c", 0),
        ("a", 0),
    ]
    assert got.group_B.tolist() == [0, 1] and got.reward_B.tolist() == [0.0, 1.0]
    assert (got.failed, got.failures) == (3, {"timeout": 3})


def test_collect_keeps_two_groups_of_one_prompt_apart():
    asked = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    scored = [make(i, 1, 1, uid=u, sample=s, reward=float(i)) for i, (u, s) in enumerate(asked)]
    got = batching.collect(scored)
    assert got.group_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert got.reward_B.tolist() == [0, 1, 2, 3, 4, 5]


def join(parts):
    """The batch put together again, by the axis that types.py documents."""

    def cat(axis, *leaves):
        return np.concatenate(leaves, axis=axis)

    fields = {}
    for field in dataclasses.fields(Batch):
        values = [getattr(part, field.name) for part in parts]
        axis = {"routes_LBSX": 1, "guidance": 1}.get(field.name, 0)
        fields[field.name] = jax.tree.map(lambda *x, a=axis: cat(a, *x), *values)
    return Batch(**fields)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_micro_batches_are_the_batch_in_order(size):
    _, batch = make_batch()
    batch = dataclasses.replace(
        batch, old_logprobs_BS=np.arange(90, dtype=np.float32).reshape(6, 15)
    )
    parts = list(batching.micro_batches(batch, size))
    assert [len(part.tokens_BT) for part in parts] == [size] * (6 // size)
    assert_equal(join(parts), batch)


def test_micro_batches_refuse_a_size_that_would_lose_rows():
    with pytest.raises(ValueError, match="size: got 4, need a divisor of the 6 rows"):
        batching.micro_batches(make_batch()[1], 4)
    assert [batching.rows_for(n, 4) for n in (0, 1, 4, 5)] == [4, 4, 4, 8]


def test_micro_batches_end_their_thread_when_the_caller_stops_early():
    parts = batching.micro_batches(make_batch()[1], 1)
    next(parts)
    assert any("grain" in thread.name for thread in threading.enumerate())
    parts.close()
    give_up = time.monotonic() + 5  # Grain does not wait for the thread to notice
    while any("grain" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def rows_of(batch):
    return [tuple(row[valid]) for row, valid in zip(batch.tokens_BT, batch.valid_BT, strict=True)]


def test_minibatches_deal_every_row_once_and_real_rows_evenly():
    _, batch = make_batch(rows=8)
    for seed in range(5):
        parts = list(batching.minibatches(batch, count=2, seed=seed))
        assert [len(part.tokens_BT) for part in parts] == [4, 4]
        assert sorted(rows_of(parts[0]) + rows_of(parts[1])) == sorted(rows_of(batch))
        assert [part.valid_BT.any(axis=1).sum() for part in parts] == [2, 2]
        for part in parts:  # the fields of a row stay together
            for row, tokens in enumerate(rows_of(part)):
                source = rows_of(batch).index(tokens)
                if tokens:
                    want = batching.take_rows(batch, slice(source, source + 1))
                    assert_equal(batching.take_rows(part, slice(row, row + 1)), want)


def test_minibatches_depend_on_the_seed_and_not_on_padding():
    def order(rows, seed):
        parts = batching.minibatches(make_batch(rows=rows)[1], count=2, seed=seed)
        return [[tokens for tokens in rows_of(part) if tokens] for part in parts]

    assert order(4, 1) == order(4, 1) == order(8, 1)
    assert len({str(order(4, seed)) for seed in range(8)}) > 1


def test_one_minibatch_is_the_batch_and_an_uneven_count_is_refused():
    _, batch = make_batch()
    (only,) = batching.minibatches(batch, count=1, seed=0)
    assert_equal(only, batch)
    with pytest.raises(ValueError, match="count: got 4, need a divisor of the 6 rows"):
        batching.minibatches(batch, count=4, seed=0)
