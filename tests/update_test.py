"""A linear next-token model stands in for the policy: small enough to differentiate by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trace_jax.config import Optim
from trace_jax.guidance.record import Guidance, GuidanceSpec, SiteRecord
from trace_jax.rl.loss import policy_loss, supervised_loss
from trace_jax.types import Batch, Mean, TrainState
from trace_jax.update import (
    init_state,
    make_optimizer,
    make_schedule,
    make_train_step,
)

VOCAB, TOKENS = 5, 10


def make_batch(lengths, *, seed=0, mask=None):
    """Sequences of which the first `length` predictions are trained."""
    rng = np.random.default_rng(seed)
    b, s = len(lengths), TOKENS - 1
    if mask is None:
        mask = np.arange(s)[None] < np.asarray(lengths)[:, None]
    return Batch(
        tokens_BT=rng.integers(0, VOCAB, (b, TOKENS)).astype(np.int32),
        valid_BT=np.ones((b, TOKENS), bool),
        loss_mask_BS=mask,
        sampler_logprobs_BS=rng.uniform(-3, -1, (b, s)).astype(np.float32),
        advantages_B=rng.normal(size=b).astype(np.float32),
        routes_LBSX=rng.integers(0, 4, (3, b, s, 2)).astype(np.int16),
        guidance=Guidance(
            sites={
                "k": SiteRecord(
                    bits=rng.integers(0, 255, (2, b, s, 8)).astype(np.uint8),
                    scales=rng.integers(0, 255, (2, b, s, 1)).astype(np.uint8),
                    global_scale=None,
                )
            },
            spec=GuidanceSpec(kind="codes", layers=((1, 2),), sites=("k",), formats=("nvfp4",)),
        ),
        old_logprobs_BS=rng.uniform(-3, -1, (b, s)).astype(np.float32),
    )


def rows(batch, part):
    """A micro-batch: the layer axis of routes and guidance comes first, so it is not theirs."""
    guidance = jax.tree.map(lambda leaf: leaf[:, part], batch.guidance)
    changed = {"routes_LBSX": batch.routes_LBSX[:, part], "guidance": guidance}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if value is not None and field.name not in changed:
            changed[field.name] = value[part]
    return dataclasses.replace(batch, **changed)


def make_params(seed=1):
    table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    return {"table": jnp.array(table), "bias": jnp.zeros(VOCAB)}


def logprobs(params, batch):
    tokens = jnp.asarray(batch.tokens_BT)
    logits = params["table"][tokens[:, :-1]] + params["bias"][None, None]
    picked = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(picked, tokens[:, 1:, None], axis=-1)[..., 0]


def rl_loss(params, batch):
    return policy_loss(
        logprobs(params, batch),
        batch,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=None,
        importance_cap=5.0,
    )


def warm_loss(params, batch):
    return supervised_loss(logprobs(params, batch), batch)


def sgd_gradient(step, micro_batches):
    """What the step applied: with SGD of rate 1 it is the parameters' change, sign reversed."""
    before = make_params()
    after, metrics = step(init_state(make_params(), optax.sgd(1.0)), micro_batches)
    return {k: np.asarray(before[k] - after.params[k]) for k in before}, metrics


SPLITS = {
    "one": [slice(0, 4)],
    "halves": [slice(0, 2), slice(2, 4)],
    "each": [slice(i, i + 1) for i in range(4)],
}


@pytest.mark.parametrize("split", ["halves", "each"])
@pytest.mark.parametrize("loss_fn", [rl_loss, warm_loss])
def test_train_step_does_not_depend_on_the_micro_batch_split(loss_fn, split):
    """F46: with lengths 1 and 9, a mean per micro-batch weighs a token of the short one 9 times."""
    batch = make_batch([1, 9, 2, 0])
    step = make_train_step(loss_fn, optax.sgd(1.0))
    want, whole = sgd_gradient(step, [batch])
    got, parts = sgd_gradient(step, [rows(batch, p) for p in SPLITS[split]])
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-6)
        assert np.abs(want[key]).max() > 1e-2
    for key, metric in whole.items():
        assert parts[key].value == pytest.approx(metric.value, rel=1e-5, abs=1e-7), key
    assert whole["update/tokens"].value == 12


