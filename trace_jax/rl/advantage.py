"""Group-relative advantages, on the host in float64: what GRPO subtracts and divides by."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.checks import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of a batch and what happened to its groups."""

    advantages_B: Float[np.ndarray, " B"]  # float32; exactly 0 where nothing can be learnt
    keep_B: Bool[np.ndarray, " B"]  # False: the reward failed; mask the sample out of the loss
    groups: int  # groups that were seen
    dropped_samples: int  # samples without a finite reward
    zero_variance_groups: int  # at least two valid samples, all (nearly) equal: advantage 0
    small_groups: int  # fewer than two valid samples, so no baseline: advantage 0


def group_advantages(
    rewards_B: Float[np.ndarray, " B"],
    group_B: Int[np.ndarray, " B"],
    *,
    normalize_std: bool,
    std_floor: float,
) -> Advantages:
    """Compares every reward with the other samples of the same prompt.

    Math:    a = r - mean_group(r), divided by std_group(r) if `normalize_std`. The standard
             deviation is the sample one (n - 1), as in verl and TRL; nothing is added to it.
             A group whose rewards are all equal, or whose std is below `std_floor`, gets exactly 0,
             so rounding residue is never divided by itself.
    Args:    rewards_B: NaN (or infinite) where the verifier failed; such a sample gets 0, leaves
             the group's mean and std alone and is False in `keep_B`. Groups may be ragged and
             `group_B` may hold any ids in any order.
    Returns: `Advantages`. Zero-variance groups stay in the loss: their tokens count in the
             denominator of the token-mean, and a KL term still acts on them.
    Source:  DeepSeekMath (arXiv 2402.03300), eq. 2; NeMo-RL#4161 for the floor.
             Test that states it: tests/rl/advantage_test.py
    """
    where = "rl.advantage.group_advantages"
    require(len(rewards_B) == len(group_B), where, len(group_B), f"{len(rewards_B)} group ids")
    rewards = np.asarray(rewards_B, np.float64)
    keep = np.isfinite(rewards)
    advantages = np.zeros(len(rewards), np.float64)
    groups = np.unique(group_B)
    zero_variance = small = 0
    for group in groups:
        members = np.flatnonzero(keep & (group_B == group))
        if len(members) < 2:
            small += 1
            continue
        reward = rewards[members]
        std = reward.std(ddof=1)
        if reward.max() == reward.min() or std < std_floor:
            zero_variance += 1
            continue
        centred = reward - reward.mean()
        advantages[members] = centred / std if normalize_std else centred
    return Advantages(
        advantages_B=advantages.astype(np.float32),
        keep_B=keep,
        groups=len(groups),
        dropped_samples=int(len(rewards) - keep.sum()),
        zero_variance_groups=zero_variance,
        small_groups=small,
    )
