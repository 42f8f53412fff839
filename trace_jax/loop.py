"""The run: a warm start, then steps of GRPO.

    engine                 sample in FP4 and record, in turn with the rest or beside it (queue)
    stages.collect         score, group, pad
    stages.add_log_probs   the trainer's log-probs before the update, guided by the record
    stages.train           the updates of this rollout
    stages.sync            pack the new weights in FP4

The run can be stopped at any moment and goes on with the same command: everything random comes
from (seed, purpose, step), and a checkpoint holds the rest. With the embedded engine and in turn it
goes on bit for bit; asynchronously no prompt is lost or repeated, but who samples it may be newer.
"""

import contextlib
import pathlib
import sys
import time
from typing import Any

import grain
import jax
import numpy as np

from trace_jax import config as cfg
from trace_jax import engines, overrides, report, sources, stages, summary, update
from trace_jax.checkpoint import Checkpointer
from trace_jax.data import pipeline
from trace_jax.evaluate import Evaluation, evaluate
from trace_jax.guidance import health
from trace_jax.guidance.store import GuidanceStore
from trace_jax.interrupt import graceful_stop
from trace_jax.metrics import MetricsWriter
from trace_jax.position import Outputs, Position, restore, save
from trace_jax.progress import progress
from trace_jax.qat.audit import Audit
from trace_jax.reward.pool import RewardPool
from trace_jax.rollout import queue
from trace_jax.rundir import RunDir, open_run, write_atomic
from trace_jax.stages import Stages
from trace_jax.types import Trajectory


def run(config: cfg.Config, workdir: str | pathlib.Path, show: bool = True) -> dict[str, Any]:
    """Runs or continues one experiment in `workdir`, and prints its table if `show`.

    Returns: the summary: held-out accuracy before and after, the last parity metrics, throughput.
    Raises:  ValueError, FileNotFoundError for the user's own errors, before anything is computed;
             KeyboardInterrupt after a stop by signal, when everything is saved.
    """
    built = stages.build(config)
    # everything that can be wrong with the user's input shows before there is a run directory
    started = any(pathlib.Path(workdir).glob("checkpoints/[0-9]*"))
    position = _begin(built, started)
    audit = stages.audit(built, position.state.params, position.weights[-1])
    with (
        RewardPool(config.data.reward) as pool,
        open_run(workdir, overrides.to_dict(config)) as rundir,
        Checkpointer(rundir.folder("checkpoints"), config.run.keep_checkpoints) as checkpoints,
        _guidance_store(config, rundir) as store,
        contextlib.closing(engines.make_engine(built)) as engine,
        graceful_stop() as stop,
    ):
        start = config.run.init_from or "random parameters"
        text = f"{audit}\npolicy at the start: {start}\n{stages.kernels_text(config)}\n"
        write_atomic(rundir.root / "audit.txt", text)
        position.queue = engines.make_queue(built, engine)
        resumed = restore(position, checkpoints, built.prompts.train)
        resume = position.resume if resumed else None
        with MetricsWriter(rundir, config.run.tensorboard, resume) as metrics:
            out = Outputs(
                rundir=rundir,
                metrics=metrics,
                checkpoints=checkpoints,
                pool=pool,
                stop=stop,
                audit=audit,
                store=store,
                engine=engine,
            )
            if not resumed and position.warm_done:
                save(position, out)  # a run of no steps at all is still a run to start from
            _warm_start(built, position, out)
            _reinforce(built, position, out)
        return _finish(built, position, out, show)


def _guidance_store(config: cfg.Config, rundir: RunDir) -> GuidanceStore:
    """Memory for guidance as configured, and the run's own folder for the rest."""
    mib = config.run.guidance_mib
    memory_bytes = None if mib is None else mib * 2**20
    return GuidanceStore(rundir.folder("guidance"), memory_bytes=memory_bytes)


def _begin(built: Stages, started: bool) -> Position:
    """The start of a run. A run that `started` restores its own policy, wherever it came from."""
    config = built.config
    if config.run.init_from is not None and not started:
        shapes = jax.eval_shape(lambda: stages.initial_params(built))
        params, loaded = sources.start(config.run.init_from, config.model, shapes)
        print(loaded)
    else:
        params = stages.initial_params(built)
    warm_done = config.warm_start is None
    args = stages.policy_optimizer_args if warm_done else stages.warm_optimizer_args
    tx = update.make_optimizer(*args(config))
    keep = config.rollout.version_lag + 1
    return Position(
        state=update.init_state(params, tx),
        warm_steps=0,
        warm_done=warm_done,
        rl_steps=0,
        weights=[built.sync(params, 0)] * keep,
        reference=stages.copy_params(params) if config.loss.kl_coef is not None else None,
        prompts=pipeline.prompt_batches(
            built.prompts.train, prompts_per_step=config.data.prompts_per_step, seed=config.seed
        ),
        examples=None if config.warm_start is None else _examples(built, config.warm_start),
        accuracy={},
    )


