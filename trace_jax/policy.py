"""The trainer's policy: parameters and a batch to log-probs. The only place QAT meets the model.

    layer l:  K, V       -> quantised after RoPE, guided where the rollout recorded this layer
              expert in  -> quantised once per token, guided likewise
              expert w   -> quantised from the BF16 cast of the master weight, as in the sampler
              hidden     -> quantised per row (the input of the second expert matmul)

Dense MLPs, where they are quantised, are treated as experts are. Gated DeltaNet layers and shared
experts stay in the compute dtype.

Log-probabilities are those of softmax(logits / temperature) over the full vocabulary in float32:
the same definition as the sampler's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from pallas_kernels.token_logprob.op import token_logprobs
from trace_jax import config as cfg
from trace_jax import layer_kinds, stacks
from trace_jax.checks import require
from trace_jax.guidance.record import Guidance, SiteRecord, StoredGuidance
from trace_jax.models import attention, moe, transformer
from trace_jax.models.grouped_matmul import Dispatch, gather_rows, grouped_matmul
from trace_jax.qat import plan as qat_plan
from trace_jax.qat import policy_recipe, sites
from trace_jax.qat.recipe import Recipe
from trace_jax.qat.transform import quantize_params
from trace_jax.rl import replay
from trace_jax.types import Batch, Mean, Params

_RECORD, _FOLLOW = "record/", "follow/"
CODED = "quant/coded/"  # share of values with a code other than zero: by site, and by audited path
LogProbs = Callable[..., tuple[Array, dict[str, Mean]]]


def make_log_probs(
    model: cfg.Model,
    quant: cfg.Quant,
    kernels: cfg.Kernels = cfg.XLA,
    *,
    temperature: float,
    replay_routes: bool = True,
) -> LogProbs:
    """Builds `log_probs(params, batch, follow=None) -> (logprobs_BS in nats, counts)`.

    The static choices (which layers, which format, guided or not) are taken here; the function is
    pure. Counts are undivided means: route mismatch, and per site the guide agreement and so on.
    `follow` (by site, bool of each layer) is for measurements: where it is False a site rounds on
    its own, as if nothing had been recorded there.
    """
    require(
        replay_routes or not (quant.guide_hidden and quant.trainer == "trace"),
        "policy: guide_hidden",
        "no routing replay",
        "replayed routes: the record is of the rollout's experts",
        "loss.replay=true, or quant.guide_hidden=false",
    )
    segments = qat_plan.side_segments(quant, model, quant.trainer)
    view = transformer.make_layer_view(model)
    dtype = jnp.dtype(model.compute_dtype)

    def log_probs(
        params: Params, batch: Batch, follow: dict[str, Bool[Array, " L"]] | None = None
    ) -> tuple[Array, dict[str, Mean]]:
        _check_records(batch, model, quant)
        read_BS, valid_BS = batch.tokens_BT[:, :-1], batch.valid_BT[:, 1:]
        position_BS = jnp.broadcast_to(jnp.arange(read_BS.shape[1]), read_BS.shape)
        x_BSD = transformer.embed_tokens(params, read_BS, dtype)
        counts: dict[str, Mean] = {}

        def body(x_BSD: Array, plan: qat_plan.LayerPlan, layer: Params, inputs: dict[str, Any]):
            run = _Layer(model, quant, kernels, plan, valid_BS, inputs)
            x_BSD = run(view, layer, x_BSD, position_BS, replay_routes)
            # scan stacks what it hands back over layers, and a `Mean` holds scalars
            return x_BSD, {name: (mean.total, mean.count) for name, mean in run.counts.items()}

        for segment in segments:
            inputs = _segment_inputs(segment, model, batch, follow)
            with jax.named_scope(f"layers[{segment.start}:{segment.stop}]"):
                stack = stacks.cut(model, segment, params["layers"])
                x_BSD, stacked = stacks.scan(segment, body, x_BSD, stack, inputs)
            _add_up(counts, stacked)
        x_BSD = transformer.final_norm(model, params, x_BSD)
        tokens_BS = batch.tokens_BT[:, 1:]
        with jax.named_scope("token_logprob"):
            found = token_logprobs(
                x_BSD.reshape(-1, x_BSD.shape[-1]),
                transformer.head(params),
                tokens_BS.reshape(-1),
                impl=kernels.token_logprob,
                temperature=temperature,
            )
        return found.logprob_M.reshape(tokens_BS.shape), counts

    return log_probs


def _add_up(counts: dict[str, Mean], stacked: dict[str, stacks.Rows]) -> None:
    """Counts of a segment's layers, summed; those of codes also layer by layer, for the audit."""
    for name, (ids, (total_L, count_L)) in stacked.items():
        if name.startswith(CODED):
            for row, layer in enumerate(ids):
                path = policy_recipe.site_path(name.removeprefix(CODED), layer)
                counts[f"{CODED}{path}"] = Mean(total=total_L[row], count=count_L[row])
        of_segment = Mean(total=jnp.sum(total_L), count=jnp.sum(count_L))
        counts[name] = counts[name] + of_segment if name in counts else of_segment


