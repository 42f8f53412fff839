"""Values that were rounded, with the gradient of what they were rounded from."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@jax.custom_vjp
def straight_through(x: Float[Array, "*A"], value: Float[Array, "*A"]) -> Float[Array, "*A"]:
    """`value` in the forward, bit for bit; the cotangent goes to `x` unchanged, none to `value`."""
    del x
    return value


straight_through.defvjp(
    lambda x, value: (value, jnp.zeros((0,), x.dtype)),
    lambda like, g: (g.astype(like.dtype), jnp.zeros_like(g)),
)


@jax.custom_vjp
def masked_straight_through(
    x: Float[Array, "*A"], value: Float[Array, "*A"], passes: Bool[Array, "*A"]
) -> Float[Array, "*A"]:
    """Like `straight_through`, but no gradient where `passes` is False."""
    del x, passes
    return value


masked_straight_through.defvjp(
    lambda x, value, passes: (value, (passes, jnp.zeros((0,), x.dtype))),
    lambda saved, g: (
        jnp.where(saved[0], g, 0).astype(saved[1].dtype),
        jnp.zeros_like(g),
        None,
    ),
)
