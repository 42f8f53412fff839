"""Partial sums of softmax over a part of the vocabulary, and how two parts become one.

For logits z of a part: largest = max z, mass = sum exp(z - largest), and
slope = sum exp(z - largest) * (z - largest). Of the whole vocabulary they give
log p = (z - largest) - log mass and entropy = log mass - slope / mass. Measuring from the largest
keeps both exact where logits are large: largest + log mass, as one number, would lose digits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Partial:
    """Of one part of the vocabulary, for each token; float32."""

    largest_M: Float[Array, " M"]
    mass_M: Float[Array, " M"]
    slope_M: Float[Array, " M"]
    chosen_M: Float[Array, " M"]  # logit of the given token, -inf where it is in another part
    top_Mk: Float[Array, "M k"] | None = None  # the largest logits, in descending order
    ids_Mk: Int[Array, "M k"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Of the whole vocabulary, for each token; float32, nats."""

    largest_M: Float[Array, " M"]  # logit
    log_mass_M: Float[Array, " M"]  # log sum exp(logit - largest)
    entropy_M: Float[Array, " M"]
    chosen_M: Float[Array, " M"]  # logit of the given token
    top_Mk: Float[Array, "M k"] | None = None
    ids_Mk: Int[Array, "M k"] | None = None

    def logp(self, z: Float[Array, "M *N"]) -> Float[Array, "M *N"]:
        """Log-probs of logits."""
        over = (slice(None), *[None] * (z.ndim - 1))
        return (z - self.largest_M[over]) - self.log_mass_M[over]


def merge(a: Partial, b: Partial) -> Partial:
    """Of two parts of the vocabulary together; for equal logits those of `a` come first."""
    largest = jnp.maximum(a.largest_M, b.largest_M)
    from_a, from_b = a.largest_M - largest, b.largest_M - largest
    scale_a, scale_b = jnp.exp(from_a), jnp.exp(from_b)
    slope_a = scale_a * (a.slope_M + a.mass_M * from_a)
    slope_b = scale_b * (b.slope_M + b.mass_M * from_b)
    top = ids = None
    if a.top_Mk is not None and a.ids_Mk is not None:
        assert b.top_Mk is not None and b.ids_Mk is not None, "parts of unlike calls"
        values = jnp.concatenate([a.top_Mk, b.top_Mk], axis=-1)
        candidates = jnp.concatenate([a.ids_Mk, b.ids_Mk], axis=-1)
        top, at = jax.lax.top_k(values, a.top_Mk.shape[-1])
        ids = jnp.take_along_axis(candidates, at, axis=-1)
    return Partial(
        largest_M=largest,
        mass_M=scale_a * a.mass_M + scale_b * b.mass_M,
        slope_M=slope_a + slope_b,
        chosen_M=jnp.maximum(a.chosen_M, b.chosen_M),
        top_Mk=top,
        ids_Mk=ids,
    )


def finish(whole: Partial) -> Stats:
    """Turns the sums over the whole vocabulary into what is asked for."""
    log_mass = jnp.log(whole.mass_M)
    return Stats(
        largest_M=whole.largest_M,
        log_mass_M=log_mass,
        entropy_M=log_mass - whole.slope_M / whole.mass_M,
        chosen_M=whole.chosen_M,
        top_Mk=whole.top_Mk,
        ids_Mk=whole.ids_Mk,
    )


def finish_splits(
    largest_NM: Float[Array, "N M"],
    mass_NM: Float[Array, "N M"],
    slope_NM: Float[Array, "N M"],
    chosen_NM: Float[Array, "N M"],
) -> Stats:
    """The same from N parts at once, as kernels write them."""
    largest_1M = jnp.max(largest_NM, axis=0, keepdims=True)
    below_NM = largest_NM - largest_1M
    scale_NM = jnp.exp(below_NM)
    whole = Partial(
        largest_M=largest_1M[0],
        mass_M=jnp.sum(scale_NM * mass_NM, axis=0),
        slope_M=jnp.sum(scale_NM * (slope_NM + mass_NM * below_NM), axis=0),
        chosen_M=jnp.max(chosen_NM, axis=0),
    )
    return finish(whole)


# What kernels start from: finite, so that it can be subtracted from itself and from any logit.
LOWEST = float(jnp.finfo(jnp.float32).min)
Running = tuple[Array, Array, Array, Array]  # largest, mass, slope, chosen: (rows, 1)


def start(rows: int) -> Running:
    """Of no logits at all, for `absorb`."""
    lowest = jnp.full((rows, 1), LOWEST, jnp.float32)
    zero = jnp.zeros((rows, 1), jnp.float32)
    return lowest, zero, zero, lowest


def absorb(so_far: Running, z: Array, valid: Array, chosen: Array) -> Running:
    """Adds a tile of logits inside a kernel: plain arithmetic on two axes.

    Args: valid: where z is a logit. chosen: where it is that of the row's given token.
    """
    largest, mass, slope, picked = so_far
    # One mask, and the chosen logits first: this order fits into a GPU's registers. What is masked
    # adds nothing unless no logit is above `LOWEST`, and then the logits themselves make NaN.
    z = jnp.where(valid, z, LOWEST)
    picked_here = jnp.max(jnp.where(chosen, z, LOWEST), axis=1, keepdims=True)
    new = jnp.maximum(largest, jnp.max(z, axis=1, keepdims=True))
    before = largest - new
    scale = jnp.exp(before)
    below = z - new
    share = jnp.exp(below)
    return (
        new,
        scale * mass + jnp.sum(share, axis=1, keepdims=True),
        scale * (slope + mass * before) + jnp.sum(share * below, axis=1, keepdims=True),
        jnp.maximum(picked, picked_here),
    )
