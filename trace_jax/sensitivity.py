"""Which layers' guidance is worth its bytes, measured on a trained policy.

One step is rolled out with every quantised layer recorded. Then the trainer's log-probs are
computed again and again with the records of some layers followed and the others ignored: one
compiled program, the choice is an argument. The mean gap to the sampler's log-probs is what
`guidance.probe` chooses by.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import config as cfg
from trace_jax import loop, stages
from trace_jax.data import batching
from trace_jax.guidance import probe
from trace_jax.progress import progress
from trace_jax.qat import plan as qat_plan
from trace_jax.reward.pool import RewardPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The measured sensitivity, the choice under the budget, and what it is compared with."""

    sensitivity: probe.Sensitivity
    choice: probe.Choice
    rows: list[probe.Row]
    layer_bytes: int  # per token and layer

    @property
    def setting(self) -> str:
        """The override that trains with the chosen layers."""
        return "quant.guide_layers=" + ",".join(str(layer) for layer in self.choice.units)


def measure(config: cfg.Config, start: str, *, budget: int, tries: int | None = None) -> Report:
    """Measures the layers of `config` with the policy of run `start`.

    Args:    budget: bytes per token. tries: measurements to spend on improving the choice by
             swaps; None: twice the number of layers.
    Raises:  ValueError if the configuration guides nothing or the run has another model.
    """
    quant = dataclasses.replace(config.quant, rollout="fp4", trainer="trace", guide_layers="all")
    run = dataclasses.replace(config.run, init_from=start)
    config = dataclasses.replace(config, quant=quant, warm_start=None, run=run)
    built = stages.build(config)
    params = loop.load_params(start, stages.initial_params(built))
    gap = _make_gap(built, params)
    spec = qat_plan.guidance_spec(quant, config.model.layers)
    assert spec is not None  # the trainer is guided
    per_layer = qat_plan.bytes_per_token(spec, config.model) // len(spec.layers)
    cost = dict.fromkeys(spec.layers, per_layer)
    tries = 2 * len(spec.layers) if tries is None else tries
    with progress(len(spec.layers) + 2 + tries + 2, "probing") as bar:

        def counted(units: frozenset) -> float:
            bar.update(1)
            return gap(units)

        found = probe.measure(spec.layers, counted)
        choice = probe.select(found.benefit, cost, budget)
        choice = probe.refine(choice, found, cost, budget, counted, tries=max(tries, 1))
        half = spec.layers[len(spec.layers) // 2 :]
        arms = {
            "latter half of the layers": (per_layer * len(half), counted(frozenset(half))),
            "all layers": (per_layer * len(spec.layers), found.gap_all),
            f"chosen: {','.join(map(str, choice.units)) or 'none'}": (choice.bytes, choice.gap),
        }
    rows = probe.compare(arms, gap_none=found.gap_none, gap_all=found.gap_all)
    return Report(sensitivity=found, choice=choice, rows=rows, layer_bytes=per_layer)


def _make_gap(built: stages.Stages, params: Any) -> Callable[[frozenset], float]:
    """gap(layers followed) -> mean |trainer - sampler| of sampled tokens, nats, on one rollout."""
    config = built.config
    prompts = built.prompts.train[: config.data.prompts_per_step]
    with RewardPool(config.data.reward) as pool:
        collected = stages.roll_out(built, built.sync(params, 0), prompts, pool, 0, 0)
    parts = list(batching.micro_batches(collected.batch, config.optim.micro_batch))

    def gap(units: frozenset) -> float:
        follow_L = jnp.asarray([layer in units for layer in range(config.model.layers)])
        total = count = 0.0
        for part in parts:
            logprobs_BS = jax.device_get(built.log_probs(params, part, follow_L)[0])
            mask_BS = np.asarray(part.loss_mask_BS)
            difference = np.abs(logprobs_BS - np.asarray(part.sampler_logprobs_BS))
            total += float(difference[mask_BS].sum(dtype=np.float64))
            count += float(mask_BS.sum())
        return total / count

    return gap


def describe(report: Report, budget: int) -> str:
    """The report as text."""
    lines = ["layer  gap without it - gap with all [nats]"]
    for layer, benefit in report.sensitivity.benefit.items():
        lines.append(f"{layer:>5}  {benefit:+.5f}")
    found = report.sensitivity
    lines.append(f"nothing guided {found.gap_none:.5f}, everything guided {found.gap_all:.5f}")
    lines.append("")
    lines.append(probe.table(report.rows))
    lines.append("")
    lines.append(f"{report.layer_bytes} bytes a token and layer, budget {budget}:")
    lines.append(f"    --set {report.setting}" if report.choice.units else "    no layer fits")
    return "\n".join(lines)


def default_budget(config: cfg.Config) -> int:
    """Four fifths of what the paper's compact mode costs on this model (bytes per token)."""
    compact = dataclasses.replace(
        config.quant,
        rollout="fp4",
        trainer="trace",
        guide="mantissa",
        guide_layers="latter_half",
        guide_scale_bits=8,
        guide_global_bits=32,
    )
    spec = qat_plan.guidance_spec(compact, config.model.layers)
    return qat_plan.bytes_per_token(spec, config.model) * 4 // 5
