"""The stages of one experiment, built once from its configuration; `loop.py` runs them in turn."""

import dataclasses
import functools
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import device
from pallas_kernels.common.debug import checked
from pallas_kernels.common.impls import choose
from trace_jax import config as cfg
from trace_jax import parity, policy, sources, update, weight_sync
from trace_jax.checks import require
from trace_jax.config_checks import KERNELS, kernels_in_use
from trace_jax.data import batching
from trace_jax.data.prompts import PromptSets, build_prompts
from trace_jax.data.tokenizer import Tokenizer, load_tokenizer
from trace_jax.guidance import health
from trace_jax.guidance.record import Guidance
from trace_jax.guidance.store import GuidanceStore
from trace_jax.models import transformer
from trace_jax.qat import plan as qat_plan
from trace_jax.qat.audit import Audit
from trace_jax.qat.policy_recipe import trainer_audit
from trace_jax.reward.pool import RewardPool, count_failures
from trace_jax.rl import advantage, loss
from trace_jax.rollout import jax_engine
from trace_jax.rollout.audit import sampler_audit
from trace_jax.types import Batch, Mean, Params, Prompt, Scored, TrainState, Trajectory
from trace_jax.weight_sync import SamplerWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """Everything static of a run: data, and one function per stage."""

    config: cfg.Config
    tokenizer: Tokenizer
    prompts: PromptSets
    key: jax.Array  # of the run; every use folds in a purpose and a step
    log_probs: Any  # jitted (params, batch) -> (logprobs_BS, counts)
    supervised_step: update.StepFn
    policy_step: update.StepFn
    sync: Any  # (params, version) -> SamplerWeights
    generate: jax_engine.Generate  # of the embedded engine

    def purpose_key(self, purpose: str, step: int = 0) -> jax.Array:
        """A key for one purpose at one step; no key is ever stored."""
        return jax.random.fold_in(jax.random.fold_in(self.key, zlib.crc32(purpose.encode())), step)


def build(config: cfg.Config) -> Stages:
    """Builds the stages. Reads the data, compiles nothing yet.

    Raises: ValueError, FileNotFoundError for the user's own errors; NotImplementedError for an
            implementation that this device cannot run.
    """
    _require_kernels(config.kernels)
    tokenizer = load_tokenizer(config.data.tokenizer)
    sources.require_tokenizer_fits(tokenizer.vocab_size, config.model, "config.data.tokenizer")
    prompts = build_prompts(config.data, tokenizer, config.seed)
    programs = _programs(
        config.model,
        config.quant,
        dataclasses.replace(config.rollout, version_lag=0),
        config.loss,
        policy_optimizer_args(config),
        warm_optimizer_args(config),
        tokenizer.stop_ids,
        tokenizer.pad_id,
        config.kernels,
    )
    key = jax.random.key(config.seed)
    return Stages(config=config, tokenizer=tokenizer, prompts=prompts, key=key, **programs)


def _require_kernels(kernels: cfg.Kernels) -> None:
    for op in KERNELS:
        impl = getattr(kernels, op)
        choose(f"config.kernels.{op}", impl, {impl.removesuffix("_interpret"): None})


def kernels_text(config: cfg.Config) -> str:
    """What each op that a run has runs as, for its record."""
    used = kernels_in_use(config)
    ops = ", ".join(f"{op} {getattr(config.kernels, op)}" for op in KERNELS if op in used)
    none = ", ".join(op for op in KERNELS if op not in used)
    checked = ", values of forward passes checked" if config.kernels.debug else ""
    return f"kernels on {device.current()}: {ops}{f' (not used: {none})' * bool(none)}{checked}"


