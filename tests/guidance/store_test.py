"""Oracles: the arrays that were put, and the batch that plain arrays make."""

import dataclasses
import gc
import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.data import batching
from trace_jax.guidance import store as store_module
from trace_jax.guidance import wire
from trace_jax.guidance.record import StoredGuidance
from trace_jax.guidance.store import GuidanceStore
from trace_jax.guidance.wire import GuidanceError
from trace_jax.types import Batch


@pytest.mark.parametrize("budget", [None, 0, 3000])
def test_what_is_put_comes_back_from_memory_or_disk(kit, tmp_path, budget):
    with GuidanceStore(tmp_path, memory_bytes=budget) as store:
        trajectories = [kit.trajectory(i, n) for i, n in enumerate(kit.LENGTHS)]
        tickets = [kit.put(store, t) for t in trajectories]
        for t, ticket in zip(trajectories, tickets, strict=True):
            kit.assert_equal(store.get(ticket), t.guidance)
        files = list(tmp_path.glob("*.guidance"))
        numbers = store.metrics()
        assert bool(files) == (budget is not None)
        assert numbers["guide/store_disk_bytes"] == sum(f.stat().st_size for f in files)
        assert numbers["guide/store_spilled_bytes"] == numbers["guide/store_disk_bytes"]
        assert numbers["guide/store_memory_bytes"] <= (1e9 if budget is None else budget)
    assert not list(tmp_path.glob("*.guidance"))


def test_device_arrays_and_functions_that_make_them_are_put_too(kit, spilling):
    t = kit.trajectory(0, 6)
    on_device = jax.tree.map(jnp.asarray, t.guidance)
    thread = []

    def later():
        thread.append(threading.current_thread().name)
        return on_device

    for guidance in (on_device, later):
        kit.assert_equal(spilling.get(kit.put(spilling, t, guidance)), t.guidance)
    assert thread[0].startswith("guidance_store")


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_of_stored_guidance_are_those_of_plain_guidance(kit, tmp_path, budget, size):
    plain = [kit.trajectory(i, n) for i, n in enumerate(kit.LENGTHS)]
    with GuidanceStore(tmp_path, memory_bytes=budget) as store:
        want, stored = kit.batch(plain), kit.batch([store.keep(t) for t in plain])
        assert isinstance(stored.guidance, StoredGuidance) and stored.guidance.spec == kit.SPEC
        wanted = batching.micro_batches(want, size)
        for a, b in zip(batching.micro_batches(stored, size), wanted, strict=True):
            kit.assert_equal(a, b)
        (whole,) = batching.micro_batches(stored, 6)
        for row, t in enumerate(plain):
            n = len(t.tokens_T) - 1  # prompt and answer, but the last token, from position 0 on
            for name, site in t.guidance.sites.items():
                got = whole.guidance.sites[name].scales[:, row]
                np.testing.assert_array_equal(got[:, :n], site.scales)
                assert not got[:, n:].any()
        # shuffled into minibatches they stay in the store, and each row keeps its record
        for seed in range(3):
            pairs = [batching.minibatches(which, count=2, seed=seed) for which in (stored, want)]
            for a, b in zip(*pairs, strict=True):
                assert isinstance(a.guidance, StoredGuidance)
                kit.assert_equal(batching.with_guidance(a), b)


def test_a_micro_batch_of_padding_rows_alone_has_zeros_of_the_same_make(kit, spilling):
    stored = kit.batch([spilling.keep(kit.trajectory(0, 5))], rows=3)
    *_, last = batching.micro_batches(stored, 1)
    first = next(batching.micro_batches(stored, 1))
    assert not any(leaf.any() for leaf in jax.tree.leaves(last.guidance))
    shapes = [[a.shape for a in jax.tree.leaves(part.guidance)] for part in (first, last)]
    assert shapes[0] == shapes[1]
    assert jax.tree.structure(first) == jax.tree.structure(last)


def test_a_record_lives_as_long_as_its_ticket(kit, spilling):
    folder = spilling._spill.folder
    tickets = [kit.put(spilling, kit.trajectory(i, 9)) for i in range(6)]
    spilling.get(tickets[-1])
    files = len(list(folder.glob("*.guidance")))
    assert files >= 2
    copy = dataclasses.replace(tickets[2])
    kept = tickets[2:3]
    want = spilling.get(kept[0])  # a view of a mapped file
    del tickets
    gc.collect()
    assert spilling.metrics()["guide/store_records"] == 1
    assert len(list(folder.glob("*.guidance"))) == 1
    kit.assert_equal(spilling.get(kept[0]), kit.trajectory(2, 9).guidance)
    del kept
    gc.collect()
    assert spilling.metrics()["guide/store_disk_bytes"] == 0
    assert not list(folder.glob("*.guidance"))
    kit.assert_equal(want, kit.trajectory(2, 9).guidance)  # what was read stays readable
    with pytest.raises(GuidanceError, match="q2: got a record freed, need a ticket of this store"):
        spilling.get(copy)


