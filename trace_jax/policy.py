"""The trainer's policy: parameters and a batch to log-probs. The only place QAT meets the model.

    layer l:  K, V       -> quantised after RoPE, guided where the rollout recorded this layer
              expert in  -> quantised once per token, guided likewise
              expert w   -> quantised from the BF16 cast of the master weight, as in the sampler
              hidden     -> quantised per row (the input of the second expert matmul)

Log-probabilities are those of softmax(logits / temperature) over the full vocabulary in float32:
the same definition as the sampler's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.formats import Format
from trace_jax.guidance.record import Guidance, SiteRecord, StoredGuidance
from trace_jax.models import attention, moe, transformer
from trace_jax.models.grouped_matmul import Dispatch, gather_rows, grouped_matmul
from trace_jax.qat import plan as qat_plan
from trace_jax.qat import policy_recipe, sites
from trace_jax.qat.recipe import Recipe
from trace_jax.qat.transform import quantize_params
from trace_jax.rl import replay
from trace_jax.types import Batch, Mean, Params

CODED = "quant/coded/"  # share of values with a code other than zero: by site, and by audited path
LogProbs = Callable[..., tuple[Array, dict[str, Mean]]]


def make_log_probs(
    model: cfg.Model, quant: cfg.Quant, *, temperature: float, replay_routes: bool = True
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
    segments = qat_plan.side_segments(quant, model.layers, quant.trainer)
    view = transformer.make_layer_view(model)
    dtype = jnp.dtype(model.compute_dtype)

    def log_probs(
        params: Params, batch: Batch, follow: dict[str, Bool[Array, " L"]] | None = None
    ) -> tuple[Array, dict[str, Mean]]:
        _check_records(batch, model, quant)
        tokens_BS, valid_BS = batch.tokens_BT[:, :-1], batch.valid_BT[:, 1:]
        position_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        x_BSD = transformer.embed_tokens(params, tokens_BS, dtype)
        counts: dict[str, Mean] = {}
        for segment in segments:
            layer = _Layer(model, quant, segment.plan, valid_BS, position_BS)
            xs = _segment_inputs(segment, params, batch, follow)
            body = layer.body(view, replay_routes)
            with jax.named_scope(f"layers[{segment.start}:{segment.stop}]"):
                x_BSD, stacked = jax.lax.scan(body, x_BSD, xs)
            _add_up(counts, stacked, segment)
        logits = transformer.head_logits(params, x_BSD, model.norm_eps)
        return token_logprobs(logits, batch.tokens_BT[:, 1:], temperature), counts

    return log_probs


def _add_up(counts: dict[str, Mean], stacked: Any, segment: qat_plan.Segment) -> None:
    """Counts of a segment's layers, summed; those of codes also layer by layer, for the audit."""
    for name, (total_L, count_L) in stacked.items():
        if name.startswith(CODED):
            site = name.removeprefix(CODED)
            for i in range(segment.stop - segment.start):
                path = policy_recipe.site_path(site, segment.start + i)
                counts[f"{CODED}{path}"] = Mean(total=total_L[i], count=count_L[i])
        of_segment = Mean(total=jnp.sum(total_L), count=jnp.sum(count_L))
        counts[name] = counts[name] + of_segment if name in counts else of_segment