def test_train_step_applies_the_gradient_of_the_token_mean():
    """Oracle: softmax minus one-hot, summed over the 10 trained tokens by loops, over 10."""
    batch = make_batch([1, 9])
    step = make_train_step(warm_loss, optax.sgd(1.0))
    got, metrics = sgd_gradient(step, [rows(batch, [0]), rows(batch, [1])])
    table, want, loss = np.asarray(make_params()["table"], np.float64), np.zeros((5, 5)), 0.0
    for b, length in enumerate([1, 9]):
        for s in range(length):
            here, after = batch.tokens_BT[b, s], batch.tokens_BT[b, s + 1]
            probs = np.exp(table[here]) / np.exp(table[here]).sum()
            want[here] += (probs - np.eye(VOCAB)[after]) / 10
            loss -= np.log(probs[after]) / 10
    np.testing.assert_allclose(got["table"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["bias"], want.sum(axis=0), rtol=1e-5, atol=1e-6)
    assert metrics["loss/total"].value == pytest.approx(loss, rel=1e-5)
    norm = math.sqrt((want**2).sum() + (want.sum(axis=0) ** 2).sum())
    assert metrics["update/grad_norm"].value == pytest.approx(norm, rel=1e-5)


def test_train_step_compiles_once_for_one_shape():
    traces, compiles = [], []

    def counted(params, batch):
        traces.append(batch.routes_LBSX.shape)
        return warm_loss(params, batch)

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    tx = make_optimizer(Optim(schedule="cosine", warmup_steps=2), steps=10)
    step, state = make_train_step(counted, tx), init_state(make_params(), tx)
    batches = [[make_batch([1, 9], seed=s), make_batch([3, 4], seed=s + 9)] for s in range(3)]
    seen = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in batches:
            state, _ = step(state, batch)
            seen.append(len(compiles))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert traces == [(3, 2, 9, 2)]  # the layer axis is in front again inside a micro-batch
    assert seen[0] >= 1 and seen[1:] == seen[:1] * 2
    assert int(state.step) == 3


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_non_finite_gradient_leaves_parameters_and_optimizer_alone(poison):
    tx = make_optimizer(Optim(), steps=10)
    step = make_train_step(rl_loss, tx)
    good = make_batch([3, 4])
    state, _ = step(init_state(make_params(), tx), [good])
    before = jax.tree.map(np.array, (state.params, state.opt_state))

    advantages = good.advantages_B.copy()
    advantages[1] = poison
    bad = [dataclasses.replace(good, advantages_B=advantages)]
    state, metrics = step(state, bad)
    for got, want in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves(before),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    assert metrics["update/skipped"].value == 1
    assert not math.isfinite(metrics["update/grad_norm"].value)
    assert int(state.step) == 2

    state, metrics = step(state, [good])  # and training goes on
    assert metrics["update/skipped"].value == 0
    assert np.abs(np.asarray(state.params["table"]) - before[0]["table"]).max() > 0


def test_a_fully_masked_batch_is_skipped_without_nan():
    """Weight decay and momentum would move the parameters even with a zero gradient."""
    tx = make_optimizer(Optim(weight_decay=0.1), steps=10)
    step = make_train_step(rl_loss, tx)
    state, _ = step(init_state(make_params(), tx), [make_batch([3, 4])])
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, metrics = step(state, [make_batch([0, 0])])
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert metrics["update/skipped"].value == 1
    assert all(math.isfinite(metric.value) for metric in metrics.values())


def test_the_state_is_donated_so_a_reference_must_be_a_copy():
    """F58: a KL reference that aliases the parameters dies with the first update."""
    tx = make_optimizer(Optim(), steps=10)
    step = make_train_step(rl_loss, tx)
    params = make_params()
    alias, copy = params, jax.tree.map(jnp.copy, params)
    wanted = np.array(params["table"])
    state, _ = step(init_state(params, tx), [make_batch([3, 4])])
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(alias["table"])
    np.testing.assert_array_equal(copy["table"], wanted)
    assert np.abs(np.asarray(state.params["table"]) - wanted).max() > 0


def test_grad_norm_is_reported_before_clipping_and_the_update_is_clipped():
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    step = make_train_step(warm_loss, tx)
    _, metrics = step(init_state(make_params(), tx), [make_batch([3, 4])])
    assert metrics["update/grad_norm"].value > 0.1
    assert metrics["update/update_norm"].value == pytest.approx(1e-3, rel=1e-5)


def test_adamw_follows_the_written_out_recurrence():
    """Three updates of clipped AdamW with warm-up and linear decay, in float64."""
    optim = Optim(
        learning_rate=0.1, warmup_steps=2, schedule="linear", weight_decay=0.01, max_grad_norm=0.5
    )
    tx = make_optimizer(optim, steps=4)
    params = {"w": jnp.array([1.0, -2.0])}
    opt_state, update = tx.init(params), jax.jit(tx.update)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for count, rate in enumerate([0.05, 0.1, 0.1]):  # 1/2, 2/2, then p = 0
        grad = np.array([3.0, 4.0]) * (count + 1)
        updates, opt_state = update({"w": jnp.asarray(grad, jnp.float32)}, opt_state, params)
        params = optax.apply_updates(params, updates)
        grad = grad * 0.5 / np.linalg.norm(grad)
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        m_hat, v_hat = m / (1 - 0.9 ** (count + 1)), v / (1 - 0.95 ** (count + 1))
        w = w - rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + 0.01 * w)
        np.testing.assert_allclose(params["w"], w, rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "warmup", "want"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 0, [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0]),
        ("linear", 2, [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_schedule_takes_the_written_out_values(schedule, warmup, want):
    rate = make_schedule(Optim(learning_rate=2.0, schedule=schedule, warmup_steps=warmup), steps=4)
    got = [float(rate(jnp.int32(count))) for count in range(5)]
    np.testing.assert_allclose(got, 2 * np.asarray(want, float), rtol=1e-6, atol=1e-6)


def test_schedule_refuses_an_unknown_name():
    with pytest.raises(ValueError, match=r"config.optim.schedule: got linaer"):
        make_schedule(Optim(schedule="linaer"), steps=4)


def test_schedule_survives_a_run_without_steps():
    assert float(make_schedule(Optim(schedule="cosine"), steps=0)(jnp.int32(0))) > 0


def test_train_step_refuses_micro_batches_of_different_makes():
    batch = make_batch([3, 4])
    step = make_train_step(warm_loss, optax.sgd(1.0))

    def start():
        return init_state(make_params(), optax.sgd(1.0))

    with pytest.raises(ValueError, match="at least one micro-batch"):
        step(start(), [])
    with pytest.raises(ValueError, match="Pad to one shape bucket"):
        step(start(), [batch, make_batch([3])])
    with pytest.raises(ValueError, match="Same fields in each"):
        step(start(), [batch, dataclasses.replace(batch, guidance=None)])


def test_train_step_takes_micro_batches_one_by_one():
    """A generator: the next one is made after the one before has been handed over."""
    made, seen = [], []

    def micro_batches():
        for seed in range(3):
            made.append(len(seen))
            yield make_batch([1, 2], seed=seed)
            seen.append(seed)

    step = make_train_step(warm_loss, optax.sgd(1.0))
    _, metrics = step(init_state(make_params(), optax.sgd(1.0)), micro_batches())
    assert made == [0, 1, 2] and metrics["update/tokens"].value == 9


def test_warm_start_is_the_same_step_with_the_supervised_loss():
    """Twenty updates on one batch bring its cross-entropy well down."""
    tx = make_optimizer(Optim(learning_rate=0.1), steps=20)
    step, state = make_train_step(warm_loss, tx), init_state(make_params(), tx)
    micro_batches = [make_batch([3, 4])]
    losses = []
    for _ in range(20):
        state, metrics = step(state, micro_batches)
        losses.append(metrics["loss/supervised_nats"].value)
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(state, TrainState) and isinstance(metrics["loss/total"], Mean)