def _examples(built: Stages, warm: cfg.WarmStart) -> grain.DatasetIterator:
    return pipeline.supervised_batches(
        built.prompts.train,
        built.tokenizer,
        batch=warm.batch,
        seed=built.config.seed,
        bucket_tokens=built.config.rollout.bucket_tokens,
    )


def _warm_start(built: Stages, position: Position, out: Outputs) -> None:
    """Supervised updates until the sampled accuracy on training prompts is high enough."""
    warm = built.config.warm_start
    if position.warm_done or warm is None:
        return
    assert position.examples is not None
    with progress(warm.max_steps, "warm start", initial=position.warm_steps) as bar:
        while position.warm_steps < warm.max_steps:
            start = time.perf_counter()
            batch = next(position.examples)
            position.state, metrics = stages.supervise(built, position.state, batch)
            position.warm_steps += 1
            numbers = {"warm_start/loss": metrics["loss/supervised_nats"]}
            numbers["warm_start/grad_norm"] = metrics["update/grad_norm"]
            if position.warm_steps % warm.check_every == 0:
                accuracy = _probe(built, position, out)
                numbers["warm_start/train_accuracy"] = accuracy
                position.accuracy["warm_start_train"] = accuracy
            position.wall_s += time.perf_counter() - start
            numbers["stage"] = "warm_start"
            out.metrics.write(position.warm_steps, position.wall_s, numbers)
            accuracy = position.accuracy.get("warm_start_train", 0.0)
            bar.update(1, loss=numbers["warm_start/loss"], accuracy=accuracy)
            if warm.stop_at_accuracy is not None and accuracy >= warm.stop_at_accuracy:
                break
            if position.warm_steps % warm.check_every == 0:
                save(position, out)
            _obey(position, out)
    _end_warm_start(built, position)
    save(position, out)


def _end_warm_start(built: Stages, position: Position) -> None:
    """The policy of the warm start becomes version 0, with a fresh optimiser."""
    config, params = built.config, position.state.params
    position.warm_done = True
    position.weights = [built.sync(params, 0)] * (config.rollout.version_lag + 1)
    if config.loss.kl_coef is not None:
        position.reference = stages.copy_params(params)
    tx = update.make_optimizer(*stages.policy_optimizer_args(config))
    position.state = update.init_state(params, tx)


def _probe(built: Stages, position: Position, out: Outputs) -> float:
    """Accuracy of the FP4 sampler on one step's worth of training prompts."""
    prompts = built.prompts.train[: built.config.data.prompts_per_step]
    return _evaluate(built, position, out, prompts).accuracy.value


def _evaluate(built: Stages, position: Position, out: Outputs, prompts: Any) -> Evaluation:
    config, newest = built.config, position.weights[-1]
    if not position.warm_done:
        newest = built.sync(position.state.params, 0)
    return evaluate(
        out.engine,
        newest,
        prompts,
        out.pool,
        built.tokenizer,
        built.purpose_key("evaluation"),
        samples=config.run.eval_samples,
        prompts_per_call=config.data.prompts_per_step,
    )


def _held_out(built: Stages, position: Position, out: Outputs, name: str) -> dict[str, float]:
    """Metrics of the newest policy on held-out prompts; writes a few samples."""
    result = _evaluate(built, position, out, built.prompts.held_out)
    position.accuracy[name] = result.accuracy.value
    out.rundir.write_samples(position.rl_steps, result.examples(built.config.run.samples_kept))
    return {"eval/accuracy": result.accuracy.value, "eval/failed": float(result.failed)}


