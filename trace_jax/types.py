"""What flows between the stages. Read this file, then `loop.py`, and you know the system.

    Prompt -> Trajectory -> Scored -> Batch -> TrainState

Axis letters, unique in the repository:
    P prompts           G samples per prompt   B sequences (P*G)   T tokens   S = T-1 predictions
    D width             H query heads          J key/value heads   K head dim or contraction
    E experts           X experts per token    F expert ffn width  V vocabulary
    L layers            N blocks of a format   M rows of a matrix  R response tokens  C cache slots

Position s of an S axis is the input token s, whose logits predict token s+1. Everything the rollout
records per processed token (routes, guidance) lives on the S axis: the last token of a sequence is
sampled but never processed, so it has no record.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.guidance.record import Guidance, HostArray, StoredGuidance, Ticket

# A number on the host: Python's, or numpy's as `jax.device_get` and sums of it give them.
if TYPE_CHECKING:
    HostNumber: TypeAlias = Any
else:
    HostNumber = float | np.ndarray | np.generic

Params = dict[str, Any]  # a nested dict of arrays, as Flax NNX splits it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question: the ids the engine sees, and what the reward needs to judge an answer."""

    uid: str  # unique and stable: the same item has the same uid in every run
    text: str  # what the user wrote, before the chat template
    tokens: tuple[int, ...]  # after the chat template
    answer: str | None  # gold answer; None if only a verifier can tell
    task: str  # which reward function judges it
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # for the reward function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sampled sequence on the host. Sampled ids are kept and never tokenised again."""

    prompt: Prompt
    sample: int  # 0..G-1 within its group
    tokens_T: np.ndarray  # int32, prompt then response, without padding
    prompt_length: int  # tokens
    sampler_logprobs_R: np.ndarray  # float32, nats, of the response tokens
    routes_SLX: np.ndarray  # int16, experts chosen by the rollout; L: MoE layers (dense model: 0)
    # numpy leaves with leading axes (layers, S), or where a store keeps them; None in bf16 rollouts
    guidance: Guidance | Ticket | None
    finish_reason: str  # "stop" (a stop token was sampled; it is the last token) or "length"
    versions_R: np.ndarray  # int32, of the weights that sampled each response token

    @property
    def version(self) -> int:
        """The oldest version of weights in it: what staleness counts from."""
        return int(self.versions_R.min())

    @property
    def response_T(self) -> np.ndarray:
        """The sampled ids, the stop token included."""
        return self.tokens_T[self.prompt_length :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """A trajectory with its reward. A verifier that failed is not a reward of zero."""

    trajectory: Trajectory
    reward: float | None  # None: the verifier failed, hung or returned NaN; dropped and counted
    failure: str | None = None  # why, if reward is None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A training batch: arrays only, right-padded. Entry s of S = T-1 is about token s+1."""

    tokens_BT: Int[Array, "B T"] | HostArray
    valid_BT: Bool[Array, "B T"] | HostArray  # False on padding
    loss_mask_BS: Bool[Array, "B S"] | HostArray  # True where token s+1 was sampled
    sampler_logprobs_BS: Float[Array, "B S"] | HostArray  # nats, mu; 0 where loss_mask is False
    advantages_B: Float[Array, " B"] | HostArray
    # L: MoE layers, 0 of a dense model, whose X means nothing; None: supervised, no replay
    routes_LBSX: Int[Array, "L B S X"] | HostArray | None
    # leaves (layers, B, S, ...), or still in a store (micro-batches bring it); None: not recorded
    guidance: Guidance | StoredGuidance | None
    old_logprobs_BS: Float[Array, "B S"] | HostArray | None = None  # nats, pi_old
    reference_logprobs_BS: Float[Array, "B S"] | HostArray | None = None  # nats, for the KL term


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that an update changes. `step` counts the updates of its stage."""

    step: Int[Array, ""]
    params: Params  # float32 master weights
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean that is not divided yet: sums over shards and micro-batches stay exact."""

    total: Float[Array, ""] | HostNumber
    count: Float[Array, ""] | HostNumber

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float:
        """total / count, and 0 for an empty mean."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0
