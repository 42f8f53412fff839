"""Gated DeltaNet: the linear-attention layer of Qwen3-Next and Qwen3.5.

Source: arXiv 2412.06464; the layer around it as in Qwen3-Next.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from trace_jax import config as cfg


class GatedDelta(nnx.Module):
    """Projections, causal convolution and gates; weights are (in, out), heads flat."""

    def __init__(self, model: cfg.Model, rngs: nnx.Rngs):
        D, heads, W = model.width, model.linear_value_heads, model.conv_width
        keys = model.linear_key_heads * model.linear_key_dim
        values = heads * model.linear_value_dim
        self.model = model

        def normal(shape: tuple[int, ...], fan_in: int) -> nnx.Param:
            draw = jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param(draw * jnp.float32(fan_in**-0.5))

        self.qkv = normal((D, 2 * keys + values), D)  # q of all heads, then k, then v
        self.z = normal((D, values), D)
        self.b = normal((D, heads), D)
        self.a = normal((D, heads), D)
        self.conv = normal((2 * keys + values, W), W)
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0))
        )
        self.dt_bias = nnx.Param(jnp.ones(heads))
        self.norm = nnx.Param(jnp.ones(model.linear_value_dim))
        self.out = normal((values, D), values * 2 * model.layers)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        state: dict[str, Array] | None = None,
        valid_BT: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Returns y_BTD and the state after the last valid token."""
        raise NotImplementedError


def empty_state(model: cfg.Model, sequences: int, dtype: Any) -> dict[str, Array]:
    """State before the first token: {"conv": (B, C, W-1), "memory": (B, Hv, dk, dv) float32}."""
    raise NotImplementedError
