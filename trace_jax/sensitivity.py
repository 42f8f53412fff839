"""Which sites of which layers are worth their bytes, measured on a trained policy.

One step is rolled out with everything recorded. Then the trainer's log-probs are computed again and
again with some records followed and the others ignored: one compiled program, the choice is an
argument. The mean gap to the sampler's log-probs is what `guidance.probe` chooses by.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import config as cfg
from trace_jax import sources, stages
from trace_jax.data import batching
from trace_jax.guidance import probe
from trace_jax.guidance.record import GuidanceSpec
from trace_jax.progress import progress
from trace_jax.qat import plan as qat_plan
from trace_jax.reward.pool import RewardPool
from trace_jax.types import Mean

# Sites that are kept or left out together: K and V of a layer are
UNITS = {
    **{site: (site,) for site in ("expert_in", "expert_hidden", "mlp_in", "mlp_hidden")},
    "kv": ("k", "v"),
}
Unit = tuple[str, int]  # (name out of UNITS, layer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The measured sensitivity, the choice under the budget, and what it is compared with."""

    sensitivity: probe.Sensitivity
    choice: probe.Choice
    rows: list[probe.Row]
    cost: dict[Unit, int]  # bytes per token
    undecoded: float  # share of rows whose scales the low bits could not restore: their only loss

    @property
    def setting(self) -> str:
        """The override that trains with the chosen units."""
        return "quant.guide_layers=" + spell(self.choice.units)


def spell(units: Sequence[Unit]) -> str:
    """Units as `layer_choice` reads them: "expert_in=0,1 kv=2"."""
    by_site: dict[str, list[str]] = {}
    for site, layer in sorted(units):
        by_site.setdefault(site, []).append(str(layer))
    return " ".join(f"{site}={','.join(layers)}" for site, layers in by_site.items())


def measure(config: cfg.Config, start: str, *, budget: int, tries: int | None = None) -> Report:
    """Measures the sites and layers of `config` with the policy of run `start`.

    Args:    budget: bytes per token. tries: measurements to spend on improving the choice by
             swaps; None: four for each unit.
    Raises:  ValueError if the configuration guides nothing or the run has another model.
    """
    quant = dataclasses.replace(config.quant, rollout="fp4", trainer="trace", guide_layers="all")
    run = dataclasses.replace(config.run, init_from=start)
    config = dataclasses.replace(config, quant=quant, warm_start=None, run=run)
    spec = qat_plan.guidance_spec(quant, config.model)
    assert spec is not None  # the trainer is guided
    cost = costs(config.model, quant, spec)
    units, tries = tuple(cost), 4 * len(cost) if tries is None else tries
    built = stages.build(config)
    shapes = jax.eval_shape(lambda: stages.initial_params(built))
    params, _ = sources.start(start, config.model, shapes)
    gap, undecoded = _make_gap(built, params)
    first, stop = quant.keep_first, config.model.layers - quant.keep_last
    half = frozenset(unit for unit in units if unit[1] >= (first + stop) // 2)
    with progress(len(units) + 3 + tries, "probing") as bar:

        def counted(kept: frozenset) -> float:
            bar.update(1)
            return gap(kept)

        found = probe.measure(units, counted)
        choice = probe.select(found.benefit, cost, budget)
        choice = probe.refine(choice, found, cost, budget, counted, tries=tries)
        gap_half = counted(half)
    assert choice.gap is not None
    arms = {
        "latter half, as the paper codes it": (compact_bytes(config), gap_half),
        "latter half": (sum(cost[unit] for unit in half), gap_half),
        "everything": (sum(cost.values()), found.gap_all),
        f"chosen: {spell(choice.units) or 'nothing'}": (choice.bytes, choice.gap),
    }
    rows = probe.compare(arms, gap_none=found.gap_none, gap_all=found.gap_all)
    return Report(sensitivity=found, choice=choice, rows=rows, cost=cost, undecoded=undecoded())


def costs(model: cfg.Model, quant: cfg.Quant, spec: GuidanceSpec) -> dict[Unit, int]:
    """Bytes per token of each unit that a rollout under `quant` can record."""
    found = {}
    for name, sites in UNITS.items():
        for layer in spec.layers_of(sites[0]) if sites[0] in spec.sites else ():
            one = dataclasses.replace(quant, guide_layers=f"{name}={layer}")
            alone = qat_plan.guidance_spec(one, model)
            found[name, layer] = qat_plan.bytes_per_token(alone, model)
    return found


def _make_gap(
    built: stages.Stages, params: Any
) -> tuple[Callable[[frozenset], float], Callable[[], float]]:
    """gap(units followed) -> mean |trainer - sampler| of sampled tokens, nats, on one rollout.

    And a function for the share of rows that could not be decoded in any measurement so far.
    """
    config = built.config
    prompts = built.prompts.train[: config.data.prompts_per_step]
    with RewardPool(config.data.reward) as pool:
        collected = stages.roll_out(built, built.sync(params, 0), prompts, pool, 0, 0)
    parts = list(batching.micro_batches(collected.batch, config.optim.micro_batch))
    lost: list[Mean] = []

    def gap(kept: frozenset) -> float:
        follow = {
            site: jnp.asarray([(name, layer) in kept for layer in range(config.model.layers)])
            for name, sites in UNITS.items()
            for site in sites
        }
        total = count = 0.0
        for part in parts:
            logprobs_BS, counts = jax.device_get(built.log_probs(params, part, follow))
            for name in [name for name in counts if name.startswith("guide/undecoded/")]:
                lost.append(counts[name])
            mask_BS = np.asarray(part.loss_mask_BS)
            difference = np.abs(logprobs_BS - np.asarray(part.sampler_logprobs_BS))
            total += float(difference[mask_BS].sum(dtype=np.float64))
            count += float(mask_BS.sum())
        return total / count

    def undecoded() -> float:
        return float(sum(m.total for m in lost) / max(sum(m.count for m in lost), 1))

    return gap, undecoded


def describe(report: Report, budget: int) -> str:
    """The report as text."""
    found = report.sensitivity
    lines = ["unit              bytes/token  gap without it - gap with all [nats]"]
    for (site, layer), benefit in found.benefit.items():
        lines.append(f"{site:<13} {layer:>3} {report.cost[site, layer]:>12}  {benefit:+.5f}")
    lines.append(f"nothing guided {found.gap_none:.5f}, everything guided {found.gap_all:.5f}")
    lines += ["", probe.table(report.rows)]
    lines += [f"rows whose scales could not be restored from their low bits: {report.undecoded}"]
    lines += ["", f"within {budget} bytes a token:"]
    lines.append(f'    --set "{report.setting}"' if report.choice.units else "    nothing fits")
    return "\n".join(lines)


def compact_bytes(config: cfg.Config) -> int:
    """Bytes per token of the paper's compact mode on this model: one bit, latter half."""
    compact = dataclasses.replace(
        config.quant,
        rollout="fp4",
        trainer="trace",
        guide="mantissa",
        guide_layers="latter_half",
        guide_scale_bits=8,
        guide_global_bits=32,
    )
    spec = qat_plan.guidance_spec(compact, config.model)
    return qat_plan.bytes_per_token(spec, config.model)