def token_logprobs(
    logits_BSV: Float[Array, "B S V"], tokens_BS: Int[Array, "B S"], temperature: float
) -> Float[Array, "B S"]:
    """log softmax(logits / temperature) at the given tokens, nats."""
    scaled = logits_BSV / jnp.float32(temperature)
    chosen = jnp.take_along_axis(scaled, tokens_BS[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def _check_records(batch: Batch, model: cfg.Model, quant: cfg.Quant) -> None:
    """Routes are of this model's layers, and guidance is what a rollout under `quant` records."""
    routes, guidance = batch.routes_LBSX, batch.guidance
    layers = model.layers if routes is None else len(routes)
    require(layers == model.layers, "policy: layers of the routes", layers, model.layers)
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
    expected = qat_plan.guidance_spec(quant, model.layers)
    require(
        guidance is None or quant.trainer == "bf16" or guidance.spec == expected,
        "policy: guidance of a rollout batch",
        None if guidance is None else guidance.spec,
        expected,
        "roll out and train under the same quant section",
    )


def _segment_inputs(
    segment: qat_plan.Segment, params: Params, batch: Batch, follow: dict[str, Array] | None
) -> tuple[Any, Any, Any]:
    """Of the segment's layers: parameters, routes, and (records, whether to follow) by site."""
    rows = slice(segment.start, segment.stop)
    layers = jax.tree.map(lambda a: a[rows], params["layers"])
    routes = None if batch.routes_LBSX is None else batch.routes_LBSX[rows]
    records = None
    if segment.plan.recorded and batch.guidance is not None:
        guidance = batch.guidance
        assert isinstance(guidance, Guidance)  # `_check_records`
        records = {}
        for site in segment.plan.recorded:
            first = guidance.spec.layers_of(site).index(segment.start)
            kept = slice(first, first + segment.stop - segment.start)
            records[site] = jax.tree.map(lambda a, kept=kept: a[kept], guidance.sites[site])
    return layers, routes, (records, jax.tree.map(lambda a: a[rows], follow))


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer of the trainer under one plan, ready to be scanned."""

    model: cfg.Model
    quant: cfg.Quant
    plan: qat_plan.LayerPlan
    valid_BS: Bool[Array, "B S"]
    position_BS: Int[Array, "B S"]
    follow: dict[str, Bool[Array, ""]] | None = None  # None: wherever there is a record

    def body(self, view, replay_routes: bool):
        def scan_body(x_BSD, xs):
            layer, routes_BSX, (records, follow) = xs
            if self.plan.weights is not None:
                rule = policy_recipe.expert_weights(self.plan.weights)
                layer = quantize_params(layer, Recipe(rules=(rule,)))
            counts: dict[str, Mean] = {}
            run = dataclasses.replace(self, follow=follow)
            used = routes_BSX if replay_routes else None
            x_BSD, (logits, _, _, _) = view(layer)(
                x_BSD,
                self.position_BS,
                lambda q, k, v: (run.attend(q, k, v, records, counts), None),
                lambda m, x, r, g: (run.experts(m, x, r, g, records, counts), None),
                used,
            )
            if routes_BSX is not None:
                mismatch = replay.route_mismatch(logits, routes_BSX, self.valid_BS)
                counts["parity/route_mismatch"] = mismatch
            # scan stacks what it hands back over layers, and a `Mean` holds scalars
            return x_BSD, {name: (mean.total, mean.count) for name, mean in counts.items()}

        return scan_body

    def attend(self, q, k, v, records, counts):
        if self.plan.kv is not None:
            k = self.site("k", k, records, counts, self.plan.kv)
            v = self.site("v", v, records, counts, self.plan.kv)
        S = q.shape[1]
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((1, S, S), bool)), (q.shape[0], S, S))
        return attention.attend(q, k, v, causal)

    def experts(self, params, x, routes, gates, records, counts):
        routes = jnp.where(self.valid_BS[..., None], routes, -1)
        w_gate_up, w_down = params.gate_up[...], params.down[...]
        if self.plan.acts is not None:
            x = self.site("expert_in", x, records, counts, self.plan.acts)
        x_MD = x.reshape(-1, x.shape[-1])

        def gate_up(d: Dispatch) -> Array:
            return grouped_matmul(gather_rows(x_MD, d), w_gate_up.astype(x.dtype), d)

        def down(h_NbF: Array, d: Dispatch) -> Array:
            if self.plan.acts is not None:
                h_NbF = self.hidden_site(h_NbF, d, records, counts, self.plan.acts)
            return grouped_matmul(h_NbF, w_down.astype(x.dtype), d)

        return moe.expert_mlp(routes, gates, self.model.experts, gate_up, down)

    def hidden_site(self, h_NbF, dispatch: Dispatch, records, counts, format: Format):
        """The hidden rows sit in the blocked layout, so the record (B, S, X, ...) goes there."""
        rows, pairs = records, dispatch.slot_MX.size
        valid = dispatch.pair_R.reshape(h_NbF.shape[:2]) < pairs
        if records is not None and "expert_hidden" in records:

            def to_rows(a: Array) -> Array:
                return gather_rows(a.reshape(pairs, a.shape[-1]), dispatch, per_pair=True)

            rows = {"expert_hidden": jax.tree.map(to_rows, records["expert_hidden"])}
        return self.site("expert_hidden", h_NbF, rows, counts, format, valid)

    def site(self, name: str, x, records, counts, format: Format, valid=None):
        """Quantises at one site, guided or not, and adds its counts."""
        record: SiteRecord | None = None if records is None else records.get(name)
        if valid is None:
            valid = self.valid_BS.reshape(*self.valid_BS.shape, *(1,) * (x.ndim - 3))
            valid = jnp.broadcast_to(valid, x.shape[:-1])
        if self.follow is not None:
            valid = valid & self.follow[name]
        site = sites.Site(
            format=format,
            kind=self.quant.guide,
            scale_bits=self.quant.guide_scale_bits,
            global_bits=self.quant.guide_global_bits,
        )
        guided = self.quant.trainer == "trace"
        with jax.named_scope(f"quantize[{name}]"):
            y, stats = sites.quantize_site(x, record, valid, site, guided=guided)
        counts[f"{CODED}{name}"] = stats.coded
        counts[f"quant/nonfinite_blocks/{name}"] = stats.nonfinite
        if record is not None:
            compared = "agreement" if self.quant.guide == "codes" else "bit_agreement"
            counts[f"guide/{compared}/{name}"] = stats.agreement
            counts[f"quant/code_flip_rate/{name}"] = stats.flips
            counts[f"guide/scale_equal/{name}"] = stats.scale_equal
            counts[f"guide/undecoded/{name}"] = stats.undecoded
            for kind in ("zero_scales", "nan_scales", "saturated_blocks"):
                counts[f"quant/{kind}/{name}"] = getattr(stats, kind)
        return y
