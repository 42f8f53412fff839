"""The engine of a run, and the queue between it and the trainer, as the configuration says."""

import pathlib
from collections.abc import Sequence
from concurrent.futures import Future

from trace_jax.rollout.engine import Engine, Group, JaxEngine
from trace_jax.rollout.queue import Queue
from trace_jax.stages import Stages
from trace_jax.types import Prompt


def make_engine(stages: Stages, root: pathlib.Path) -> Engine:
    """The engine that the configuration names; nothing of it starts before it is used.

    Args: root: of the run directory, where servers write their logs.
    """
    if stages.config.rollout.engine == "jax":
        return JaxEngine(stages.generate)
    from trace_jax.rollout.sglang.engine import SGLangEngine

    stop_ids, pad_id = stages.tokenizer.stop_ids, stages.tokenizer.pad_id
    vocab_size = stages.tokenizer.vocab_size
    return SGLangEngine(
        stages.config, stop_ids=stop_ids, pad_id=pad_id, vocab_size=vocab_size, run_dir=root
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
