"""What guidance costs in a real training step: the same rollout, trained guided and unguided."""

import dataclasses
import functools

import jax

from launch.benches.timing import Row, in_turn
from trace_jax import overrides, stages, update
from trace_jax.data import batching
from trace_jax.reward.pool import RewardPool

ARMS = {  # of the trainer; the first is what the others are held against
    "qat": {"trainer": "qat"},
    "bf16": {"trainer": "bf16"},
    "trace codes": {"trainer": "trace"},
    "trace mantissa": {"trainer": "trace", "guide": "mantissa"},
    "trace mantissa, 2 bits of scales": {
        **{"trainer": "trace", "guide": "mantissa"},
        **{"guide_scale_bits": 2, "guide_global_bits": 16},
    },
    "trace mantissa, latter half": {
        "trainer": "trace",
        "guide": "mantissa",
        "guide_layers": "latter_half",
    },
}


def run(repeats: int, config: str = "configs/demo_cpu.py") -> list[Row]:
    """Seconds of one optimiser step per arm, in turn; the ratio to the "qat" arm, pair by pair.

    The step takes host arrays (guidance included), so moving guidance to the device is in it.
    """
    base = overrides.load(config)
    calls = [_arm(base, quant) for quant in ARMS.values()]
    times = in_turn(calls, repeats)
    rows = []
    for name, seconds in zip(ARMS, times, strict=True):
        ratios = sorted(a / b for a, b in zip(seconds, times[0], strict=True))
        rows.append(
            {
                "name": f"training step, {name}",
                "seconds": sorted(seconds)[repeats // 2],
                "peer_seconds": sorted(times[0])[repeats // 2],
                "ratio": ratios[repeats // 2],
                "ratio_range": (ratios[0], ratios[-1]),
                "repeats": repeats,
                "peer": "training step, qat",
            }
        )
    return rows


def _arm(base, quant: dict):
    """A callable that makes one update with this arm's own rollout, from random parameters."""
    config = dataclasses.replace(
        base, warm_start=None, quant=dataclasses.replace(base.quant, **quant)
    )
    built = stages.build(config)
    params = stages.initial_params(built)
    prompts = built.prompts.train[: config.data.prompts_per_step]
    with RewardPool(config.data.reward) as pool:
        collected = stages.roll_out(built, built.sync(params, 0), prompts, pool, 0, 0)
    tx = update.make_optimizer(*stages.policy_optimizer_args(config))
    holder = {"state": update.init_state(params, tx)}

    def call():
        micro = batching.micro_batches(collected.batch, config.optim.micro_batch)
        holder["state"], metrics = built.policy_step(holder["state"], micro)
        return jax.tree.leaves((holder["state"].params, metrics))

    return functools.partial(call)
