"""One optimizer update: gradients summed over micro-batches, divided once, applied or refused."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from trace_jax.checks import require
from trace_jax.config import Optim
from trace_jax.types import Batch, Mean, Params, TrainState

Metrics = dict[str, Mean]
Reported = tuple[Mean, Metrics]  # the loss and what else `loss_fn` counts, undivided
LossFn = Callable[[Params, Batch], Reported]
StepFn = Callable[[TrainState, Iterable[Batch]], tuple[TrainState, Metrics]]

SCHEDULES = ("constant", "linear", "cosine")


def make_schedule(optim: Optim, steps: int) -> optax.Schedule:
    """The learning rate of update number `count` (0, 1, ...), out of `steps` updates in all.

    Math:    lr (count + 1) / warmup_steps, then lr for "constant", lr (1 - p) for "linear",
             lr (1 + cos(pi p)) / 2 for "cosine"; p = (count - warmup) / (steps - warmup), in 0..1.
    Raises:  ValueError if the schedule's name is unknown.
    """
    require(optim.schedule in SCHEDULES, "config.optim.schedule", optim.schedule, SCHEDULES)

    def schedule(count: ArrayLike) -> Float[Array, ""]:
        done = jnp.asarray(count).astype(jnp.float32)
        progress = (done - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
        progress = jnp.clip(progress, 0.0, 1.0)
        decay = {
            "constant": jnp.ones_like(progress),
            "linear": 1 - progress,
            "cosine": (1 + jnp.cos(jnp.pi * progress)) / 2,
        }[optim.schedule]
        warmup = jnp.minimum(1.0, (done + 1) / max(1, optim.warmup_steps))
        return optim.learning_rate * warmup * decay

    return schedule


def make_optimizer(optim: Optim, steps: int) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip, with the schedule of `make_schedule`.

    Args:    steps: updates in all, over which the schedule decays. Weight decay acts on every
             parameter. `max_grad_norm` None: no clipping.
    """
    clip = optax.identity()
    if optim.max_grad_norm is not None:
        clip = optax.clip_by_global_norm(optim.max_grad_norm)
    adamw = optax.adamw(
        make_schedule(optim, steps), b1=optim.b1, b2=optim.b2, weight_decay=optim.weight_decay
    )
    tx = optax.chain(clip, adamw)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Optax 0.2.8 raises a float to the int32 step count: its arithmetic needs promotion.
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def init_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    """A fresh state at step 0. It holds `params` itself: see `make_train_step` about donation."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params))


def make_train_step(loss_fn: LossFn, tx: optax.GradientTransformation) -> StepFn:
    """Builds the update once: (state, micro-batches) -> (state, metrics).

    Math:    g = sum_micro grad(loss.total) / sum_micro loss.count: the exact token-mean, whatever
             the split. If |g| is not finite, or nothing was trained (count 0), parameters and
             optimizer state stay as they are and `update/skipped` is 1.
    Args:    loss_fn: (params, micro-batch) -> (Mean, metrics), e.g. the policy with
             `rl.loss.policy_loss`, or with `supervised_loss` for the warm start.
    Returns: a step, compiled once per shape and number of micro-batches. It takes the micro-batches
             one by one, so that one of them (and its guidance) is on the device while the next is
             fetched. `state.step` advances even if the update was skipped, so that a run never
             meets the same data twice. Metrics are those of `loss_fn` summed over micro-batches,
             and `loss/total`, `update/grad_norm` (before clipping; NaN or infinite exactly when
             that is why it was skipped), `update/update_norm`, `update/tokens`, `update/skipped`.
    Raises:  ValueError if there is no micro-batch, or they differ in what they hold or in shape.
    Note:    the state is donated: its buffers are gone after the call. Whoever keeps the same
             arrays elsewhere (a KL reference, an older version for the rollout) must keep a copy:
             `jax.tree.map(jnp.copy, params)`. JAX refuses a buffer that is both donated and read.
    """

    def accumulate(grads: Params, params: Params, batch: Batch) -> tuple[Params, Reported]:
        def scalar_loss(params):
            loss, metrics = loss_fn(params, batch)
            return loss.total, (loss, metrics)

        (_, reported), new = jax.value_and_grad(scalar_loss, has_aux=True)(params)
        return jax.tree.map(jnp.add, grads, new), reported

    start = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params))
    accumulate_one = jax.jit(accumulate, donate_argnums=0)
    apply_all = jax.jit(partial(_apply, tx), donate_argnums=0)

    def step(state: TrainState, micro_batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        grads, reports, first = start(state.params), [], None
        for batch in micro_batches:
            first = batch if first is None else first
            _check_alike(first, batch)
            grads, reported = accumulate_one(grads, state.params, batch)
            reports.append(reported)
        require(len(reports) > 0, "update: micro-batches", 0, "at least one micro-batch")
        return apply_all(state, grads, reports)

    return step


def _apply(
    tx: optax.GradientTransformation, state: TrainState, grads: Params, reports: list[Reported]
) -> tuple[TrainState, Metrics]:
    """The update from summed gradients, if they are finite and anything was trained."""
    loss, metrics = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *reports)
    scale = 1 / jnp.where(loss.count == 0, 1, loss.count)
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    grad_norm = optax.tree.norm(grads)
    applied = jnp.isfinite(grad_norm) & (loss.count > 0)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new, old):
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    reported = {
        "update/grad_norm": grad_norm,
        "update/update_norm": jnp.where(applied, optax.tree.norm(updates), 0.0),
        "update/tokens": loss.count,
        "update/skipped": 1 - applied.astype(jnp.float32),
    }
    metrics = {**metrics, "loss/total": loss}
    metrics |= {key: Mean(total=x, count=jnp.float32(1)) for key, x in reported.items()}
    return TrainState(
        step=state.step + 1,
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
    ), metrics


def _check_alike(first: Batch, other: Batch) -> None:
    """One program serves all micro-batches of an update."""
    (a, a_def), (b, b_def) = jax.tree.flatten(first), jax.tree.flatten(other)
    where = "update: micro-batches"
    require(a_def == b_def, where, b_def, a_def, "Same fields in each.")
    shapes = [np.shape(leaf) for leaf in a]
    got = [np.shape(leaf) for leaf in b]
    require(got == shapes, where, got, shapes, "Pad to one shape bucket.")
