"""How much a model loses when its weights are quantised after training, by several recipes.

Only weights are quantised here: activations and KV cache stay in the compute dtype, so that the
numbers tell the recipes apart. The reference is the same model unquantised.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from trace_jax import config as cfg
from trace_jax import layer_kinds
from trace_jax.checks import require
from trace_jax.models import forward
from trace_jax.ptq.calibration import Batches, Hessian
from trace_jax.ptq.quantise import dequantised, quantise, weight_errors
from trace_jax.types import Params

FOUR_OVER_SIX = "nvfp4:scale_rule=mse"
# name -> (format, what weighs errors in a search of scales: the Hessian, all alike, or no search)
RECIPES: dict[str, tuple[str, str | None]] = {
    "nvfp4": ("nvfp4", None),
    "4over6": (FOUR_OVER_SIX, None),
    "nvfp4+search": ("nvfp4", "ones"),
    "4over6+search": (FOUR_OVER_SIX, "ones"),
    "nvfp4+hscale": ("nvfp4", "hessian"),
    "4over6+hscale": (FOUR_OVER_SIX, "hessian"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What one recipe costs."""

    weight_error: float  # relative, of all expert and MLP matrices
    weighted_error: float  # the same with squared errors weighted by the Hessian's diagonal
    output_error: tuple[float, ...]  # relative, of each layer's MLP or experts on its true input
    kl: float  # nats a token, from the reference's distribution to this one
    perplexity: float

    @property
    def mean_output_error(self) -> float:
        """Over layers."""
        return float(np.mean(self.output_error))


def compare(
    model: cfg.Model,
    quant: cfg.Quant,
    params: Params,
    hessian: Hessian,
    batches: Sequence[tuple[Any, Any]],
    recipes: Mapping[str, tuple[str, str | None]] = RECIPES,
) -> dict[str, Row]:
    """A row for the reference ("reference") and for each recipe.

    Args:   quant: which layers and matrices; its format of weights is each recipe's. hessian: of
            `calibrate`, on other text than batches: (tokens_BT, valid_BT) to measure on.
    """
    alike = dataclasses.replace(
        hessian, sums=jax.tree.map(np.ones_like, hessian.sums), tokens=_ones(hessian.tokens)
    )
    weighings = {None: None, "ones": alike, "hessian": hessian}
    rows = {"reference": _row(model, params, params, hessian, batches)}
    for name, (format, weighing) in recipes.items():
        chosen = dataclasses.replace(quant, weights=format)
        weights = quantise(model, chosen, params, weighings[weighing])
        approximate = dequantised(model, chosen, params, weights)
        rows[name] = _row(model, params, approximate, hessian, batches)
    return rows


def _ones(tree: Any) -> Any:
    return jax.tree.map(np.ones_like, tree)


def _row(
    model: cfg.Model, params: Params, approximate: Params, hessian: Hessian, batches: Batches
) -> Row:
    total: dict[str, Any] = {}
    for tokens_BT, valid_BT in batches:
        found = measure(model, params, approximate, jnp.asarray(tokens_BT), jnp.asarray(valid_BT))
        found = jax.tree.map(lambda a: np.asarray(a, np.float64), jax.device_get(found))
        total = jax.tree.map(np.add, total, found) if total else found
    count = total.get("count", 0)
    require(bool(count > 0), "ptq: evaluation", "no valid pair of tokens", "batches of tokens")
    plain, weighted = weight_errors(model, params, approximate, hessian)
    return Row(
        weight_error=plain,
        weighted_error=weighted,
        output_error=tuple(np.sqrt(total["error_L"] / total["power_L"]).tolist()),
        kl=float(total["kl"] / count),
        perplexity=float(np.exp(total["nll"] / count)),
    )


@partial(jax.jit, static_argnames=("model",))
def measure(
    model: cfg.Model,
    params: Params,
    approximate: Params,
    tokens_BT: Int[Array, "B T"],
    valid_BT: Bool[Array, "B T"],
) -> dict[str, Array]:
    """Sums over one batch, float32: KL and negative log-likelihood in nats, squared outputs."""
    components = [c for c in ("moe", "mlp") if layer_kinds.layers_with(model, c)]
    inputs = {
        c: (layer_kinds.layers_with(model, c), _matrices(approximate["layers"][c]))
        for c in components
    }

    def feed(module: Any, x_BTD: Array, routes: Any, gates: Any, here: Any) -> Any:
        other = _Matrices(**here["mlp" if routes is None else "moe"])
        y_BTD = forward.plain_feed(model, module, x_BTD, routes, gates)
        approx = forward.plain_feed(model, other, x_BTD, routes, gates).astype(jnp.float32)
        valid, exact = valid_BT[..., None], y_BTD.astype(jnp.float32)
        sums = {
            "error_L": jnp.sum(jnp.square(approx - exact), where=valid),
            "power_L": jnp.sum(jnp.square(exact), where=valid),
        }
        return y_BTD, sums

    def plain(module: Any, x_BTD: Array, routes: Any, gates: Any, _: Any) -> Any:
        return forward.plain_feed(model, module, x_BTD, routes, gates), {}

    exact, rows = forward.observe(model, params, tokens_BT, valid_BT, feed, inputs)
    approx, _ = forward.observe(model, approximate, tokens_BT, valid_BT, plain)
    p, q = (jax.nn.log_softmax(logits, axis=-1)[:, :-1] for logits in (exact, approx))
    pair = valid_BT[:, :-1] & valid_BT[:, 1:]
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    nll = -jnp.take_along_axis(q, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    sums = {name: leaves for name, (_, leaves) in rows.items()}
    return sums | {
        "kl": jnp.sum(kl, where=pair),
        "nll": jnp.sum(nll, where=pair),
        "count": jnp.sum(pair, dtype=jnp.float32),
    }


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """What `forward.plain_feed` reads of a module."""

    gate_up: Array
    down: Array


def _matrices(component: dict[str, Array]) -> dict[str, Array]:
    return {name: component[name] for name in ("gate_up", "down")}


def table(rows: Mapping[str, Row]) -> str:
    """Markdown."""
    head = "| weights | weight error | weighted by h | output error | KL, nats | perplexity |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        errors = f"{row.weight_error:.4f} | {row.weighted_error:.4f} | {row.mean_output_error:.4f}"
        lines.append(f"| {name} | {errors} | {row.kl:.4f} | {row.perplexity:.3f} |")
    return "\n".join(lines)
