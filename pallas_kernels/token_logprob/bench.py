"""Costs, inputs and baselines of the named cases."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.bench import Arrays, Bench
from pallas_kernels.common.cost import Cost
from pallas_kernels.token_logprob import op, ref
from pallas_kernels.token_logprob.cases import CASES, Case


def make(case: Case, seed: int) -> Arrays:
    """(hidden, head, tokens[, cotangent of the log-probs]); logits are spread by 3."""
    k_hidden, k_head, k_tokens, k_cotangent = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(k_hidden, (case.M, case.D), jnp.float32)
    head = jax.random.normal(k_head, (case.V, case.D), jnp.float32) * jnp.float32(3 * case.D**-0.5)
    tokens = jax.random.randint(k_tokens, (case.M,), 0, case.V, jnp.int32)
    arguments = (hidden.astype(case.dtype), head.astype(case.head_dtype), tokens)
    if not case.gradient:
        return arguments
    return (*arguments, jax.random.normal(k_cotangent, (case.M,), jnp.float32))


def run(case: Case, impl: str) -> Any:
    """The op as a function of the arguments."""

    def logprobs(hidden: Any, head: Any, tokens: Any) -> Any:
        got = op.token_logprobs(
            hidden, head, tokens, impl=impl, temperature=case.temperature, top_k=case.top_k
        )
        return got.logprob_M, got.entropy_M, got.top_logprobs_Mk, got.top_ids_Mk

    return _pulled(logprobs) if case.gradient else logprobs


def reference(case: Case) -> Any:
    """The specification as a function of the arguments."""
    forward = functools.partial(ref.token_logprobs, temperature=case.temperature, top_k=case.top_k)
    return _pulled(forward) if case.gradient else forward


def baseline(case: Case) -> Any:
    """All logits in memory: a BF16 product with float32 sums, then log softmax."""

    def logprobs(hidden: Any, head: Any, tokens: Any) -> Any:
        contracted = (((1,), (1,)), ((), ()))
        head = head.astype(hidden.dtype)
        z = jax.lax.dot_general(hidden, head, contracted, preferred_element_type=jnp.float32)
        logp = jax.nn.log_softmax(z / jnp.float32(case.temperature), axis=-1)
        chosen = jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        best = jax.lax.top_k(jax.lax.stop_gradient(logp), case.top_k) if case.top_k else (None,) * 2
        return chosen, entropy, *best

    return _pulled(logprobs) if case.gradient else logprobs


def _pulled(forward: Any) -> Any:
    """Log-probs, entropy, and the gradients to hidden states and head through the log-probs."""

    def both(hidden: Any, head: Any, tokens: Any, cotangent: Any) -> Any:
        def of(hidden: Any, head: Any) -> tuple[Any, Any]:
            return forward(hidden, head, tokens)[:2]

        logprob, pull, entropy = jax.vjp(of, hidden, head, has_aux=True)
        return logprob, entropy, *pull(cotangent)

    return both


def cost(case: Case) -> Cost:
    """Without a gradient one product, else three: logits that are not kept are computed twice."""
    operands = case.M * case.D * jnp.dtype(case.dtype).itemsize
    operands += case.V * case.D * jnp.dtype(case.head_dtype).itemsize
    results = 8 * case.M + 8 * case.M * case.top_k
    products = 2 * case.M * case.V * case.D
    read, kind = operands + 4 * case.M, "f32" if case.dtype == "float32" else "bf16"
    if not case.gradient:
        return Cost(read, results, products, kind)
    return Cost(read + 4 * case.M, results + operands, 3 * products, kind)


def _tolerance(case: Case) -> float:
    if not case.gradient:
        return 1e-4  # order of sums over a width of up to 2048
    # gradients are rounded to BF16 at the end, the kernel's also logit by logit; rows of the given
    # tokens are up to 20 times the rms, since most rows of the head are hardly moved
    return 1e-4 if case.dtype == "float32" else 0.15


def _impls(case: Case) -> tuple[str, ...]:
    kernels = case.dtype == "bfloat16" and not case.top_k
    return ("xla", "triton", "mosaic_tpu") if kernels else ("xla",)


BENCHES: tuple[Bench, ...] = tuple(
    Bench(
        op="token_logprob",
        case=case.name,
        impls=_impls(case),
        cost=cost(case),
        make=functools.partial(make, case),
        run=functools.partial(run, case),
        reference=reference(case),
        tolerance=_tolerance(case),
        baseline=None if case.small else baseline(case),
        baseline_name="" if case.small else "all logits in memory, XLA",
        small=case.small,
    )
    for case in CASES
)
