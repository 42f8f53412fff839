"""Log-probs of given tokens from hidden states and head, without logits of all tokens at once."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from pallas_kernels.common import debug, impls
from pallas_kernels.token_logprob import partial, xla
from pallas_kernels.token_logprob.partial import Stats
from trace_jax.checks import require

_OP = "token_logprob"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of each token's distribution over the vocabulary; float32, nats."""

    logprob_M: Float[Array, " M"]  # of the given token
    entropy_M: Float[Array, " M"]
    top_logprobs_Mk: Float[Array, "M k"] | None = None  # in descending order
    top_ids_Mk: Int[Array, "M k"] | None = None


_Results = tuple[Array, Array, tuple[Array, Array] | None]  # log-probs, entropy, (largest, ids)


@dataclasses.dataclass(frozen=True)
class _Static:
    impl: str
    temperature: float
    top_k: int
    width: int  # columns of a chunk of XLA's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Saved:
    """What the backward pass needs; logits only if they are one chunk."""

    hidden_MD: Array
    head_VD: Array
    tokens_M: Array
    stats: Stats
    logits_MV: Array | None
    needs: tuple[bool, bool] = dataclasses.field(metadata={"static": True})  # hidden, head


def token_logprobs(
    hidden_MD: Float[Array, "M D"],
    head_VD: Float[Array, "V D"],
    tokens_M: Int[Array, " M"],
    *,
    impl: str,
    temperature: float = 1.0,
    top_k: int = 0,
) -> TokenLogprobs:
    """log softmax(hidden @ head.T / temperature) at the given tokens, its entropy and its best.

    Math:    z = hidden @ head.T / temperature;  logprob = z[token] - log sum exp z;
             entropy = -sum p log p with p = softmax(z).
             The head is cast to the dtype of `hidden_MD`; products are accumulated in float32; the
             rest is float32.
    Args:    hidden_MD: after the final norm. head_VD: the head, or the embedding it is tied to.
             tokens_M: 0 .. V-1; others give NaN, and an error in debug mode.
             top_k: how many of the largest log-probs to return, with ids; equal ones by id.
             impl: "xla" everywhere. Kernels take BF16 hidden states and no `top_k`.
    Returns: `TokenLogprobs`. Gradients flow to hidden states and head through log-probs and
             entropy, not through the largest. That of the head is summed over tokens in float32,
             that of the hidden states over the vocabulary in float32.
    Raises:  ValueError or TypeError naming the argument; NotImplementedError with the reason for an
             implementation that cannot do this.
    """
    _check(hidden_MD, head_VD, tokens_M, temperature, top_k)
    vocabulary = head_VD.shape[0]
    inside_M = (tokens_M >= 0) & (tokens_M < vocabulary)
    debug.check(
        jnp.all(inside_M),
        f"{_OP}: tokens_M: got {{low}} to {{high}}, need 0 to {vocabulary - 1}. "
        "Fix: mask padding after the call, and give it any token of the vocabulary",
        low=jnp.min(tokens_M, initial=0),
        high=jnp.max(tokens_M, initial=0),
    )
    why = _why_no_kernel(hidden_MD, head_VD, top_k)
    impls.choose(_OP, impl, {"xla": None, "triton": why, "mosaic_tpu": why})
    width = xla.chunk_width(hidden_MD.shape[0], vocabulary)
    static = _Static(impl, float(temperature), top_k, width)
    results: _Results = _evaluate(static, hidden_MD, head_VD, tokens_M)
    logprob_M, entropy_M, best = results
    values, ids = (None, None) if best is None else best
    return TokenLogprobs(
        logprob_M=logprob_M,
        entropy_M=entropy_M,
        top_logprobs_Mk=None if values is None else jax.lax.stop_gradient(values),
        top_ids_Mk=ids,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(static: _Static, hidden_MD: Array, head_VD: Array, tokens_M: Array) -> _Results:
    return _results(_statistics(static, hidden_MD, head_VD, tokens_M)[0])


def _evaluate_forward(static: _Static, hidden_MD, head_VD, tokens_M):
    arrays = (hidden_MD.value, head_VD.value, tokens_M.value)
    stats, logits_MV = _statistics(static, *arrays)
    saved = _Saved(
        hidden_MD=arrays[0],
        head_VD=arrays[1],
        tokens_M=arrays[2],
        stats=dataclasses.replace(stats, top_Mk=None, ids_Mk=None),
        logits_MV=logits_MV,
        needs=(hidden_MD.perturbed, head_VD.perturbed),
    )
    return _results(stats), saved


def _evaluate_backward(static: _Static, saved: _Saved, cotangents):
    d_logprob_M, d_entropy_M = (_given(cotangent) for cotangent in cotangents[:2])
    hidden_MD, head_VD = saved.hidden_MD, saved.head_VD
    by_triton = static.impl.startswith("triton")

    def of_chunk(rows_ND: Array, start: int | Array) -> Array:
        operands = (hidden_MD, rows_ND, saved.tokens_M - start, saved.stats)
        given = (d_logprob_M, d_entropy_M)
        if by_triton:
            from pallas_kernels.token_logprob import triton

            return triton.logit_gradient(
                *operands, *given, temperature=static.temperature, impl=static.impl
            )
        return xla.recomputed(
            *operands, *given, temperature=static.temperature, logits_MN=saved.logits_MV
        )

    d_hidden, d_head = xla.backward(
        hidden_MD, head_VD, of_chunk, width=static.width, needs=saved.needs
    )
    return d_hidden, d_head, None


_evaluate.defvjp(_evaluate_forward, _evaluate_backward, symbolic_zeros=True)


def _statistics(
    static: _Static, hidden_MD: Array, head_VD: Array, tokens_M: Array
) -> tuple[Stats, Array | None]:
    """And the logits, where they are small enough to be kept for the backward pass."""
    if static.impl != "xla":
        if static.impl.startswith("triton"):
            from pallas_kernels.token_logprob import triton as kernel
        else:
            from pallas_kernels.token_logprob import mosaic_tpu as kernel
        head = head_VD.astype(hidden_MD.dtype)
        return kernel.forward(
            hidden_MD, head, tokens_M, temperature=static.temperature, impl=static.impl
        ), None
    if static.width == head_VD.shape[0]:
        z_MV = xla.logits(hidden_MD, head_VD, static.temperature)
        return partial.finish(xla.summarise(z_MV, tokens_M, static.top_k)), z_MV
    return xla.forward(
        hidden_MD,
        head_VD,
        tokens_M,
        temperature=static.temperature,
        top_k=static.top_k,
        width=static.width,
    ), None


def _results(stats: Stats) -> _Results:
    best = None
    if stats.top_Mk is not None and stats.ids_Mk is not None:
        best = (stats.logp(stats.top_Mk), stats.ids_Mk.astype(jnp.int32))
    # no part of the vocabulary had the token: not a log-prob of -inf, but an error
    known_M = stats.chosen_M > partial.LOWEST
    logprob_M = jnp.where(known_M, stats.logp(stats.chosen_M), jnp.nan)
    return logprob_M, stats.entropy_M, best


def _given(cotangent) -> Array | None:
    """None where nothing depends on the result."""
    return None if isinstance(cotangent, SymbolicZero) else cotangent


def _why_no_kernel(hidden_MD: Array, head_VD: Array, top_k: int) -> str | None:
    if top_k:
        return f"top_k={top_k}: a kernel would have to sort across its tiles"
    if hidden_MD.dtype != jnp.bfloat16:
        return f"hidden states are {hidden_MD.dtype}; it multiplies bfloat16"
    if max(hidden_MD.size, head_VD.size) >= 2**31:
        return "an operand has 2**31 elements or more; it counts them in int32"
    return None


def _check(hidden_MD: Array, head_VD: Array, tokens_M: Array, temperature: float, top_k: int):
    for name, array, rank in (("hidden_MD", hidden_MD, 2), ("head_VD", head_VD, 2)):
        require(array.ndim == rank, f"{_OP}: {name}: rank", array.ndim, rank)
    got = tokens_M.dtype  # a narrower type could not hold every id
    need = "int32"
    require(got == jnp.int32, f"{_OP}: tokens_M: dtype", got, need, error=TypeError)
    (tokens, width), vocabulary = hidden_MD.shape, head_VD.shape[0]
    where = f"{_OP}: head_VD: "
    require(
        head_VD.shape[1] == width, where + "width", head_VD.shape[1], f"that of hidden, {width}"
    )
    require(min(vocabulary, width) >= 1, where + "shape", head_VD.shape, "at least one row, column")
    need = f"one for each row of hidden, {(tokens,)}"
    require(tokens_M.shape == (tokens,), f"{_OP}: tokens_M: shape", tokens_M.shape, need)
    require(tokens >= 1, f"{_OP}: hidden_MD: rows", tokens, "at least one token")
    for name, array in (("hidden_MD", hidden_MD), ("head_VD", head_VD)):
        fits = array.dtype in (jnp.float32, jnp.bfloat16)
        need = "float32 or bfloat16"
        require(fits, f"{_OP}: {name}: dtype", array.dtype, need, error=TypeError)
    fix = "take the argmax for temperature 0: its distribution has no log-probs"
    fits = 0 < temperature < math.inf
    require(fits, f"{_OP}: temperature", temperature, "a finite number above 0", fix)
    need = f"0 to the vocabulary, {vocabulary}"
    require(0 <= top_k <= vocabulary, f"{_OP}: top_k", top_k, need)
