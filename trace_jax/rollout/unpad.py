"""Between padded device arrays and per-sequence host records."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax import config as cfg
from trace_jax.checks import require
from trace_jax.guidance.record import Guidance, GuidanceSpec
from trace_jax.types import Prompt, Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """What the device returns of one call, still padded.

    Routes are one array a segment; records a dict by site for each, of what guidance keeps.
    """

    steps: Int[Array, ""] | np.ndarray  # tokens of the longest answer
    tokens_BR: Int[Array, "B R"] | np.ndarray
    logprobs_BR: Float[Array, "B R"] | np.ndarray  # nats
    length_B: Int[Array, " B"] | np.ndarray  # response tokens, the stop token included
    done_B: Bool[Array, " B"] | np.ndarray  # sampled a stop token, or padding row
    prompt_routes: tuple[Any, ...]  # (L, P, T, X), L of the segment's MoE layers
    response_routes: tuple[Any, ...]  # (L, B, R, X); row r: the processing of token r
    prompt_records: tuple[Any, ...]  # leaves (L, P, T, ...)
    response_records: tuple[Any, ...]  # leaves (L, B, R, ...)
    kv_records: tuple[Any, ...]  # leaves (L, B, C, J, ...); none if K and V are not guided


def pad_prompts(
    prompts: Sequence[Prompt], samples: int, rollout: cfg.Rollout, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_PT, length_P), right-padded to the buckets; padding prompts have length 0.

    Raises: ValueError for an empty prompt, or for none.
    """
    require(len(prompts) > 0, "rollout: prompts", 0, "at least one")
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
    sampled: Sampled,
    spec: GuidanceSpec | None,
    version: int,
) -> list[Trajectory]:
    """Cuts each sequence out of the engine's (host) arrays, without padding."""
    prompt_routes, response_routes = _join(sampled.prompt_routes), _join(sampled.response_routes)
    prompt_records = _join_sites(sampled.prompt_records)
    response_records = _join_sites(sampled.response_records)
    kv_records = _join_sites(sampled.kv_records)
    out = []
    for b in range(len(prompts) * samples):
        prompt, n = prompts[b // samples], int(sampled.length_B[b])
        length = len(prompt.tokens)

        def cut(before: np.ndarray, after: np.ndarray, b=b, n=n, length=length) -> np.ndarray:
            pieces = before[:, b // samples, :length], after[:, b, : n - 1]
            return np.concatenate(pieces, axis=1)

        response = sampled.tokens_BR[b, :n]
        routes_LSX = cut(prompt_routes, response_routes)
        guidance = None
        if spec is not None:
            sites = jax.tree.map(cut, prompt_records, response_records)
            upto = length + n - 1
            sites |= jax.tree.map(lambda a, b=b, upto=upto: a[:, b, :upto], kv_records)
            guidance = Guidance(sites=sites, spec=spec)
        out.append(
            Trajectory(
                prompt=prompt,
                sample=b % samples,
                tokens_T=np.concatenate([np.asarray(prompt.tokens, np.int32), response]),
                prompt_length=length,
                sampler_logprobs_R=np.array(sampled.logprobs_BR[b, :n]),
                routes_SLX=routes_LSX.transpose(1, 0, 2).astype(np.int16),
                guidance=guidance,
                finish_reason="stop" if bool(sampled.done_B[b]) else "length",
                versions_R=np.full(n, version, np.int32),
            )
        )
    return out


def _join(segments: Sequence[Any]) -> Any:
    """The layers of all segments one after another."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=0), *segments)


def _join_sites(segments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same for each site, of the segments that have it."""
    names = dict.fromkeys(name for segment in segments for name in segment)
    return {name: _join([s[name] for s in segments if name in s]) for name in names}