@functools.lru_cache(maxsize=16)
def _programs(
    model: cfg.Model,
    quant: cfg.Quant,
    rollout: cfg.Rollout,
    terms: cfg.Loss,
    policy_args: tuple[cfg.Optim, int],
    warm_args: tuple[cfg.Optim, int],
    stop_ids: tuple[int, ...],
    pad_id: int,
    kernels: cfg.Kernels,
) -> dict[str, Any]:
    """The compiled functions; runs that differ only in seed, data or lag share them."""
    log_probs = policy.make_log_probs(
        model, quant, kernels, temperature=rollout.temperature, replay_routes=terms.replay
    )
    plain_log_probs = policy.make_log_probs(model, quant, kernels, temperature=1.0)

    def policy_loss(params: Params, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        logprobs_BS, _ = log_probs(params, batch)
        return loss.policy_loss(
            logprobs_BS,
            batch,
            clip_low=terms.clip_low,
            clip_high=terms.clip_high,
            kl_coef=terms.kl_coef,
            importance_cap=terms.importance_cap,
        )

    def supervised_loss(params: Params, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        return loss.supervised_loss(plain_log_probs(params, batch)[0], batch)

    return {
        "log_probs": checked(log_probs) if kernels.debug else jax.jit(log_probs),
        "supervised_step": update.make_train_step(
            supervised_loss, update.make_optimizer(*warm_args)
        ),
        "policy_step": update.make_train_step(policy_loss, update.make_optimizer(*policy_args)),
        "sync": weight_sync.make_sync(model, quant),
        "generate": jax_engine.make_generate(
            model, quant, rollout, kernels, stop_ids=stop_ids, pad_id=pad_id
        ),
    }


def policy_optimizer_args(config: cfg.Config) -> tuple[cfg.Optim, int]:
    """What `make_optimizer` needs for the RL stage: its section and the number of updates."""
    return config.optim, config.steps * config.optim.minibatches


def warm_optimizer_args(config: cfg.Config) -> tuple[cfg.Optim, int]:
    """The same for the warm start: its own learning rate, constant."""
    rate = config.warm_start.learning_rate if config.warm_start else config.optim.learning_rate
    return dataclasses.replace(config.optim, learning_rate=rate, schedule="constant"), 1


def initial_params(stages: Stages) -> Params:
    """Random parameters for this model and vocabulary."""
    key = stages.purpose_key("parameters")
    return transformer.init(stages.config.model, stages.tokenizer.vocab_size, key)


def audit(stages: Stages, params: Params, weights: SamplerWeights) -> Audit:
    """What the trainer quantises; compared with what the sampler holds where both are in FP4.

    Raises: ValueError if a rule matches nothing, or the two sides do not quantise the same.
    """
    model, quant = stages.config.model, stages.config.quant
    trainer = trainer_audit(model, quant, params)
    if quant.rollout != "bf16" and quant.trainer != "bf16":
        trainer.require_same(sampler_audit(model, quant, weights.params))
    return trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """One step's rollouts as a batch, and what there is to say about them."""

    batch: Batch
    metrics: dict[str, float]


def roll_out(
    stages: Stages,
    weights: SamplerWeights,
    prompts: Sequence[Prompt],
    pool: RewardPool,
    step: int,
    version: int,
    store: GuidanceStore | None = None,
) -> Collected:
    """Samples with the embedded engine, scores and collates one step.

    Args: version: the trainer's, to tell the staleness. store: as in `collect`.
    """
    key = stages.purpose_key("rollout", step)
    trajectories = stages.generate(weights, prompts, stages.config.rollout.group_size, key)
    return collect(stages, trajectories, pool, version, store)


def collect(
    stages: Stages,
    trajectories: Sequence[Trajectory],
    pool: RewardPool,
    version: int,
    store: GuidanceStore | None = None,
) -> Collected:
    """Scores and collates the rollouts of one step, whole groups one after another.

    Args:   version: the trainer's, to tell the staleness. store: keeps the guidance until it is
            trained on; None: it stays in memory.
    Raises: ValueError if not a single answer could be scored.
    """
    config, start = stages.config, time.perf_counter()
    recorded = _guidance_metrics(trajectories, config)
    if store is not None:
        trajectories = [store.keep(trajectory) for trajectory in trajectories]
    texts = [stages.tokenizer.response_text(t.response_T.tolist()) for t in trajectories]
    scored = pool.score_all(trajectories, texts)
    collected = batching.collect(scored)
    require(
        len(collected.scored) > 0,
        "reward: scored samples of a step",
        f"0 of {len(scored)} ({count_failures(scored)})",
        "at least one",
        "repair the reward function; a failed verifier is never a reward of zero",
    )
    gains = advantage.group_advantages(
        collected.reward_B,
        collected.group_B,
        normalize_std=config.loss.normalize_std,
        std_floor=config.loss.std_floor,
    )
    per_update = config.optim.micro_batch * config.optim.minibatches
    batch = batching.collate(
        collected.scored,
        gains.advantages_B,
        length=None,
        bucket_tokens=config.rollout.bucket_tokens,
        pad_id=stages.tokenizer.pad_id,
        rows=batching.rows_for(len(trajectories), per_update),
    )
    tokens = int(sum(len(t.response_T) for t in trajectories))
    metrics = _rollout_metrics(scored, tokens, version) | recorded
    metrics |= {
        "reward/step_s": time.perf_counter() - start,
        "reward/zero_variance_groups": gains.zero_variance_groups,
        "reward/small_groups": gains.small_groups,
        "reward/groups": len(trajectories) // config.rollout.group_size,
    }
    return Collected(batch=batch, metrics={k: float(v) for k, v in metrics.items()})


def _rollout_metrics(scored: Sequence[Scored], tokens: int, version: int) -> dict[str, float]:
    trajectories = [item.trajectory for item in scored]
    ages = version - np.concatenate([t.versions_R for t in trajectories])
    rewards = [item.reward for item in scored if item.reward is not None]
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/failed": len(scored) - len(rewards),
        "rollout/tokens": tokens,
        "rollout/length_tokens": tokens / len(trajectories),
        "rollout/truncated": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "rollout/staleness_versions": float(ages.mean()),
    }


def _guidance_metrics(trajectories: Sequence[Trajectory], config: cfg.Config) -> dict[str, float]:
    """What the records of a rollout cost, as they travel."""
    records = [t.guidance for t in trajectories if isinstance(t.guidance, Guidance)]
    if not records:
        return {"guide/bytes_per_token": 0.0}
    processed = sum(len(t.tokens_T) - 1 for t in trajectories)
    recorded = health.record_bytes(records) / processed
    spec = qat_plan.guidance_spec(config.quant, config.model)
    expected = qat_plan.bytes_per_token(spec, config.model)
    assert abs(recorded - expected) < 1e-6, (recorded, expected)
    # what only measures agreement (a trainer that does not follow) is not a cost of the method
    return {"guide/bytes_per_token": recorded if config.quant.trainer == "trace" else 0.0}


def add_log_probs(
    stages: Stages,
    params: Params,
    reference: Params | None,
    batch: Batch,
    audit: Audit | None = None,
):
    """The batch with pi_old (and the reference) of the trainer before the update, and the metrics.

    This separate forward is what `parity/...` compares with the sampler: never a log-prob that an
    update has already changed. With one update per rollout pi_old is left out: the loss then takes
    its own log-prob, so that the ratio is exactly 1. Two compiled forwards differ in BF16, and the
    clip would act on that difference. With an `audit`, every site in it must have produced codes.
    """
    size = stages.config.optim.micro_batch
    outputs, references = [], []
    for part in batching.micro_batches(batch, size):
        outputs.append(stages.log_probs(params, part))
        if reference is not None:
            references.append(stages.log_probs(reference, part)[0])
    old_BS = np.concatenate([np.asarray(logprobs) for logprobs, _ in outputs])
    totals = functools.reduce(_add, (jax.device_get(counts) for _, counts in outputs))
    if audit is not None:
        _check_codes(audit, totals)
    metrics = summarise_sites(totals)
    mask_BS = np.asarray(batch.loss_mask_BS)
    metrics |= parity.parity_metrics(old_BS, np.asarray(batch.sampler_logprobs_BS), mask_BS)
    if stages.config.optim.minibatches > 1:
        batch = dataclasses.replace(batch, old_logprobs_BS=np.where(mask_BS, old_BS, 0.0))
    if reference is not None:
        reference_BS = np.where(mask_BS, np.concatenate([np.asarray(r) for r in references]), 0.0)
        batch = dataclasses.replace(batch, reference_logprobs_BS=reference_BS)
    return batch, metrics


# reported over all sites too
_TOTALS = (
    *("guide/agreement", "guide/bit_agreement", "guide/undecoded"),
    *("quant/zero_scales", "quant/nan_scales", "quant/saturated_blocks"),
)


def summarise_sites(counts: dict[str, Mean]) -> dict[str, float]:
    """Divides the counts, and adds agreement and health of scales over all sites.

    `guide/agreement` is about codes. Mantissa guidance has no codes to compare with, only bits,
    which the bracket almost always satisfies: that is `guide/bit_agreement`.
    """
    of_layers = f"{policy.CODED}layers/"
    metrics = {n: mean.value for n, mean in counts.items() if not n.startswith(of_layers)}
    for total in _TOTALS:
        guided = [mean for name, mean in counts.items() if name.startswith(f"{total}/")]
        if guided:
            metrics[total] = functools.reduce(lambda a, b: a + b, guided).value
    return metrics


def _check_codes(audit: Audit, counts: dict[str, Mean]) -> None:
    """Every audited site of every layer really produced codes (F16)."""
    coded = {name.removeprefix(policy.CODED): mean for name, mean in counts.items()}
    audit.check({path: coded[path] for path in audit.sites if path in coded})


def _add(a: dict[str, Mean], b: dict[str, Mean]) -> dict[str, Mean]:
    return {name: a[name] + b[name] for name in a}


def train(stages: Stages, state: TrainState, batch: Batch, step: int):
    """All updates of one rollout: (new state, metrics of the updates)."""
    optim = stages.config.optim
    seed = zlib.crc32(f"minibatches/{stages.config.seed}/{step}".encode())
    totals: dict[str, Mean] = {}
    for part in batching.minibatches(batch, count=optim.minibatches, seed=seed):
        micro = batching.micro_batches(part, optim.micro_batch)
        state, metrics = stages.policy_step(state, micro)
        metrics = jax.device_get(metrics)
        totals = _add(totals, metrics) if totals else metrics
    return state, {name: mean.value for name, mean in totals.items()}


def supervise(stages: Stages, state: TrainState, batch: Batch):
    """One supervised update."""
    size = min(stages.config.optim.micro_batch, len(batch.tokens_BT))
    state, metrics = stages.supervised_step(state, batching.micro_batches(batch, size))
    return state, {name: mean.value for name, mean in jax.device_get(metrics).items()}


def copy_params(params: Params) -> Params:
    """New buffers: the trainer's are donated at each update."""
    return jax.tree.map(jnp.copy, params)
