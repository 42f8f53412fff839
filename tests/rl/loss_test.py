"""Oracle: the closed form of loss and gradient, token by token, in Python floats."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl.loss import policy_loss, supervised_loss
from trace_jax.types import Batch

LOGP = [[-1.0, -0.3, -2.0], [-0.7, -1.9, -0.1]]
MU = [[-1.2, -0.3, -2.9], [-0.1, -1.8, -0.6]]
OLD = [[-1.5, -0.35, -1.6], [-1.2, -1.85, -0.1]]
REF = [[-1.1, -0.9, -2.0], [-0.2, -2.4, -0.3]]
MASK = [[True, True, True], [True, True, False]]
ADVANTAGES = [1.5, -0.5]


def make_batch(*, old=None, reference=None, mask=MASK, mu=MU, advantages=ADVANTAGES):
    def floats(x):  # traced in one test, a list in the others
        return x if x is None or isinstance(x, jax.Array) else np.asarray(x, np.float32)

    shape = np.shape(mask)
    return Batch(
        tokens_BT=np.zeros((shape[0], shape[1] + 1), np.int32),
        valid_BT=np.ones((shape[0], shape[1] + 1), bool),
        loss_mask_BS=np.asarray(mask),
        sampler_logprobs_BS=floats(mu),
        advantages_B=floats(advantages),
        routes_LBSX=None,
        guidance=None,
        old_logprobs_BS=floats(old),
        reference_logprobs_BS=floats(reference),
    )


@functools.partial(jax.jit, static_argnames=("cap", "kl_coef", "low", "high"))
def compiled(logp, batch, *, cap, kl_coef, low, high):
    def total(logprobs_BS):
        loss, metrics = policy_loss(
            logprobs_BS,
            batch,
            clip_low=low,
            clip_high=high,
            kl_coef=kl_coef,
            importance_cap=cap,
        )
        return loss.total, (loss, metrics)

    return jax.value_and_grad(total, has_aux=True)(logp)


def loss_and_gradient(batch, *, logp=LOGP, cap=5.0, kl_coef=None, low=0.2, high=0.3):
    logp = jnp.asarray(logp, jnp.float32)
    (_, (loss, metrics)), grad = compiled(logp, batch, cap=cap, kl_coef=kl_coef, low=low, high=high)
    return loss, np.asarray(grad), metrics


def closed_form(*, old, cap, kl_coef=None, low=0.2, high=0.3):
    """Sum of the loss and its derivative by each log-prob, written out by cases."""
    total, grad = 0.0, np.zeros((2, 3))
    for b in range(2):
        for s in range(3):
            if not MASK[b][s]:
                continue
            logp, a = LOGP[b][s], ADVANTAGES[b]
            pi_old = logp if old is None else OLD[b][s]
            w = 1.0 if cap is None else min(math.exp(pi_old - MU[b][s]), cap)
            ratio = math.exp(logp - pi_old)
            if a > 0 and ratio > 1 + high:
                total -= w * (1 + high) * a
            elif a < 0 and ratio < 1 - low:
                total -= w * (1 - low) * a
            else:
                total -= w * ratio * a
                grad[b, s] -= w * ratio * a
            if kl_coef is not None:
                d = REF[b][s] - logp
                total += kl_coef * (math.exp(d) - d - 1)
                grad[b, s] += kl_coef * (1 - math.exp(d))
    return total, grad


@pytest.mark.parametrize("cap", [1.2, 10.0, None])  # cap active, cap inactive, no correction
@pytest.mark.parametrize("old", [None, OLD])  # first update of a rollout, a later one
@pytest.mark.parametrize("kl_coef", [None, 0.25])
def test_policy_loss_has_the_closed_form_value_and_gradient(cap, old, kl_coef):
    batch = make_batch(old=old, reference=REF)
    loss, grad, _ = loss_and_gradient(batch, cap=cap, kl_coef=kl_coef)
    want, want_grad = closed_form(old=old, cap=cap, kl_coef=kl_coef)
    np.testing.assert_allclose(loss.total, want, rtol=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-7)
    assert float(loss.count) == 5


def test_the_oracle_covers_every_branch():
    """The closed-form test means nothing if no token is clipped, capped, or left alone."""
    ratios = np.exp(np.subtract(LOGP, OLD))
    assert ratios[0].max() > 1.3 and ratios[0].min() < 0.8  # A > 0: clipped above, free below
    assert 0.8 < ratios[1, 1] < 1.0 and ratios[1, 0] > 1.3  # A < 0: inside, and free above
    assert np.exp(np.subtract(LOGP, MU)).max() > 1.2 > np.exp(np.subtract(LOGP, MU)).min()


@pytest.mark.parametrize(
    ("advantage", "ratio", "clipped"),
    [(1, 1.4, True), (1, 0.5, False), (-1, 0.5, True), (-1, 1.4, False), (1, 1.2, False)],
)
def test_the_clip_only_stops_what_moves_further_away(advantage, ratio, clipped):
    batch = make_batch(
        old=[[-1.0]], mu=[[-1.0]], mask=[[True]], advantages=[float(advantage)], reference=None
    )
    _, grad, metrics = loss_and_gradient(batch, logp=[[-1.0 + math.log(ratio)]])
    want = 0.0 if clipped else -advantage * ratio
    np.testing.assert_allclose(grad, [[want]], rtol=1e-6)
    assert metrics["loss/clip_fraction"].value == float(clipped)


@pytest.mark.parametrize("cap", [1.2, 10.0])
def test_policy_gradient_does_not_leak_through_the_importance_weight(cap):
    """On policy r = 1, so the gradient is exactly -w A; a leak would add -w A once more."""
    _, grad, _ = loss_and_gradient(make_batch(), cap=cap)
    weight = np.minimum(np.exp(np.subtract(LOGP, MU)), cap)
    want = np.where(MASK, -weight * np.asarray(ADVANTAGES)[:, None], 0)
    np.testing.assert_allclose(grad, want, rtol=1e-6)


def test_no_gradient_reaches_what_the_batch_recorded():
    def total(old, mu, reference):
        batch = make_batch(old=old, mu=mu, reference=reference)
        loss, _ = policy_loss(
            jnp.asarray(LOGP, jnp.float32),
            batch,
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=0.5,
            importance_cap=10.0,
        )
        return loss.total

    arrays = [jnp.asarray(x, jnp.float32) for x in (OLD, MU, REF)]
    for grad in jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arrays):
        np.testing.assert_array_equal(grad, np.zeros((2, 3)))


def test_policy_loss_with_a_log_ratio_of_100_stays_finite():
    """F23: the low-variance KL overflowed, and the gradient became NaN."""
    for sign in (1.0, -1.0):
        far = np.asarray(LOGP) + 100.0 * sign
        batch = make_batch(old=far, mu=far, reference=far)
        loss, grad, metrics = loss_and_gradient(batch, kl_coef=0.1)
        assert np.isfinite(float(loss.total)) and np.all(np.isfinite(grad))
        assert np.isfinite(metrics["loss/kl"].value)


def test_kl_is_never_negative_and_zero_for_the_reference_itself():
    batch = make_batch(reference=LOGP)
    _, _, metrics = loss_and_gradient(batch, kl_coef=1.0)
    assert metrics["loss/kl"].value == 0
    _, _, metrics = loss_and_gradient(make_batch(reference=REF), kl_coef=1.0)
    assert metrics["loss/kl"].value > 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_hides_under_the_mask_changes_nothing(poison):
    def poisoned(values):
        return np.where(MASK, np.asarray(values, np.float32), np.float32(poison))

    clean = make_batch(old=OLD, reference=REF)
    dirty = make_batch(old=poisoned(OLD), mu=poisoned(MU), reference=poisoned(REF))
    want = loss_and_gradient(clean, kl_coef=0.1)
    got = loss_and_gradient(dirty, logp=poisoned(LOGP), kl_coef=0.1)
    np.testing.assert_array_equal(got[1], want[1])
    for key, metric in want[2].items():
        assert got[2][key].value == metric.value, key
    assert float(got[0].total) == float(want[0].total)


def test_a_nan_of_a_trained_token_does_not_hide():
    batch = make_batch(mu=[[np.nan, -0.3, -2.9], MU[1]])
    loss, _, _ = loss_and_gradient(batch)
    assert np.isnan(float(loss.total))


def test_policy_loss_of_a_fully_masked_batch_is_zero_with_zero_gradient():
    loss, grad, _ = loss_and_gradient(make_batch(mask=np.zeros((2, 3), bool)))
    assert (float(loss.total), float(loss.count), loss.value) == (0, 0, 0)
    np.testing.assert_array_equal(grad, np.zeros((2, 3)))


def test_two_half_batches_add_up_to_the_whole():
    """Lengths 3 and 2: a mean of means would be 0.5 (1/3 sum + 1/2 sum)."""
    whole, _, metrics = loss_and_gradient(make_batch(old=OLD))
    parts = []
    for b in range(2):
        rows = slice(b, b + 1)
        half = make_batch(old=OLD[rows], mu=MU[rows], mask=MASK[rows], advantages=ADVANTAGES[rows])
        parts.append(loss_and_gradient(half, logp=LOGP[rows]))
    total = parts[0][0] + parts[1][0]
    assert total.value == pytest.approx(whole.value, rel=1e-6)
    for key, metric in metrics.items():
        summed = parts[0][2][key] + parts[1][2][key]
        assert summed.value == pytest.approx(metric.value, rel=1e-6), key


def test_policy_loss_refuses_a_kl_term_without_a_reference():
    with pytest.raises(ValueError, match="reference log-probs"):
        loss_and_gradient(make_batch(), kl_coef=0.1)


def test_policy_loss_metrics_are_the_means_of_the_trained_tokens():
    _, _, metrics = loss_and_gradient(make_batch(old=OLD), cap=1.2)
    mask = np.asarray(MASK)
    weight = np.minimum(np.exp(np.subtract(OLD, MU)), 1.2)[mask]
    assert metrics["loss/importance_weight"].value == pytest.approx(weight.mean(), rel=1e-6)
    capped = (np.exp(np.subtract(OLD, MU))[mask] > 1.2).mean()
    assert 0 < capped < 1
    assert metrics["loss/importance_capped_fraction"].value == pytest.approx(capped)
    assert metrics["loss/ratio"].value == pytest.approx(
        np.exp(np.subtract(LOGP, OLD))[mask].mean(), rel=1e-6
    )
    assert metrics["loss/logprob_nats"].value == pytest.approx(np.asarray(LOGP)[mask].mean())


def test_policy_loss_computes_in_float32_whatever_comes_in():
    batch = make_batch(old=OLD)
    loss, _ = policy_loss(
        jnp.asarray(LOGP, jnp.bfloat16),
        batch,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=None,
        importance_cap=5.0,
    )
    assert loss.total.dtype == loss.count.dtype == jnp.float32


def test_supervised_loss_is_the_mean_negative_log_prob_of_trained_tokens():
    logp = jnp.asarray(LOGP).at[1, 2].set(-jnp.inf)  # not trained

    def total(logprobs_BS):
        loss, metrics = supervised_loss(logprobs_BS, make_batch(mu=np.zeros((2, 3))))
        return loss.total, (loss, metrics)

    (_, (loss, metrics)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(logp)
    assert loss.value == pytest.approx((1.0 + 0.3 + 2.0 + 0.7 + 1.9) / 5, rel=1e-6)
    assert metrics["loss/supervised_nats"].value == loss.value
    np.testing.assert_array_equal(grad, np.where(MASK, -1.0, 0.0))