def test_memory_is_given_back_and_used_again(kit, tmp_path):
    one = kit.trajectory(0, 50)
    with GuidanceStore(None) as store:
        size = len(wire.pack(one.guidance, wire.facts(kit.put(store, one), store.run)))
    with GuidanceStore(tmp_path, memory_bytes=2 * size + 1000) as store:
        for _ in range(5):
            tickets = [kit.put(store, one) for _ in range(3)]
            store.get(tickets[-1])
            numbers = store.metrics()
            assert numbers["guide/store_memory_bytes"] == 2 * size
            assert numbers["guide/store_disk_bytes"] == size
            del tickets
            gc.collect()
        assert store.metrics()["guide/store_memory_bytes"] == 0


def test_leftovers_of_a_killed_run_go_and_foreign_files_are_refused(tmp_path):
    folder = tmp_path / "guidance"
    folder.mkdir()
    (folder / "0123-000000.guidance").write_bytes(wire.MAGIC + b"half a rec")
    (folder / "0123-000001.guidance").write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    with GuidanceStore(folder, memory_bytes=0) as store:
        assert store._spill.leftovers == len(wire.MAGIC) + 10
        assert sorted(p.name for p in folder.iterdir()) == [".lock", "notes.txt"]
        with pytest.raises(GuidanceError, match=r"guidance: got in use, need a folder of its own"):
            GuidanceStore(folder, memory_bytes=0)
    (folder / "results.guidance").write_text("years of work")
    with pytest.raises(
        GuidanceError, match=r"results\.guidance: got b'years of', need .*Fix: it is"
    ):
        GuidanceStore(folder, memory_bytes=0)
    assert (folder / "results.guidance").read_text() == "years of work"


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GuidanceError, match=r"Not a directory|exists.*need a folder to write to"):
        GuidanceStore(tmp_path / "file" / "guidance", memory_bytes=0)
    with pytest.raises(ValueError, match="guidance store: got 0, need a folder to spill to"):
        GuidanceStore(None, memory_bytes=0)


def test_a_full_disk_is_an_error_and_takes_nothing_else_along(kit, spilling):
    """A limit on file sizes stands in for it: the kernel refuses the write half-way."""
    first, second = kit.put(spilling, kit.trajectory(0, 5)), kit.trajectory(1, 400)
    spilling.get(first)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        lost = kit.put(spilling, second)
        with pytest.raises(
            GuidanceError, match=r"guidance folder .*: got File too large.*Fix: make"
        ):
            spilling.get(lost)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kit.assert_equal(spilling.get(first), kit.trajectory(0, 5).guidance)
    with pytest.raises(GuidanceError, match="File too large"):  # the next put tells of it, once
        kit.put(spilling, second)
    kit.assert_equal(spilling.get(kit.put(spilling, second)), second.guidance)


def test_many_threads_get_their_own_records(kit, tmp_path):
    failures = []

    def work(base):
        for i in range(20):
            t = kit.trajectory(base + i, 4 + i % 5)
            ticket = kit.put(store, t)
            try:
                kit.assert_equal(store.get(ticket), t.guidance)
            except BaseException as error:
                failures.append(error)

    with GuidanceStore(tmp_path, memory_bytes=3000, segment_bytes=3000) as store:
        threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(6)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert failures == [] and store.metrics()["guide/store_records"] == 0


def test_puts_wait_when_too_many_are_on_their_way(kit, monkeypatch):
    monkeypatch.setattr(store_module, "PENDING", 2)
    gate = threading.Event()
    t = kit.trajectory(0, 4)
    with GuidanceStore(None) as store:
        slow = [kit.put(store, t, lambda: gate.wait() and t.guidance) for _ in range(2)]
        threading.Timer(0.2, gate.set).start()
        last = kit.put(store, t)
        assert store.metrics()["guide/store_wait_s"] > 0.1
        for ticket in (*slow, last):
            kit.assert_equal(store.get(ticket), t.guidance)
    with pytest.raises(GuidanceError, match="guidance store: got closed, need an open store"):
        store.get(last)


def test_metrics_count_bytes_and_seconds_since_the_last_call(kit, spilling):
    t = kit.trajectory(0, 50)
    ticket = kit.put(spilling, t)
    spilling.get(ticket), spilling.get(ticket)
    numbers = spilling.metrics(step_s=2.0)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(t.guidance))
    assert nbytes <= numbers["guide/store_bytes_in"] < nbytes + 2000
    assert numbers["guide/store_bytes_out"] == 2 * numbers["guide/store_bytes_in"]
    assert numbers["guide/store_spilled_bytes"] == numbers["guide/store_bytes_in"]
    seconds = sum(numbers[f"guide/store_{name}_s"] for name in ("put", "get", "wait"))
    assert 0 < numbers["guide/store_put_s"] < 1 and 0 < numbers["guide/store_get_s"] < 1
    assert numbers["guide/store_step_share"] == pytest.approx(seconds / 2)
    assert spilling.metrics()["guide/store_bytes_in"] == 0
    assert isinstance(kit.batch([t]), Batch)
