"""Where a run stands, and how that is saved and found again."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain

from trace_jax.checkpoint import Checkpointer
from trace_jax.guidance.store import GuidanceStore
from trace_jax.interrupt import StopFlag
from trace_jax.metrics import MetricsWriter
from trace_jax.qat.audit import Audit
from trace_jax.reward.pool import RewardPool
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.queue import Queue
from trace_jax.rundir import RunDir
from trace_jax.types import Params, Prompt, TrainState
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
    queue: Queue | None = None  # of prompts in flight; None: sampling and training take turns

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
    engine: Engine
    alarms: set[str] = dataclasses.field(default_factory=set)  # kinds that have been printed


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


def save(position: Position, out: Outputs) -> None:
    """Writes a checkpoint of the position."""
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
        "queue": None if position.queue is None else position.queue.state(),
    }
    out.checkpoints.save(position.counter, _arrays(position), extra)


def restore(position: Position, checkpoints: Checkpointer, prompts: Sequence[Prompt]) -> bool:
    """Moves `position` to the newest intact checkpoint; False if there is none.

    Args: prompts: all that the run trains on.
    """
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
    if position.queue is not None:
        position.queue.restore(extra["queue"], prompts)
    for name in ("warm_steps", "warm_done", "rl_steps", "accuracy", "wall_s"):
        setattr(position, name, extra[name])
    place = "{} step {}".format(*position.resume)
    print(f"continuing {checkpoints.directory.parent} from {place}")
    return True
