"""Trajectories -> training batches: collect, group, pad, shuffle over minibatches, micro-batch.

An engine or a server only has to produce `Trajectory` records; everything a training step needs is
made here, in numpy, and handed over through Grain, which prepares the next micro-batch while the
current one is computed.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np

from trace_jax.checks import message, require
from trace_jax.guidance.record import Guidance, StoredGuidance, Ticket, crc_of_tokens, stack
from trace_jax.types import Batch, Scored, Trajectory

PAD_ROUTE = -1  # no expert: a padding token is routed nowhere

# Fields of Batch whose sequence axis is not the first.
_SECOND_AXIS = ("routes_LBSX", "guidance")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """The trajectories of a step that have a reward, group by group."""

    scored: tuple[Scored, ...]  # ordered by group, then sample
    group_B: np.ndarray  # int32, 0..groups-1, of each trajectory
    reward_B: np.ndarray  # float32
    failed: int  # trajectories left out because their verifier failed
    failures: dict[str, int]  # the same by reason


def collect(scored: Sequence[Scored]) -> Collected:
    """Groups a step's trajectories by prompt and leaves out, and counts, those without a reward.

    The trajectories may come in any order. A prompt that was asked twice in a step makes two
    groups: sample ids repeat, and the n-th trajectory of one (prompt, sample) joins the n-th group.
    """
    seen: collections.Counter[tuple[str, int]] = collections.Counter()
    groups: dict[tuple[str, int], list[Scored]] = {}
    for item in scored:
        sample = (item.trajectory.prompt.uid, item.trajectory.sample)
        groups.setdefault((sample[0], seen[sample]), []).append(item)
        seen[sample] += 1
    kept: list[Scored] = []
    group_ids: list[int] = []
    for members in groups.values():
        alive = sorted((m for m in members if m.reward is not None), key=_sample_id)
        if alive:
            group_ids.extend([group_ids[-1] + 1 if group_ids else 0] * len(alive))
            kept.extend(alive)
    failures = collections.Counter(s.failure or "unknown" for s in scored if s.reward is None)
    return Collected(
        scored=tuple(kept),
        group_B=np.array(group_ids, np.int32),
        reward_B=np.array([item.reward for item in kept], np.float32),
        failed=sum(failures.values()),
        failures=dict(failures),
    )


def collate(
    scored: Sequence[Scored],
    advantages_B: np.ndarray,
    *,
    length: int | None,
    bucket_tokens: int,
    pad_id: int,
    rows: int,
) -> Batch:
    """Right-pads trajectories into one batch of numpy arrays.

    Args:    advantages_B: one per trajectory, float.
             length: T of the batch, a multiple of `bucket_tokens`; None: the longest trajectory,
             rounded up, so that lengths between two multiples share one compilation.
             rows: B of the batch. Rows beyond the trajectories are empty: `valid` and `loss_mask`
             False, routes -1, guidance, log-probs and advantage 0.
    Returns: B=rows, S=T-1; routes int32 with PAD_ROUTE, log-probs on the index of the token that
             predicts, i.e. response token r of a prompt of n tokens stands at s = n-1+r.
    Raises:  ValueError if there is nothing to collate, if a trajectory's records do not fit its
             tokens (naming it), or if some have routes or guidance of another make than others.
    """
    fix = "every verifier failed: see the reasons counted by batching.collect"
    require(len(scored) > 0, "batching.collate", "no trajectory", "at least one", fix)
    trajectories = [item.trajectory for item in scored]
    for trajectory in trajectories:
        check_trajectory(trajectory)
    T = _padded_length(trajectories, length, bucket_tokens)
    need = f">= the {len(scored)} trajectories"
    require(rows >= len(scored), "batching.collate: rows", rows, need)
    shape = np.shape(advantages_B)
    require(shape == (len(scored),), "batching.collate: advantages", shape, f"({len(scored)},)")
    tokens_BT = np.full((rows, T), pad_id, np.int32)
    valid_BT = np.zeros((rows, T), bool)
    loss_mask_BS = np.zeros((rows, T - 1), bool)
    sampler_logprobs_BS = np.zeros((rows, T - 1), np.float32)
    padded_advantages_B = np.zeros(rows, np.float32)
    padded_advantages_B[: len(scored)] = advantages_B
    for row, t in enumerate(trajectories):
        end = len(t.tokens_T)
        tokens_BT[row, :end] = t.tokens_T
        valid_BT[row, :end] = True
        loss_mask_BS[row, t.prompt_length - 1 : end - 1] = True
        sampler_logprobs_BS[row, t.prompt_length - 1 : end - 1] = t.sampler_logprobs_R
    return Batch(
        tokens_BT=tokens_BT,
        valid_BT=valid_BT,
        loss_mask_BS=loss_mask_BS,
        sampler_logprobs_BS=sampler_logprobs_BS,
        advantages_B=padded_advantages_B,
        routes_LBSX=_stack_routes(trajectories, rows, T - 1),
        guidance=_gather_guidance(trajectories, rows, T - 1),
    )


def check_trajectory(trajectory: Trajectory) -> None:
    """Refuses a trajectory whose records do not fit its tokens; a shift would train silently.

    Raises: ValueError naming prompt, sample and record.
    """
    name = f"trajectory {trajectory.prompt.uid}#{trajectory.sample}"
    length, prompt_length = len(trajectory.tokens_T), trajectory.prompt_length
    need = "1 <= prompt_length < tokens"
    got = f"prompt_length {prompt_length} of {length} tokens"
    require(1 <= prompt_length < length, name, got, need)
    tokens = trajectory.tokens_T[:prompt_length]
    same = tuple(int(t) for t in tokens) == trajectory.prompt.tokens
    require(same, name, "tokens that do not start with the prompt's", "the prompt, then the answer")
    lengths = {"sampler_logprobs_R": (len(trajectory.sampler_logprobs_R), length - prompt_length)}
    lengths["routes_SLX"] = (len(trajectory.routes_SLX), length - 1)
    guidance = trajectory.guidance
    if isinstance(guidance, Ticket):
        lengths["guidance"] = (guidance.tokens, length - 1)
        _check_ticket(trajectory, guidance, name)
    elif guidance is not None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(guidance.sites):
            layers = len(guidance.spec.layers_of(path[0].key))
            field = f"guidance.sites{jax.tree_util.keystr(path)}"
            lengths[field] = (np.shape(leaf)[1], length - 1)
            got = f"{np.shape(leaf)[0]} layers"
            require(np.shape(leaf)[0] == layers, f"{name}: {field}", got, f"{layers} of its spec")
    for field, (got_length, needed) in lengths.items():
        fix = f"{length} tokens, {prompt_length} of them prompt; the last is never processed"
        require(got_length == needed, f"{name}: {field}", f"length {got_length}", needed, fix)


def _check_ticket(trajectory: Trajectory, ticket: Ticket, name: str) -> None:
    """The stored record was made with these very tokens, by these weights."""
    got = (ticket.version, ticket.prompt_length, ticket.tokens_crc)
    tokens_crc = crc_of_tokens(trajectory.tokens_T)
    need = (trajectory.version, trajectory.prompt_length, tokens_crc)
    where, fix = f"{name}: guidance (version, prompt, tokens)", "keep the ticket of this trajectory"
    require(got == need or ticket.tokens + 1 != len(trajectory.tokens_T), where, got, need, fix)


def _padded_length(
    trajectories: Sequence[Trajectory], length: int | None, bucket_tokens: int
) -> int:
    longest = max(len(t.tokens_T) for t in trajectories)
    if length is None:
        return -(-longest // bucket_tokens) * bucket_tokens
    need = f"a multiple of {bucket_tokens} and >= {longest}, the longest trajectory"
    fits = length >= longest and length % bucket_tokens == 0
    require(fits, "batching.collate: length", length, need)
    return length


def _stack_routes(trajectories: Sequence[Trajectory], rows: int, S: int) -> np.ndarray:
    per_token = {np.shape(t.routes_SLX)[1:] for t in trajectories}
    need = "the same layers and experts per token in every trajectory"
    require(len(per_token) == 1, "batching.collate: routes", per_token, need)
    L, X = per_token.pop()
    routes_LBSX = np.full((L, rows, S, X), PAD_ROUTE, np.int32)
    for row, t in enumerate(trajectories):
        routes_LBSX[:, row, : len(t.routes_SLX)] = np.swapaxes(t.routes_SLX, 0, 1)
    return routes_LBSX


def _gather_guidance(
    trajectories: Sequence[Trajectory], rows: int, S: int
) -> Guidance | StoredGuidance | None:
    """Guidance of all trajectories, stacked, or their tickets; its meaning stays closed here."""
    records = [t.guidance for t in trajectories]
    kinds = {type(record) for record in records}
    names = sorted(kind.__name__ for kind in kinds)
    need = "the same sites and spec (or none) in every trajectory"
    require(len(kinds) == 1, "batch guidance", names, need)
    tickets = [record for record in records if isinstance(record, Ticket)]
    if not tickets:
        arrays = [record for record in records if isinstance(record, Guidance)]
        return stack(arrays, rows, S) if arrays else None
    specs = {ticket.spec for ticket in tickets}
    require(len(specs) == 1, "batch guidance", specs, need)
    padding = (None,) * (rows - len(tickets))
    return StoredGuidance(tickets=(*tickets, *padding), like=tickets[0])


def rows_for(count: int, multiple: int) -> int:
    """The number of rows for `count` trajectories: the next multiple of `multiple`."""
    return -(-max(count, 1) // multiple) * multiple


def minibatches(batch: Batch, *, count: int, seed: int) -> Iterator[Batch]:
    """Deals the rows of `batch` into `count` minibatches of equal size, in a random order.

    The order depends on `seed` and the number of real rows only. Real rows are dealt like cards
    and padding fills up, so that minibatches differ by at most one real row. One minibatch is the
    batch as it is: its gradient is a sum, so an order would mean nothing.
    Raises: ValueError if `count` does not divide the rows.
    """
    rows = len(batch.tokens_BT)
    divides = count >= 1 and rows % count == 0
    require(divides, "batching.minibatches: count", count, f"a divisor of the {rows} rows")
    if count == 1:
        return iter((batch,))
    real_B = np.asarray(batch.valid_BT).any(axis=1)
    order = [int(row) for row in np.flatnonzero(real_B)]
    if order:
        order = list(grain.MapDataset.source(order).seed(seed).shuffle())
    order += [int(row) for row in np.flatnonzero(~real_B)]
    parts = [np.array(order[part::count], np.int32) for part in range(count)]
    return _prefetched(parts, lambda part: take_rows(batch, part))


def micro_batches(batch: Batch, size: int) -> Iterator[Batch]:
    """The rows of `batch` in order, `size` at a time; the next is cut while one is computed.

    Guidance that waits in a store is brought, verified, for just these rows, in that other thread.
    Raises: ValueError if `size` does not divide the rows: pad with `rows_for` in `collate`.
    """
    rows = len(batch.tokens_BT)
    divides = size >= 1 and rows % size == 0
    require(divides, "batching.micro_batches: size", size, f"a divisor of the {rows} rows")
    parts = [slice(start, start + size) for start in range(0, rows, size)]
    return _prefetched(parts, lambda part: with_guidance(take_rows(batch, part)))


def _prefetched(
    parts: Sequence[slice | np.ndarray], take: Callable[[slice | np.ndarray], Batch]
) -> Iterator[Batch]:
    """`take` of each of the parts, one part ahead in a thread of Grain."""
    dataset = grain.MapDataset.source(parts).map(take)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    iterator = iter(dataset.to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()  # ends the thread, also when the caller stops early


def take_rows(batch: Batch, part: slice | np.ndarray) -> Batch:
    """Some rows of a batch, every field alike; the rows are the second axis of routes and guidance.

    Guidance that waits in a store stays there: see `with_guidance`.
    Raises: ValueError if a field does not have the batch's rows on that axis.
    """
    rows = len(batch.tokens_BT)

    def take(leaf: Any, axis: int, name: str) -> Any:
        got = np.shape(leaf)
        if axis >= len(got) or got[axis] != rows:
            raise ValueError(message(f"Batch.{name}", got, f"{rows} rows on axis {axis}"))
        return leaf[part] if axis == 0 else leaf[:, part]

    fields = {}
    for field in dataclasses.fields(batch):
        axis = 1 if field.name in _SECOND_AXIS else 0
        value = getattr(batch, field.name)
        if isinstance(value, StoredGuidance):
            got, need = f"{len(value.tickets)} tickets", f"{rows}, one a row"
            require(len(value.tickets) == rows, "Batch.guidance", got, need)
            fields[field.name] = value.take(part)
            continue
        fields[field.name] = jax.tree.map(lambda x, a=axis, n=field.name: take(x, a, n), value)
    return Batch(**fields)


def with_guidance(batch: Batch) -> Batch:
    """The batch with its records as arrays, brought from the store if they wait there.

    Raises: GuidanceError if a record is damaged or does not belong to its row.
    """
    stored = batch.guidance
    if not isinstance(stored, StoredGuidance):
        return batch
    loaded = stored.load(np.asarray(batch.tokens_BT), np.asarray(batch.valid_BT))
    return dataclasses.replace(batch, guidance=loaded)


def _sample_id(item: Scored) -> int:
    return item.trajectory.sample
