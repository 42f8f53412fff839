"""Where guidance waits between rollout and training: host memory, and disk past a budget.

    device -> (asynchronous copy) -> one checked block of bytes a sequence -> memory, or a file
           -> rows of a micro-batch, verified and padded, in the thread that prefetches it

`put` returns a ticket at once; a thread waits for the device, packs and writes. A record lives as
long as its ticket, so whatever drops a trajectory or a batch frees it, and a file goes with its
last record. Everything is verified when it is read: checksum, run, sequence, tokens, version,
layers, sites, formats and coding. A record that is not the one asked for is an error, never
silent misguidance.
"""

import collections
import dataclasses
import pathlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from trace_jax.checks import message, require
from trace_jax.guidance import spill, wire
from trace_jax.guidance.record import Guidance, GuidanceSpec, Ticket, crc_of_tokens, stack
from trace_jax.guidance.wire import GuidanceError
from trace_jax.types import Trajectory

SEGMENT_BYTES = 256 * 2**20
PENDING = 64  # puts on their way before `put` waits

Kept = np.ndarray | spill.Place


def start_copy(tree: Any) -> None:
    """Begins to copy all device arrays of a tree to the host, without waiting."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()


class GuidanceStore:
    """Keeps the records of sequences until they are trained on. A context manager.

    Args:    folder: for what does not fit in memory (`<workdir>/guidance`); None: memory only.
             memory_bytes: budget of host memory; None: no limit.
    Raises:  ValueError for a budget without a folder; GuidanceError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: pathlib.Path | None,
        *,
        memory_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ):
        need = "a folder to spill to, or no budget"
        require(folder is not None or memory_bytes is None, "guidance store", memory_bytes, need)
        self.run = secrets.token_hex(8)
        self._budget = memory_bytes
        self._spill = folder and spill.SpillFolder(pathlib.Path(folder), self.run, segment_bytes)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guidance_store")
        self._pending: collections.deque[Future[Kept]] = collections.deque()
        self._records: dict[int, Future[Kept]] = {}
        self._dead: collections.deque[int] = collections.deque()  # serials whose ticket is gone
        self._serial = self._memory = 0
        self._closed = False
        self._counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> "GuidanceStore":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def keep(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with a ticket in place of its record; one without is left as it is."""
        guidance = trajectory.guidance
        if not isinstance(guidance, Guidance):
            return trajectory
        ticket = self.put(
            guidance,
            spec=guidance.spec,
            name=f"{trajectory.prompt.uid}#{trajectory.sample}",
            tokens_T=trajectory.tokens_T,
            prompt_length=trajectory.prompt_length,
            version=trajectory.version,
        )
        return dataclasses.replace(trajectory, guidance=ticket)

    def put(
        self,
        guidance: Guidance | Callable[[], Guidance],
        *,
        spec: GuidanceSpec,
        name: str,
        tokens_T: np.ndarray,
        prompt_length: int,
        version: int,
    ) -> Ticket:
        """Takes the record of one sequence; returns at once.

        Args:    guidance: leaves (layers, T-1, ...) on the device or host, or a function that makes
                 them, which the store's thread calls (to wait for the device there).
                 tokens_T: the whole sequence; all but the last have a record.
        Raises:  GuidanceError if an earlier record could not be kept, or the store is closed.
        """
        if isinstance(guidance, Guidance):
            start_copy(guidance)
        self._sweep()
        start = time.perf_counter()
        while (oldest := self._oldest(PENDING)) is not None:
            oldest.result()
        self._count(wait_s=time.perf_counter() - start)
        with self._lock:
            self._serial += 1
            serial = self._serial
        ticket = Ticket(
            source=self,
            serial=serial,
            name=name,
            spec=spec,
            tokens=len(tokens_T) - 1,
            prompt_length=prompt_length,
            tokens_crc=crc_of_tokens(tokens_T),
            version=version,
        )
        future = self._thread.submit(self._write, guidance, wire.facts(ticket, self.run))
        with self._lock:
            self._records[serial] = future
            self._pending.append(future)
        weakref.finalize(ticket, self._dead.append, serial).atexit = False
        return ticket

    def wait(self) -> None:
        """Until everything put so far is kept; raises what went wrong with it."""
        while (oldest := self._oldest(1)) is not None:
            oldest.result()

    def get(self, ticket: Ticket) -> Guidance:
        """The record of one ticket, verified: read-only host leaves (layers, tokens, ...).

        Raises: GuidanceError if it is gone, damaged, or not what the ticket says.
        """
        self._sweep()
        future = self._records.get(ticket.serial)
        where, need = f"guidance record {ticket.name}", "a ticket of this store, still held"
        if future is None or ticket.source is not self:
            got = "a ticket of another store" if ticket.source is not self else "a record freed"
            raise GuidanceError(message(where, got, need, "keep the ticket that `put` returned"))
        start = time.perf_counter()
        kept = future.result()
        waited = time.perf_counter()
        if isinstance(kept, spill.Place):
            assert self._spill
            blob, place = self._spill.read(kept), str(kept)
        else:
            blob, place = kept, "in memory"
        guidance = wire.unpack(blob, ticket, self.run, place)
        end = time.perf_counter()
        self._count(wait_s=waited - start, get_s=end - waited, bytes_out=len(blob))
        return guidance

    def load(
        self,
        tickets: Sequence[Ticket | None],
        like: Ticket,
        tokens_BT: np.ndarray,
        valid_BT: np.ndarray,
    ) -> Guidance:
        """The records of rows of a batch, stacked: leaves (layers, B, S, ...), zero on padding.

        Args:    tickets: one per row; None: a padding row. like: gives the make if all are None.
                 tokens_BT, valid_BT: of the rows; each record must be of its row's very tokens.
        Raises:  GuidanceError for records that do not belong to their rows; see `get`.
        """
        records = []
        for row, (ticket, tokens_T, valid_T) in enumerate(
            zip(tickets, tokens_BT, valid_BT, strict=True)
        ):
            if ticket is None:
                filled = int(np.count_nonzero(valid_T))
                where, need = f"row {row} without guidance", "a padding row, without tokens"
                require(filled == 0, where, f"{filled} tokens", need, None, GuidanceError)
            else:
                _check_row(row, ticket, tokens_T[np.asarray(valid_T, bool)])
            records.append(None if ticket is None else self.get(ticket))
        start = time.perf_counter()
        rows, S = len(records), tokens_BT.shape[1] - 1
        if all(record is None for record in records):
            one = self.get(like)  # for the make alone
            empty = jax.tree.map(
                lambda a: np.zeros((a.shape[0], rows, S, *a.shape[2:]), a.dtype), one
            )
            return empty
        stacked = stack(records, rows, S)
        self._count(get_s=time.perf_counter() - start)
        return stacked

    def metrics(self, step_s: float | int | None = None) -> dict[str, float]:
        """Counters since the last call, and what is held now.

        Args:    step_s: seconds of the step, for the share that the store's work would take of it
                 if nothing overlapped.
        """
        self._sweep()
        with self._lock:
            counts, self._counts = self._counts, collections.Counter()
            places = [f.result() for f in self._records.values() if f.done() and not f.exception()]
        names = ("bytes_in", "bytes_out", "spilled_bytes", "put_s", "get_s", "wait_s")
        out = {name: float(counts[name]) for name in names}
        out["in_gb_s"] = out["bytes_in"] / max(out["put_s"], 1e-9) / 1e9
        out["out_gb_s"] = out["bytes_out"] / max(out["get_s"], 1e-9) / 1e9
        out["memory_bytes"] = float(self._memory)
        out["disk_bytes"] = float(sum(p.length for p in places if isinstance(p, spill.Place)))
        out["records"] = float(len(self._records))
        if step_s is not None:
            out["step_share"] = (out["put_s"] + out["get_s"] + out["wait_s"]) / max(step_s, 1e-9)
        return {f"guide/store_{name}": value for name, value in out.items()}

    def close(self) -> None:
        """Ends the thread and deletes everything, records in use included."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._records.clear()
        self._memory = 0
        if self._spill:
            self._spill.close()

    def _write(self, guidance: Guidance | Callable[[], Guidance], expected: dict[str, Any]) -> Kept:
        """In the store's thread: waits for the copy, packs, and keeps or spills."""
        if not isinstance(guidance, Guidance):
            guidance = guidance()
        start = time.perf_counter()
        blob = wire.pack(guidance, expected)
        with self._lock:
            fits = self._budget is None or self._memory + len(blob) <= self._budget
            if fits:
                self._memory += len(blob)
        kept: Kept = blob
        if not fits:
            assert self._spill
            kept = self._spill.append(blob)
        spilled = 0 if fits else len(blob)
        elapsed = time.perf_counter() - start
        self._count(put_s=elapsed, bytes_in=len(blob), spilled_bytes=spilled)
        return kept

    def _oldest(self, limit: int) -> Future[Kept] | None:
        """Takes the oldest put off the list if it is done, or if `limit` or more are on it."""
        with self._lock:
            full = len(self._pending) >= limit
            if self._pending and (full or self._pending[0].done()):
                return self._pending.popleft()
        return None

    def _sweep(self) -> None:
        """Frees the records whose tickets are gone; refuses a closed store."""
        need = "an open store"
        require(not self._closed, "guidance store", "closed", need, None, GuidanceError)
        with self._lock:
            for _ in range(len(self._dead)):
                serial = self._dead.popleft()
                if not self._records[serial].done():
                    self._dead.append(serial)  # the next time
                    continue
                future = self._records.pop(serial)
                if future.exception() is not None:
                    continue
                kept = future.result()
                if isinstance(kept, spill.Place):
                    assert self._spill
                    self._spill.free(kept)
                else:
                    self._memory -= len(kept)

    def _count(self, **amounts: float | int) -> None:
        with self._lock:
            self._counts.update(amounts)  # type: ignore[arg-type]


def _check_row(row: int, ticket: Ticket, tokens_T: np.ndarray) -> None:
    where = f"guidance of row {row}"
    got = f"a record of {ticket.name}, {ticket.tokens + 1} tokens"
    same = len(tokens_T) == ticket.tokens + 1 and crc_of_tokens(tokens_T) == ticket.tokens_crc
    need = f"one of the row's own {len(tokens_T)} tokens"
    fix = "rows and records were put in another order; keep each ticket with its trajectory"
    require(same, where, got, need, fix, GuidanceError)
