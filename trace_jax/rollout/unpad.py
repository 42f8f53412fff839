"""Between padded device arrays and per-sequence host records."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.guidance.record import Guidance, GuidanceSpec, SiteRecord
from trace_jax.qat import plan as qat_plan
from trace_jax.types import Prompt, Trajectory


def pad_prompts(
    prompts: Sequence[Prompt], samples: int, rollout: cfg.Rollout, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_PT, length_P), right-padded to the buckets; padding prompts have length 0.

    Raises: ValueError for an empty prompt.
    """
    for prompt in prompts:
        require(len(prompt.tokens) > 0, f"prompt {prompt.uid}: tokens", 0, "at least one token")
    longest = max(len(p.tokens) for p in prompts)
    T = -(-longest // rollout.bucket_tokens) * rollout.bucket_tokens
    per_bucket = max(1, rollout.bucket_batch // samples)
    P = -(-len(prompts) // per_bucket) * per_bucket
    tokens_PT = np.full((P, T), pad_id, np.int32)
    length_P = np.zeros(P, np.int32)
    for i, prompt in enumerate(prompts):
        tokens_PT[i, : len(prompt.tokens)] = prompt.tokens
        length_P[i] = len(prompt.tokens)
    return tokens_PT, length_P


def trajectories(
    prompts: Sequence[Prompt],
    samples: int,
    prefill: dict[str, Any],
    decoded: Any,
    spec: GuidanceSpec | None,
    segments: tuple[qat_plan.Segment, ...],
    version: int,
) -> list[Trajectory]:
    """Cuts each sequence out of the engine's (host) arrays, without padding."""
    prompt_routes = np.concatenate(prefill["routes"], axis=0)
    response_routes = np.concatenate(decoded.routes, axis=0)
    kept = [i for i, s in enumerate(segments) if s.plan.recorded]
    prompt_records = _join([prefill["records"][i] for i in kept]) if spec else {}
    response_records = _join([decoded.records[i] for i in kept]) if spec else {}
    cache = _kv_records(_join([decoded.caches[i] for i in kept]), spec) if spec else {}
    out = []
    for b in range(len(prompts) * samples):
        prompt, n = prompts[b // samples], int(decoded.length_B[b])
        length = len(prompt.tokens)

        def cut(before: np.ndarray, after: np.ndarray, b=b, n=n, length=length) -> np.ndarray:
            pieces = before[:, b // samples, :length], after[:, b, : n - 1]
            return np.concatenate(pieces, axis=1)

        response = decoded.tokens_BR[b, :n]
        routes_LSX = cut(prompt_routes, response_routes)
        guidance = None
        if spec is not None:
            sites = jax.tree.map(cut, prompt_records, response_records)
            upto = length + n - 1
            sites |= jax.tree.map(lambda a, b=b, upto=upto: a[:, b, :upto], cache)
            guidance = Guidance(sites=sites, spec=spec)
        out.append(
            Trajectory(
                prompt=prompt,
                sample=b % samples,
                tokens_T=np.concatenate([np.asarray(prompt.tokens, np.int32), response]),
                prompt_length=length,
                sampler_logprobs_R=decoded.logprobs_BR[b, :n],
                routes_SLX=routes_LSX.transpose(1, 0, 2).astype(np.int16),
                guidance=guidance,
                finish_reason="stop" if bool(decoded.done_B[b]) else "length",
                version=version,
            )
        )
    return out


def _join(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=0), *parts)


def _kv_records(cache: dict[str, Any], spec: GuidanceSpec) -> dict[str, SiteRecord]:
    """The cache holds 4-bit codes; mantissa guidance keeps one bit of each."""
    sites = {name: cache[name] for name in ("k", "v") if name in spec.sites}
    if spec.kind == "codes":
        return sites
    return {name: _mantissa(record) for name, record in sites.items()}


def _mantissa(record: SiteRecord) -> SiteRecord:
    low, high = record.bits & 1, (record.bits >> 4) & 1
    bits = np.stack([low, high], axis=-1).reshape(*record.bits.shape[:-1], -1)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return SiteRecord(bits=packed, scales=record.scales, global_scale=record.global_scale)