def _reinforce(built: Stages, position: Position, out: Outputs) -> None:
    """The GRPO steps."""
    config = built.config
    if "before" not in position.accuracy:
        start = time.perf_counter()
        numbers = _held_out(built, position, out, "before")
        position.wall_s += time.perf_counter() - start
        out.metrics.write(0, position.wall_s, numbers)
    checked = False
    if position.queue is not None and position.rl_steps < config.steps:
        out.engine.load(position.weights[-1])
    with progress(config.steps, "GRPO", initial=position.rl_steps) as bar:
        while position.rl_steps < config.steps:
            start = time.perf_counter()
            sampled = _sample(built, position, out)
            if sampled is None:  # it was asked to stop, and nothing has been taken
                _obey(position, out)
                continue
            numbers = _step(built, position, out, *sampled, None if checked else out.audit)
            checked = True
            sampling_s = time.perf_counter() - start  # asynchronously it goes on all the while
            if position.queue is None:
                sampling_s = numbers["rollout/step_s"]
            numbers["rollout/tokens_per_s"] = numbers["rollout/tokens"] / sampling_s
            last = position.rl_steps == config.steps
            if last or position.rl_steps % config.run.eval_every == 0:
                numbers |= _held_out(built, position, out, "after")
            elapsed = time.perf_counter() - start
            position.wall_s += elapsed
            numbers |= out.store.metrics(elapsed) | out.engine.metrics()
            _raise_alarms(position, out, numbers)
            out.metrics.write(position.rl_steps, position.wall_s, numbers)
            bar.update(
                1,
                reward=numbers["reward/mean"],
                gap=numbers["parity/logprob_abs_diff_nats"],
                accuracy=position.accuracy.get("after", position.accuracy["before"]),
            )
            if last or position.rl_steps % config.run.checkpoint_every == 0:
                save(position, out)
            _obey(position, out)


def _raise_alarms(position: Position, out: Outputs, numbers: dict[str, float]) -> None:
    """Counts what looks wrong in the numbers of a step, and prints each kind once a start."""
    found = health.alarms(numbers)
    numbers["run/alarms"] = float(len(found))
    for text in found:
        kind = text.partition(":")[0]
        if kind not in out.alarms:
            out.alarms.add(kind)
            print(f"alarm at step {position.rl_steps}: {text}", file=sys.stderr, flush=True)


def _sample(
    built: Stages, position: Position, out: Outputs
) -> tuple[list[Trajectory], dict[str, float]] | None:
    """The rollouts of a step and metrics of them; None if a signal ended the wait for them."""
    step, start = position.rl_steps, time.perf_counter()
    if position.queue is not None:
        assert built.config.asynchrony is not None
        position.queue.fill(step, lambda: next(position.prompts))
        taken = position.queue.take(step, lambda: bool(out.stop))
        if taken is None:
            return None
        allowed = built.config.asynchrony.max_version_diff
        return taken.trajectories, queue.metrics(taken, step, allowed)
    prompts, samples = next(position.prompts), built.config.rollout.group_size
    key = built.purpose_key("rollout", step)
    trajectories = out.engine(position.weights[0], prompts, samples, key)
    return trajectories, {"rollout/step_s": time.perf_counter() - start}


def _step(
    built: Stages,
    position: Position,
    out: Outputs,
    trajectories: list[Trajectory],
    sampled: dict[str, float],
    audit: Audit | None,
) -> dict[str, float]:
    """The rest of a step; returns its metrics. With an audit, its sites must have produced codes.

    Args: sampled: metrics of the rollouts.
    """
    step = position.rl_steps
    collected = stages.collect(built, trajectories, out.pool, step, out.store)
    clock = time.perf_counter()
    params = position.state.params
    batch, numbers = stages.add_log_probs(built, params, position.reference, collected.batch, audit)
    logprobs_s = time.perf_counter() - clock
    state, trained = stages.train(built, position.state, batch, step)
    update_s = time.perf_counter() - clock - logprobs_s
    clock = time.perf_counter()
    weights = built.sync(state.params, step + 1)
    jax.block_until_ready(weights.params)
    numbers |= sampled | collected.metrics | trained | {"sync/bytes": float(weights.bytes)}
    if position.queue is not None:
        numbers |= out.engine.load(weights)
    numbers |= {
        "logprobs/step_s": logprobs_s,
        "update/step_s": update_s,
        "sync/s": time.perf_counter() - clock,
    }
    position.state, position.rl_steps = state, step + 1
    position.weights = [*position.weights[1:], weights]
    return {name: float(np.asarray(value)) for name, value in numbers.items()}


def _obey(position: Position, out: Outputs) -> None:
    """Saves and stops if a signal asked for it."""
    if out.stop:
        save(position, out)
        print("stopped and saved at {} step {}".format(*position.resume), end="; ")
        print("the same command continues the run")
        raise KeyboardInterrupt


def _finish(built: Stages, position: Position, out: Outputs, show: bool) -> dict[str, Any]:
    """Plots, report and the table at the end."""
    result = summary.summarise(out.rundir, position.accuracy)
    if built.config.run.plots:
        result["plots"] = ", ".join(str(path) for path in report.write_plots(out.rundir.root))
        result["report"] = str(report.write_report(out.rundir.root))
    if show:
        print(report.summary_table(summary.labelled(result)))
    return result
