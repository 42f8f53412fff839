"""The engine of a run, and the queue between it and the trainer, as the configuration says."""

from collections.abc import Sequence
from concurrent.futures import Future

from trace_jax.checks import message
from trace_jax.rollout.engine import Engine, Group, JaxEngine
from trace_jax.rollout.queue import Queue
from trace_jax.stages import Stages
from trace_jax.types import Prompt


def make_engine(stages: Stages) -> Engine:
    """The engine that the configuration names; nothing of it starts before it is used.

    Raises: NotImplementedError for an engine that is not connected yet.
    """
    if stages.config.rollout.engine == "jax":
        return JaxEngine(stages.generate)

    raise NotImplementedError(
        message("config.rollout.engine", "sglang", "jax: servers are not connected to the loop yet")
    )


def make_queue(stages: Stages, engine: Engine) -> Queue | None:
    """The queue between the engine and the trainer; None where they take turns."""
    config = stages.config
    if config.asynchrony is None:
        return None

    def submit(prompts: Sequence[Prompt], number: int) -> list[Future[Group]]:
        key = stages.purpose_key("rollout", number)
        return engine.submit(prompts, config.rollout.group_size, key)

    return Queue(
        submit,
        per_step=config.data.prompts_per_step,
        max_version_diff=config.asynchrony.max_version_diff,
        ahead=config.asynchrony.ahead,
    )
