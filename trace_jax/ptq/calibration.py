"""The diagonal Hessian of every matrix that can be quantised: mean x^2 of each input channel.

A matrix W errs by (w - w^) x on an input x, so its expected squared error, without the terms that
mix channels, is sum_k h_k (w_k - w^_k)^2 with h_k = E[x_k^2]. Inputs are those of the unquantised
model: gate_up sees the layer's normalised input, down what SwiGLU makes of it; those of an expert
are over the tokens routed to it, padding is left out.

Sums over the tokens of one batch are float32 on the device; batches are added in float64 on the
host, so that a long calibration loses no digits.
Source: H-Scale, arXiv 2608.28113, for the use of h; it does not say how it treats experts.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.models import forward
from trace_jax.models.grouped_matmul import Dispatch
from trace_jax.types import Params

Batches = Iterable[tuple[Any, Any]]  # (tokens_BT ids, valid_BT, False is padding)
HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hessian:
    """Sums of squared inputs, stacked like the parameters; float64 numpy.

    `sums["mlp"]["down"]` is (Ld, F), `sums["moe"]["gate_up"]` (Lm, E, D); `tokens["mlp"]` is (Ld,),
    `tokens["moe"]` (Lm, E): how many tokens each sum is of.
    """

    sums: dict[str, dict[str, np.ndarray]]
    tokens: dict[str, np.ndarray]

    @property
    def unseen_experts(self) -> int:
        """Experts that no calibration token was routed to."""
        return int(np.sum(self.tokens.get("moe", np.ones(1)) == 0))

    def diagonal(self, component: str, name: str) -> np.ndarray:
        """h of the matrices `params["layers"][component][name]`, float32 (..., K).

        An expert without tokens gets the mean over all tokens of its layer's other experts.
        """
        sums, tokens = self.sums[component][name], self.tokens[component][..., None]
        mean = sums / np.maximum(tokens, 1)
        if component == "moe":
            layer = sums.sum(axis=1, keepdims=True) / tokens.sum(axis=1, keepdims=True)
            mean = np.where(tokens == 0, layer, mean)
        return mean.astype(np.float32)


def calibrate(model: cfg.Model, params: Params, batches: Batches) -> Hessian:
    """Runs the unquantised model over batches of tokens; one batch is in memory at a time.

    Args:   batches: (tokens_BT, valid_BT) of any shapes; each new shape compiles.
    Raises: ValueError if there was no valid token, or an activation was NaN or Inf.
    """
    total: dict[str, Any] = {}
    for tokens_BT, valid_BT in batches:
        sums = batch_sums(model, params, jnp.asarray(tokens_BT), jnp.asarray(valid_BT))
        sums = jax.tree.map(lambda a: np.asarray(a, np.float64), jax.device_get(sums))
        total = jax.tree.map(np.add, total, sums) if total else sums
    seen = max((float(np.max(leaf["tokens"])) for leaf in total.values()), default=0.0)
    require(seen > 0, "ptq: calibration", "no valid token", "batches of tokens")
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(total))
    require(finite, "ptq: calibration", "NaN or Inf activations", "finite ones")
    tokens = {component: leaves.pop("tokens") for component, leaves in total.items()}
    return Hessian(sums=total, tokens=tokens)


@partial(jax.jit, static_argnames=("model",))
def batch_sums(
    model: cfg.Model, params: Params, tokens_BT: Int[Array, "B T"], valid_BT: Bool[Array, "B T"]
) -> dict[str, dict[str, Array]]:
    """Of one batch, by component: sums of squared inputs of each matrix, and tokens; float32."""

    def feed(module: Any, x_BTD: Array, routes: Any, gates: Any, _: Any) -> Any:
        if routes is None:
            y, out = _mlp(module, x_BTD, valid_BT)
            return y, {"mlp": out}
        y, out = _experts(model, module, x_BTD, routes, gates)
        return y, {"moe": out}

    _, rows = forward.observe(model, params, tokens_BT, valid_BT, feed)
    return {component: leaves for component, (_, leaves) in rows.items()}


def _squares(x: Array) -> Array:
    return jnp.square(x.astype(jnp.float32))


def _mlp(module: Any, x_BTD: Array, valid_BT: Array) -> tuple[Array, dict[str, Array]]:
    y_BTD, hidden = forward.plain_mlp(module, x_BTD)
    valid = valid_BT[..., None]
    return y_BTD, {
        "gate_up": jnp.sum(_squares(x_BTD), axis=(0, 1), where=valid),
        "down": jnp.sum(_squares(hidden), axis=(0, 1), where=valid),
        "tokens": jnp.sum(valid_BT, dtype=jnp.float32),
    }


def _experts(
    model: cfg.Model, module: Any, x_BTD: Array, routes_BTX: Array, gates_BTX: Array
) -> tuple[Array, dict[str, Array]]:
    E, x_MD = model.experts, x_BTD.reshape(-1, x_BTD.shape[-1])
    routed_ME = jnp.sum(jax.nn.one_hot(routes_BTX.reshape(len(x_MD), -1), E), axis=1)
    out = {
        "gate_up": jnp.matmul(routed_ME.T, _squares(x_MD), precision=HIGHEST),
        "tokens": jnp.sum(routed_ME, axis=0),
    }

    def look(h_NbF: Array, d: Dispatch) -> None:
        # empty rows of the layout are zero, and so is what SwiGLU makes of them
        per_block = jnp.sum(_squares(h_NbF), axis=1)
        out["down"] = jnp.zeros((E, h_NbF.shape[-1])).at[d.expert_N].add(per_block)

    return forward.plain_experts(model, module, x_BTD, routes_BTX, gates_BTX, look), out
