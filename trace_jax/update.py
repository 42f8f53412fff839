"""One optimizer update: gradients summed over micro-batches, divided once, applied or refused."""

from collections.abc import Callable
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
LossFn = Callable[[Params, Batch], tuple[Mean, Metrics]]
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

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


def stack_micro_batches(batches: list[Batch]) -> Batch:
    """Stacks batches of equal shapes on a new leading axis A, in front of every leaf's own axes.

    So `tokens_BT` becomes (A, B, T) and `routes_LBSX` becomes (A, L, B, S, X). Host memory only.

    Raises:  ValueError if there is no batch, or batches differ in what they hold or in shape.
    """
    where = "update.stack_micro_batches"
    require(len(batches) > 0, where, 0, "at least one micro-batch")
    flat = [jax.tree.flatten(batch) for batch in batches]
    leaves, treedef = flat[0]
    shapes = [np.shape(leaf) for leaf in leaves]
    for other_leaves, other_treedef in flat[1:]:
        require(other_treedef == treedef, where, other_treedef, treedef, "Same fields in each.")
        other_shapes = [np.shape(leaf) for leaf in other_leaves]
        require(other_shapes == shapes, where, other_shapes, shapes, "Pad to one shape bucket.")
    stacked = [np.stack(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return jax.tree.unflatten(treedef, stacked)


def make_train_step(loss_fn: LossFn, tx: optax.GradientTransformation) -> StepFn:
    """Builds the update once: (state, stacked micro-batches) -> (state, metrics).

    Math:    g = sum_micro grad(loss.total) / sum_micro loss.count: the exact token-mean, whatever
             the split. If |g| is not finite, or nothing was trained (count 0), parameters and
             optimizer state stay as they are and `update/skipped` is 1.
    Args:    loss_fn: (params, micro-batch) -> (Mean, metrics), e.g. the policy with
             `rl.loss.policy_loss`, or with `supervised_loss` for the warm start.
    Returns: a step, compiled once per shape. `state.step` advances even if the update was skipped,
             so that a run never meets the same data twice. Metrics are those of `loss_fn` summed
             over micro-batches, and `loss/total`, `update/grad_norm` (before clipping; NaN or
             infinite exactly when that is why it was skipped), `update/update_norm`,
             `update/tokens`, `update/skipped`.
    Note:    the state is donated: its buffers are gone after the call. Whoever keeps the same
             arrays elsewhere (a KL reference, an older version for the rollout) must keep a copy:
             `jax.tree.map(jnp.copy, params)`. JAX refuses a buffer that is both donated and read.
    """

    def train_step(state: TrainState, leaves: list, treedef: Any) -> tuple[TrainState, Metrics]:
        grads, loss, metrics = _token_mean_gradient(loss_fn, state.params, leaves, treedef)
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

    jitted = jax.jit(train_step, donate_argnums=0, static_argnums=2)

    def step(state: TrainState, micro_batches: Batch) -> tuple[TrainState, Metrics]:
        # Stacked leaves have one axis more than `Batch` declares: they cross jit as a plain list.
        leaves, treedef = jax.tree.flatten(micro_batches)
        return jitted(state, leaves, treedef)

    return step


def _token_mean_gradient(
    loss_fn: LossFn, params: Params, leaves: list, treedef: Any
) -> tuple[Params, Mean, Metrics]:
    """Gradient of the token-mean over all micro-batches, and the summed loss and metrics."""
    structure = None  # of (loss, metrics); known once `loss_fn` is traced

    def scalar_loss(params, batch):
        loss, metrics = loss_fn(params, batch)
        return loss.total, (loss, metrics)

    def accumulate(total, micro_leaves):
        nonlocal structure
        batch = jax.tree.unflatten(treedef, micro_leaves)
        (_, reported), grads = jax.value_and_grad(scalar_loss, has_aux=True)(params, batch)
        sums, structure = jax.tree.flatten(reported)
        return jax.tree.map(jnp.add, total, grads), sums

    total, sums_A = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), leaves)
    assert structure is not None
    loss, metrics = jax.tree.unflatten(structure, [jnp.sum(x, axis=0) for x in sums_A])
    scale = 1 / jnp.where(loss.count == 0, 1, loss.count)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), total), loss, metrics