def _check_records(batch: Batch, model: cfg.Model, quant: cfg.Quant) -> None:
    """Routes are of this model's layers, and guidance is what a rollout under `quant` records."""
    routes, guidance = batch.routes_LBSX, batch.guidance
    moe_layers = len(layer_kinds.layers_with(model, "moe"))
    layers = moe_layers if routes is None else len(routes)
    require(layers == moe_layers, "policy: layers of the routes", layers, moe_layers)
    require(
        guidance is not None or routes is None or quant.trainer != "trace",
        "policy: guidance of a rollout batch",
        None,
        'a record, since quant.trainer is "trace"',
        "let the rollout record guidance; plain rounding would be silent misguidance",
    )
    fix = "take micro-batches of it (`data.batching.micro_batches`): they bring the records"
    stored = isinstance(guidance, StoredGuidance)
    require(not stored, "policy: guidance of a rollout batch", "tickets of a store", "arrays", fix)
    expected = qat_plan.guidance_spec(quant, model)
    require(
        guidance is None or quant.trainer == "bf16" or guidance.spec == expected,
        "policy: guidance of a rollout batch",
        None if guidance is None else guidance.spec,
        expected,
        "roll out and train under the same quant section",
    )


def _segment_inputs(
    segment: stacks.Segment, model: cfg.Model, batch: Batch, follow: dict[str, Array] | None
) -> dict[str, stacks.Rows]:
    """What the segment's layers need: routes, records by site, and whether to follow them."""
    inputs: dict[str, stacks.Rows] = {}
    if batch.routes_LBSX is not None:
        inputs["routes"] = layer_kinds.layers_with(model, "moe"), batch.routes_LBSX
    kept = {site for plan in segment.period for site in plan.recorded}
    if kept and batch.guidance is not None:
        guidance = batch.guidance
        assert isinstance(guidance, Guidance)  # `_check_records`
        for site in guidance.spec.sites:
            if site in kept:
                rows = guidance.spec.layers_of(site), guidance.sites[site]
                inputs[f"{_RECORD}{site}"] = rows
    for site, here_L in (follow or {}).items():
        inputs[f"{_FOLLOW}{site}"] = tuple(range(model.layers)), here_L
    return inputs


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer of the trainer under its plan, with its inputs; collects its counts."""

    model: cfg.Model
    quant: cfg.Quant
    kernels: cfg.Kernels
    plan: qat_plan.LayerPlan
    valid_BS: Bool[Array, "B S"]
    inputs: dict[str, Any]  # by name, see `_segment_inputs`
    counts: dict[str, Mean] = dataclasses.field(default_factory=dict)

    def __call__(self, view, layer, x_BSD, position_BS, replay_routes: bool):
        """x after the layer."""
        if self.plan.weights is not None:
            rule = policy_recipe.matrices(self.plan.kind.ffn, self.plan.weights)
            layer = quantize_params(layer, Recipe(rules=(rule,)))
        routes_BSX = self.inputs.get("routes")
        x_BSD, kept = view(self.plan.kind, layer)(
            x_BSD,
            position_BS,
            lambda *args: (self.mix(*args), None),
            lambda *args: (self.feed(*args), None),
            routes_BSX if replay_routes else None,
        )
        if routes_BSX is not None:
            mismatch = replay.route_mismatch(kept.router_logits, routes_BSX, self.valid_BS)
            self.counts["parity/route_mismatch"] = mismatch
        return x_BSD

    def mix(self, *args):
        return self.attend(*args) if self.plan.kind.mixer == "attention" else self.linear(*args)

    def feed(self, *args):
        return self.experts(*args) if self.plan.kind.ffn == "moe" else self.mlp(*args)

    def linear(self, module, x):
        return module(x, None, self.valid_BS)[0]

    def attend(self, q, k, v):
        k, v = self.site("k", k), self.site("v", v)
        S = q.shape[1]
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((1, S, S), bool)), (q.shape[0], S, S))
        return attention.attend(q, k, v, causal)

    def mlp(self, params, x):
        w_gate_up, w_down = params.gate_up[...].astype(x.dtype), params.down[...].astype(x.dtype)
        hidden = moe.swiglu(moe.matmul(self.site("mlp_in", x), w_gate_up))
        return moe.matmul(self.site("mlp_hidden", hidden), w_down)

    def experts(self, params, x, routes, gates):
        routes = jnp.where(self.valid_BS[..., None], routes, -1)
        w_gate_up, w_down = params.gate_up[...], params.down[...]
        x = self.site("expert_in", x)
        x_MD, impl = x.reshape(-1, x.shape[-1]), self.kernels.grouped_matmul

        def gate_up(d: Dispatch) -> Array:
            return grouped_matmul(gather_rows(x_MD, d), w_gate_up.astype(x.dtype), d, impl)

        def down(h_NbF: Array, d: Dispatch) -> Array:
            h_NbF = self.hidden_site(h_NbF, d)
            return grouped_matmul(h_NbF, w_down.astype(x.dtype), d, impl)

        return moe.expert_mlp(routes, gates, self.model.experts, gate_up, down)

    def hidden_site(self, h_NbF, dispatch: Dispatch):
        """The hidden rows sit in the blocked layout, so the record (B, S, X, ...) goes there."""
        pairs = dispatch.slot_MX.size
        valid = dispatch.pair_R.reshape(h_NbF.shape[:2]) < pairs
        record = self.inputs.get(f"{_RECORD}expert_hidden")

        def to_rows(a: Array) -> Array:
            return gather_rows(a.reshape(pairs, a.shape[-1]), dispatch, per_pair=True)

        return self.site("expert_hidden", h_NbF, jax.tree.map(to_rows, record), valid)

    def site(self, name: str, x, record: SiteRecord | None = None, valid=None):
        """Quantises at one site, guided or not, and adds its counts.

        Args: record, valid: None: as they came, for values of one row a token.
        """
        format = self.plan.format_of(name)
        if format is None:
            return x
        if valid is None:
            record = self.inputs.get(f"{_RECORD}{name}")
            valid = self.valid_BS.reshape(*self.valid_BS.shape, *(1,) * (x.ndim - 3))
            valid = jnp.broadcast_to(valid, x.shape[:-1])
        if (follow := self.inputs.get(f"{_FOLLOW}{name}")) is not None:
            valid = valid & follow
        site = sites.Site(
            format=format,
            kind=self.quant.guide,
            scale_bits=self.quant.guide_scale_bits,
            global_bits=self.quant.guide_global_bits,
            impl=self.kernels.fake_quant,
        )
        guided = self.quant.trainer == "trace"
        with jax.named_scope(f"quantize[{name}]"):
            y, stats = sites.quantize_site(x, record, valid, site, guided=guided)
        self._count(name, stats, compared=record is not None)
        return y

    def _count(self, name: str, stats: sites.SiteStats, *, compared: bool) -> None:
        found: dict[str, Any] = {
            f"{CODED}{name}": stats.coded,
            f"quant/nonfinite_blocks/{name}": stats.nonfinite,
        }
        if compared:
            agreement = "agreement" if self.quant.guide == "codes" else "bit_agreement"
            found[f"guide/{agreement}/{name}"] = stats.agreement
            found[f"quant/code_flip_rate/{name}"] = stats.flips
            found[f"guide/scale_equal/{name}"] = stats.scale_equal
            found[f"guide/undecoded/{name}"] = stats.undecoded
            for kind in ("zero_scales", "nan_scales", "saturated_blocks"):
                found[f"quant/{kind}/{name}"] = getattr(stats, kind)
        self.counts.update(found)
