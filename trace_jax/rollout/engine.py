"""What an engine is to the loop, and the embedded one as such."""

import concurrent.futures
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from trace_jax.checks import require
from trace_jax.rollout.jax_engine import Generate
from trace_jax.types import Prompt, Trajectory
from trace_jax.weight_sync import SamplerWeights

Group = list[Trajectory]  # all samples of one prompt, in the order of their numbers


@runtime_checkable
class Engine(Protocol):
    """Samples answers, in turn with training or beside it."""

    def __call__(
        self, weights: SamplerWeights, prompts: Sequence[Prompt], samples: int, key: jax.Array
    ) -> list[Trajectory]:
        """Samples with these weights and waits; prompt-major order."""
        ...

    def load(self, weights: SamplerWeights) -> dict[str, float]:
        """Makes these the weights of `submit` from now on; returns metrics of the transfer."""
        ...

    def submit(
        self, prompts: Sequence[Prompt], samples: int, key: jax.Array
    ) -> list[concurrent.futures.Future[Group]]:
        """Starts sampling with the weights loaded last, and later ones; a future per prompt."""
        ...

    def metrics(self) -> dict[str, float]:
        """What has happened since the last call, by name of the metric."""
        ...

    def close(self) -> None:
        """Gives up what is not done, and all that the engine holds. May be called again."""
        ...


class JaxEngine:
    """The embedded engine; `submit` works off calls one after another in a thread of its own.

    A call samples with the weights that are loaded when its turn comes, all of it with the same.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._weights: SamplerWeights | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rollout")

    def __call__(
        self, weights: SamplerWeights, prompts: Sequence[Prompt], samples: int, key: jax.Array
    ) -> list[Trajectory]:
        """See `Engine`."""
        return self._generate(weights, prompts, samples, key)

    def load(self, weights: SamplerWeights) -> dict[str, float]:
        """See `Engine`. Nothing travels."""
        self._weights = weights
        return {}

    def submit(
        self, prompts: Sequence[Prompt], samples: int, key: jax.Array
    ) -> list[concurrent.futures.Future[Group]]:
        """See `Engine`.

        Raises: ValueError if no weights are loaded.
        """
        require(self._weights is not None, "engine: weights", None, "loaded before a prompt")
        futures: list[concurrent.futures.Future[Group]] = [
            concurrent.futures.Future() for _ in prompts
        ]

        def work() -> None:
            assert self._weights is not None
            try:
                found = self._generate(self._weights, prompts, samples, key)
            except BaseException as error:
                for future in futures:
                    future.set_exception(error)
                return
            for i, future in enumerate(futures):
                future.set_result(found[i * samples : (i + 1) * samples])

        call = self._thread.submit(work)
        call.add_done_callback(lambda done: done.cancelled() and [f.cancel() for f in futures])
        return futures

    def metrics(self) -> dict[str, float]:
        """See `Engine`."""
        return {}

    def close(self) -> None:
        """See `Engine`. Waits for the call that runs: a computation cannot be given up."""
        self._thread.shutdown(wait=True, cancel_futures=True)
