"""The real training step as a job for `compile.py`: what `stages.build` makes, on abstract data."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax import config as cfg
from trace_jax import formats, layer_kinds, overrides, stages, update
from trace_jax.aot import targets
from trace_jax.guidance.record import SITES, Guidance
from trace_jax.qat import plan as qat_plan
from trace_jax.qat import sites
from trace_jax.rollout import jax_engine
from trace_jax.types import Batch, TrainState


# A site is one place of a layer where values are rounded; `jax.named_scope("quantize[...]")` marks
# its arithmetic in the program (`policy.py`).
def sites_of(plan: qat_plan.LayerPlan) -> list[str]:
    """Everything that the trainer quantises in one layer: sites, and matrices by their paths."""
    order = sorted(SITES, key=lambda site: SITES[site] != "attention")  # as they are computed
    names = [site for site in order if plan.format_of(site) is not None]
    if plan.weights is not None:
        names += [f"{plan.kind.ffn}.{name}" for name in ("gate_up", "down")]
    return names


def expected_sites(quant: cfg.Quant, model: cfg.Model) -> list[tuple[str, str]]:
    """(segment, site) of everything that the trainer quantises; a segment reads "layers[0:2]"."""
    found = [
        (f"layers[{segment.start}:{segment.stop}]", site)
        for segment in qat_plan.side_segments(quant, model, quant.trainer)
        for plan in segment.period
        for site in sites_of(plan)
    ]
    return list(dict.fromkeys(found))


def train_step(
    topology: targets.Topology, config: str, settings: Sequence[str] = ()
) -> tuple[Callable, tuple[Any, Any]]:
    """Builder: the policy's update, of one micro-batch, under a configuration and settings."""
    experiment = overrides.override(overrides.load(config), list(settings))
    built = stages.build(experiment)
    tx = update.make_optimizer(*stages.policy_optimizer_args(experiment))
    params = jax.eval_shape(lambda: stages.initial_params(built))
    state = jax.eval_shape(lambda p: update.init_state(p, tx), params)
    arguments = (state, abstract_batch(experiment))

    def step(state: TrainState, batch: Batch) -> Any:
        return built.policy_step(state, [batch])

    return jax.jit(step, donate_argnums=0), _placed(topology, arguments)


def rollout(
    topology: targets.Topology, config: str, settings: Sequence[str] = (), prompts: int = 8
) -> tuple[Callable, tuple[Any, ...]]:
    """Builder: the engine's whole rollout (prefill and decoding) of `prompts` prompts."""
    experiment = overrides.override(overrides.load(config), list(settings))
    built = stages.build(experiment)
    section, tokenizer = experiment.rollout, built.tokenizer
    core = jax_engine.Core(
        experiment.model,
        experiment.quant,
        section,
        tuple(tokenizer.stop_ids),
        tokenizer.pad_id,
        kernels=experiment.kernels,
    )
    params = jax.eval_shape(lambda: stages.initial_params(built))
    longest = -(-experiment.data.max_prompt_tokens // section.bucket_tokens) * section.bucket_tokens
    arguments = (
        jax.eval_shape(lambda p: built.sync(p, 0).params, params),
        jax.ShapeDtypeStruct((prompts, longest), jnp.int32),
        jax.ShapeDtypeStruct((prompts,), jnp.int32),
        jax.ShapeDtypeStruct((prompts,), jnp.uint32),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    sample = functools.partial(core.sample, samples=section.group_size)
    return sample, _placed(topology, arguments)


def abstract_batch(config: cfg.Config) -> Batch:
    """One micro-batch, as long as the configuration lets it become."""
    model, optim, rollout = config.model, config.optim, config.rollout
    B = optim.micro_batch
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    T = -(-longest // rollout.bucket_tokens) * rollout.bucket_tokens
    S, X = T - 1, model.experts_per_token
    L = len(layer_kinds.layers_with(model, "moe"))

    def leaf(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return Batch(
        tokens_BT=leaf(B, T, dtype=jnp.int32),
        valid_BT=leaf(B, T, dtype=jnp.bool_),
        loss_mask_BS=leaf(B, S, dtype=jnp.bool_),
        sampler_logprobs_BS=leaf(B, S),
        advantages_B=leaf(B),
        routes_LBSX=leaf(L, B, S, X, dtype=jnp.int32),
        guidance=_guidance(config, (B, S)),
        old_logprobs_BS=leaf(B, S) if optim.minibatches > 1 else None,
        reference_logprobs_BS=None if config.loss.kl_coef is None else leaf(B, S),
    )


def _guidance(config: cfg.Config, BS: tuple[int, int]) -> Guidance | None:
    """An abstract record, made by the functions that make a real one."""
    model, quant = config.model, config.quant
    spec = qat_plan.guidance_spec(quant, model)
    if spec is None:
        return None

    def record(name: str, format: formats.Format) -> Any:
        site = sites.Site(
            format=format,
            kind=spec.kind,
            scale_bits=spec.scale_bits,
            global_bits=spec.global_bits,
        )
        shape = (len(spec.layers_of(name)), *BS, *qat_plan.site_shape(model, name))
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.eval_shape(lambda x: sites.record_site(x, site), x)

    named = zip(spec.sites, spec.formats, strict=True)
    return Guidance(sites={s: record(s, formats.get(text)) for s, text in named}, spec=spec)


def quantiser(
    topology: targets.Topology, format: str, rows: int = 256, width: int = 512
) -> tuple[Callable, tuple[Any]]:
    """Builder: `formats.quantize` alone, one global scale a row, codes and scales out."""

    def quantise(x: jax.Array) -> Any:
        q = formats.quantize(x, format, global_axes="row")
        return q.codes, q.scales, q.global_scale

    shape = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=topology.sharding)
    return quantise, (shape,)


def site_quantiser(
    topology: targets.Topology, format: str, rows: int = 256, width: int = 512
) -> tuple[Callable, tuple[Any, ...]]:
    """Builder: one guided site alone, BF16 in and out, with the codes of a rollout."""
    site = sites.Site(format=formats.get(format))

    def quantise(x: jax.Array, record: Any, valid: jax.Array) -> jax.Array:
        return sites.quantize_site(x, record, valid, site, guided=True)[0]

    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    valid = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    record = jax.eval_shape(lambda x: sites.record_site(x, site), x)
    return quantise, _placed(topology, (x, record, valid))


def _placed(topology: targets.Topology, arguments: Any) -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=topology.sharding), arguments
    )
