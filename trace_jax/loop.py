"""The run: a warm start, then steps of GRPO.

    stages.roll_out        sample in FP4 and record, score, group, pad
    stages.add_log_probs   the trainer's log-probs before the update, guided by the record
    stages.train           the updates of this rollout
    stages.sync            pack the new weights in FP4

The run can be stopped at any moment and goes on bit for bit with the same command: everything
random comes from (seed, purpose, step), and a checkpoint holds the rest.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any

import grain
import jax
import numpy as np

from trace_jax import config as cfg
from trace_jax import overrides, report, sources, stages, summary, update
from trace_jax.checkpoint import Checkpointer
from trace_jax.data import pipeline
from trace_jax.evaluate import Evaluation, evaluate
from trace_jax.guidance import health
from trace_jax.guidance.store import GuidanceStore
from trace_jax.interrupt import StopFlag, graceful_stop
from trace_jax.metrics import MetricsWriter
from trace_jax.progress import progress
from trace_jax.qat.audit import Audit
from trace_jax.reward.pool import RewardPool
from trace_jax.rundir import RunDir, open_run, write_atomic
from trace_jax.stages import Stages
from trace_jax.types import Params, TrainState
from trace_jax.weight_sync import SamplerWeights


@dataclasses.dataclass(kw_only=True)
class Position:
    """Where a run stands; the only thing here that changes. A checkpoint is a picture of it."""

    state: TrainState
    warm_steps: int  # supervised updates done
    warm_done: bool
    rl_steps: int  # GRPO steps done: the trainer's version
    weights: list[SamplerWeights]  # newest last, `version_lag` + 1 of them
    reference: Params | None  # for the KL term
    prompts: grain.DatasetIterator
    examples: grain.DatasetIterator | None
    accuracy: dict[str, float]  # by name of the moment: warm_start_train, before, after
    wall_s: float = 0.0  # computed so far, over all starts of the run

    @property
    def counter(self) -> int:
        """Number of the checkpoint: grows through both stages."""
        return self.warm_steps + int(self.warm_done) + self.rl_steps

    @property
    def resume(self) -> tuple[str, int]:
        """The last line of metrics that belongs to this position."""
        if not self.warm_done:
            return "warm_start", self.warm_steps
        return "rl", self.rl_steps if "before" in self.accuracy else -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where a run writes."""

    rundir: RunDir
    metrics: MetricsWriter
    checkpoints: Checkpointer
    pool: RewardPool
    stop: StopFlag
    audit: Audit  # what the trainer quantises, checked at the first step of every start
    store: GuidanceStore  # of the rollouts that wait for training
    alarms: set[str] = dataclasses.field(default_factory=set)  # kinds that have been printed


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
        graceful_stop() as stop,
    ):
        start = config.run.init_from or "random parameters"
        text = f"{audit}\npolicy at the start: {start}\n{stages.kernels_text(config)}\n"
        write_atomic(rundir.root / "audit.txt", text)
        resumed = _restore(position, checkpoints)
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
            )
            if not resumed and position.warm_done:
                _save(position, out)  # a run of no steps at all is still a run to start from
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


def _arrays(position: Position) -> dict[str, Any]:
    """What a checkpoint holds. The weights in use are there too: they may lag behind the state."""
    state = position.state
    arrays = {
        "params": state.params,
        "opt_state": state.opt_state,
        "updates": state.step,
        "sampler": [w.params for w in position.weights],
    }
    return arrays if position.reference is None else arrays | {"reference": position.reference}


def _save(position: Position, out: Outputs) -> None:
    examples = position.examples
    extra = {
        "warm_steps": position.warm_steps,
        "warm_done": position.warm_done,
        "rl_steps": position.rl_steps,
        "versions": [w.version for w in position.weights],
        "sampler_bytes": [w.bytes for w in position.weights],
        "prompts": position.prompts.get_state(),
        "examples": None if examples is None else examples.get_state(),
        "accuracy": position.accuracy,
        "wall_s": position.wall_s,
    }
    out.checkpoints.save(position.counter, _arrays(position), extra)


def _restore(position: Position, checkpoints: Checkpointer) -> bool:
    """Moves `position` to the newest intact checkpoint; False if there is none."""
    restored = checkpoints.restore_latest(_arrays(position))
    if restored is None:
        return False
    arrays, extra = restored.arrays, restored.extra
    position.prompts.set_state(extra["prompts"])
    if position.examples is not None:
        position.examples.set_state(extra["examples"])
    kept = zip(arrays["sampler"], extra["versions"], extra["sampler_bytes"], strict=True)
    position.weights = [SamplerWeights(params=p, version=v, bytes=b) for p, v, b in kept]
    position.state = TrainState(
        step=arrays["updates"], params=arrays["params"], opt_state=arrays["opt_state"]
    )
    position.reference = arrays.get("reference")
    for name in ("warm_steps", "warm_done", "rl_steps", "accuracy", "wall_s"):
        setattr(position, name, extra[name])
    place = "{} step {}".format(*position.resume)
    print(f"continuing {checkpoints.directory.parent} from {place}")
    return True


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
                _save(position, out)
            _obey(position, out)
    _end_warm_start(built, position)
    _save(position, out)


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
    config = built.config
    return evaluate(
        built.generate,
        built.sync(position.state.params, position.rl_steps),
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
    with progress(config.steps, "GRPO", initial=position.rl_steps) as bar:
        while position.rl_steps < config.steps:
            start = time.perf_counter()
            numbers = _step(built, position, out, None if checked else out.audit)
            checked = True
            last = position.rl_steps == config.steps
            if last or position.rl_steps % config.run.eval_every == 0:
                numbers |= _held_out(built, position, out, "after")
            elapsed = time.perf_counter() - start
            position.wall_s += elapsed
            numbers |= out.store.metrics(elapsed)
            _raise_alarms(position, out, numbers)
            out.metrics.write(position.rl_steps, position.wall_s, numbers)
            bar.update(
                1,
                reward=numbers["reward/mean"],
                gap=numbers["parity/logprob_abs_diff_nats"],
                accuracy=position.accuracy.get("after", position.accuracy["before"]),
            )
            if last or position.rl_steps % config.run.checkpoint_every == 0:
                _save(position, out)
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


def _step(built: Stages, position: Position, out: Outputs, audit: Audit | None) -> dict[str, float]:
    """One GRPO step; returns its metrics. With an audit, its sites must have produced codes."""
    step = position.rl_steps
    prompts = next(position.prompts)
    collected = stages.roll_out(
        built, position.weights[0], prompts, out.pool, step, step, out.store
    )
    clock = time.perf_counter()
    params = position.state.params
    batch, numbers = stages.add_log_probs(built, params, position.reference, collected.batch, audit)
    logprobs_s = time.perf_counter() - clock
    state, trained = stages.train(built, position.state, batch, step)
    update_s = time.perf_counter() - clock - logprobs_s
    clock = time.perf_counter()
    weights = built.sync(state.params, step + 1)
    jax.block_until_ready(weights.params)
    numbers |= collected.metrics | trained
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
        _save(position, out)
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
