"""What the trainer's policy refuses, and its gradients; see also `rollout/seam_test.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import policy
from trace_jax.guidance.record import Guidance
from trace_jax.models import transformer
from trace_jax.qat import plan as qat_plan
from trace_jax.types import Batch

MODEL = cfg.Model(width=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=5, expert_ffn=16)
VOCAB, B, T = 12, 2, 7
QAT = cfg.Quant(trainer="qat")


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: transformer.init(MODEL, VOCAB, jax.random.key(0)))

    def fill(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype)

    return jax.tree.map(fill, shapes)


def make_batch(**changes):
    """Two sequences, the second three tokens shorter; experts 0 to 3 of 5 are used."""
    rng = np.random.default_rng(1)
    valid_BT = np.ones((B, T), bool)
    valid_BT[1, -3:] = False
    routes = np.argsort(rng.random((MODEL.layers, B, T - 1, 4)), axis=-1)[..., :2]
    batch = Batch(
        tokens_BT=rng.integers(0, VOCAB, (B, T)).astype(np.int32),
        valid_BT=valid_BT,
        loss_mask_BS=valid_BT[:, 1:],
        sampler_logprobs_BS=np.zeros((B, T - 1), np.float32),
        advantages_B=np.zeros(B, np.float32),
        routes_LBSX=np.where(valid_BT[None, :, 1:, None], routes, -1).astype(np.int32),
        guidance=None,
    )
    return dataclasses.replace(batch, **changes)


def evaluate(quant, batch):
    """Abstractly: what is refused is refused before anything is computed."""
    log_probs = policy.make_log_probs(MODEL, quant, temperature=1.0)
    shapes = jax.eval_shape(lambda: transformer.init(MODEL, VOCAB, jax.random.key(0)))
    return jax.eval_shape(lambda *args: jax.tree.leaves(log_probs(*args)), shapes, batch)


def spec(**changes):
    right = qat_plan.guidance_spec(cfg.Quant(), MODEL)
    return dataclasses.replace(right, **changes)


def test_a_rollout_without_guidance_is_refused_by_a_guided_trainer():
    with pytest.raises(ValueError, match=r"guidance of a rollout batch: got None, need a record"):
        evaluate(cfg.Quant(), make_batch())
    evaluate(cfg.Quant(), make_batch(routes_LBSX=None))  # supervised: there was no rollout
    evaluate(QAT, make_batch())


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ((1,),) * 3},
        {"layers": ((0, 1, 2),) * 3},
        {"kind": "mantissa"},
        {"sites": ("expert_hidden", "k", "v")},
        {"formats": ("mxfp4", "nvfp4", "nvfp4")},
    ],
)
@pytest.mark.parametrize("trainer", ["trace", "qat"])
def test_guidance_that_is_not_what_this_run_records_is_refused(trainer, changes):
    batch = make_batch(guidance=Guidance(sites={}, spec=spec(**changes)))
    with pytest.raises(ValueError, match=r"got GuidanceSpec\(.*need GuidanceSpec\(.*Fix: "):
        evaluate(cfg.Quant(trainer=trainer), batch)


def test_routes_of_another_number_of_layers_are_refused():
    routes = make_batch().routes_LBSX
    with pytest.raises(ValueError, match="layers of the routes: got 3, need 2"):
        evaluate(QAT, make_batch(routes_LBSX=np.concatenate([routes, routes[:1]])))


def test_guided_hidden_values_need_the_rollouts_experts():
    quant = cfg.Quant(guide_hidden=True)
    with pytest.raises(ValueError, match="guide_hidden: got no routing replay"):
        policy.make_log_probs(MODEL, quant, temperature=1.0, replay_routes=False)


def test_an_expert_that_no_token_was_sent_to_gets_exactly_zero_gradient(params):
    """The straight-through reaches every other weight, in the layer of each."""
    batch = make_batch()
    log_probs = policy.make_log_probs(MODEL, QAT, temperature=1.0)

    def loss(params, batch):
        logprobs_BS, counts = log_probs(params, batch)
        return jnp.sum(logprobs_BS, where=batch.loss_mask_BS), counts

    grads, counts = jax.jit(jax.grad(loss, has_aux=True))(params, batch)
    experts = grads["layers"]["moe"]
    for layer in range(MODEL.layers):
        used = np.unique(batch.routes_LBSX[layer])
        assert 4 not in used
        for name in ("gate_up", "down"):
            touched = [bool(np.any(np.asarray(experts[name][layer, e]))) for e in range(5)]
            assert touched == [e in used for e in range(5)]
    for leaf in jax.tree.leaves(grads):
        assert np.all(np.isfinite(leaf)) and np.any(np.asarray(leaf) != 0)
    processed = int(batch.valid_BT[:, 1:].sum())
    assert float(counts["parity/route_mismatch"].count) == MODEL.layers * processed
