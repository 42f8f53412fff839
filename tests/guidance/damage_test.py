"""Damaged, exchanged and missing records: a clear error each time, never silent misguidance."""

import dataclasses
import os

import jax
import pytest

from trace_jax.data import batching
from trace_jax.guidance.record import Guidance, StoredGuidance
from trace_jax.guidance.store import GuidanceStore
from trace_jax.guidance.wire import GuidanceError


def stored_file(store):
    (file,) = store._spill.folder.glob("*.guidance")
    return file


def test_every_flipped_bit_on_disk_is_an_error_or_changes_nothing(kit, spilling):
    t = kit.trajectory(0, 4)
    ticket = kit.put(spilling, t)
    spilling.get(ticket)
    whole = stored_file(spilling).read_bytes()
    harmless = 0
    with stored_file(spilling).open("r+b") as file:
        for at in range(len(whole)):
            file.seek(at)
            file.write(bytes([whole[at] ^ (1 << at % 8)]))
            file.flush()
            try:
                kit.assert_equal(spilling.get(ticket), t.guidance)
                harmless += 1  # filling between header and arrays
            except GuidanceError as error:
                assert "guidance record q0" in str(error) and "Fix: " in str(error)
            file.seek(at)
            file.write(whole[at : at + 1])
            file.flush()
    assert harmless < 64 + 4
    kit.assert_equal(spilling.get(ticket), t.guidance)


def test_a_damaged_record_stops_the_loop_over_micro_batches(kit, spilling):
    """The error crosses the thread that prefetches as it is."""
    stored = kit.batch([spilling.keep(kit.trajectory(seed, 6)) for seed in range(4)], rows=4)
    spilling.wait()
    files = sorted(spilling._spill.folder.glob("*.guidance"))
    with files[-1].open("r+b") as file:
        file.seek(-70, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-70, os.SEEK_END)
        file.write(bytes([byte ^ 16]))
    seen = []
    with pytest.raises(GuidanceError, match=r"record q3#3 .*: checksum of the arrays: got 0x"):
        for part in batching.micro_batches(stored, 1):
            seen.append(part)
    assert len(seen) == 3


def test_a_truncated_file_is_an_error_and_not_a_crash(kit, spilling):
    ticket = kit.put(spilling, kit.trajectory(0, 4))
    spilling.get(ticket)
    size = stored_file(spilling).stat().st_size
    for left in (size - 1, 100, 0):
        os.truncate(stored_file(spilling), left)
        with pytest.raises(
            GuidanceError, match=rf"a file of {left} bytes, need {size} or more: it is"
        ):
            spilling.get(ticket)


def test_records_that_changed_places_are_an_error(kit, tmp_path):
    with GuidanceStore(tmp_path, memory_bytes=0) as store:
        one, two = (kit.put(store, kit.trajectory(seed, 6)) for seed in (1, 2))  # of equal length
        store.get(one), store.get(two)
        whole = stored_file(store).read_bytes()
        half = len(whole) // 2
        stored_file(store).write_bytes(whole[half:] + whole[:half])
        with pytest.raises(GuidanceError, match=r"record q1 \(.*\): serial: got 2, need 1\. Fix"):
            store.get(one)


def test_a_file_of_another_run_is_an_error(kit, tmp_path):
    t, kept = kit.trajectory(0, 6), {}
    for name in ("a", "b"):
        with GuidanceStore(tmp_path / name, memory_bytes=0) as store:
            ticket = kit.put(store, t)
            store.get(ticket)
            kept[name] = stored_file(store).read_bytes()
            if name == "b":
                stored_file(store).write_bytes(kept["a"])
                with pytest.raises(GuidanceError, match=r"q0 \(.*\): run: got [0-9a-f]{16}, need"):
                    store.get(ticket)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("version", {"version": 5}, "version: got 4, need 5"),
        (
            "spec",
            {"layers": ((0, 2), (0, 1))},
            r"layers: got \[\[0, 2\], \[0, 2\]\], need .*1\]\]",
        ),
        ("spec", {"kind": "mantissa"}, "kind: got codes, need mantissa"),
        ("spec", {"scale_bits": 3}, "scale_bits: got 8, need 3"),
        ("spec", {"formats": ("nvfp4", "nvfp4")}, r"formats: got \['nvfp4:global_rule=one', "),
        ("tokens", {"tokens": 4}, "tokens: got 3, need 4"),
    ],
)
def test_a_record_of_something_else_than_the_ticket_says_is_an_error(
    kit, spilling, name, changes, match
):
    ticket = kit.put(spilling, kit.trajectory(0, 4))
    if name == "spec":
        changes = {"spec": dataclasses.replace(kit.SPEC, **changes)}
    with pytest.raises(GuidanceError, match=match):
        spilling.get(dataclasses.replace(ticket, **changes))


def test_a_missing_layer_site_or_token_is_an_error_for_the_ticket_and_the_next_put(kit):
    t = kit.trajectory(0, 6)
    fewer = jax.tree.map(lambda a: a[:1], t.guidance)
    shorter = jax.tree.map(lambda a: a[:, :-1], t.guidance)
    no_k = Guidance(sites={"expert_in": t.guidance.sites["expert_in"]}, spec=kit.SPEC)
    other = dataclasses.replace(t.guidance, spec=dataclasses.replace(kit.SPEC, scale_bits=3))
    expert = t.guidance.sites["expert_in"]
    narrow = dataclasses.replace(expert, scales=expert.scales[..., :1])
    cut = dataclasses.replace(t.guidance, sites={**t.guidance.sites, "expert_in": narrow})
    for guidance, match in (
        (other, r"record q0: scale_bits: got 3, need 8"),
        (cut, r"expert_in.scales: got \(2, 5, 1\), need \(2, 5, 2\), as nvfp4 has it"),
        (fewer, r"record q0: expert_in.bits: got \(layers, tokens\) \(1, 5\), need \(2, 5\)"),
        (shorter, r"got \(layers, tokens\) \(2, 4\), need \(2, 5\)"),
        (no_k, r"got \['expert_in'\], need \['k', 'expert_in'\]"),
    ):
        with GuidanceStore(None) as store:
            ticket = kit.put(store, t, guidance)
            for use in (lambda: store.get(ticket), lambda: kit.put(store, t)):  # noqa: B023
                with pytest.raises(GuidanceError, match=match):
                    use()
            kit.assert_equal(store.get(kit.put(store, t)), t.guidance)


def test_rows_and_tickets_in_another_order_are_an_error(kit, spilling):
    kept = [spilling.keep(kit.trajectory(seed, 6)) for seed in range(3)]  # of equal length
    good = kit.batch(kept, rows=3)
    a, b, c = good.guidance.tickets
    swapped = StoredGuidance(tickets=(b, a, c), like=a)
    bad = dataclasses.replace(good, guidance=swapped)
    with pytest.raises(GuidanceError, match=r"guidance of row 0: got a record of q1#3, 6 tokens"):
        batching.with_guidance(bad)
    shifted = StoredGuidance(tickets=(None, a, b), like=a)
    with pytest.raises(
        GuidanceError, match=r"row 0 without guidance: got 6 tokens, need a padding"
    ):
        batching.with_guidance(dataclasses.replace(good, guidance=shifted))
    with pytest.raises(ValueError, match=r"Batch\.guidance: got 2 tickets, need 3, one a row"):
        two = StoredGuidance(tickets=(a, b), like=a)
        batching.take_rows(dataclasses.replace(good, guidance=two), slice(0, 1))
    exchanged = dataclasses.replace(kept[0], guidance=kept[1].guidance)
    with pytest.raises(ValueError, match=r"q0#3: guidance \(version, prompt, tokens\)"):
        kit.batch([exchanged])
    older = dataclasses.replace(kept[0], versions_R=kept[0].versions_R - 1)
    with pytest.raises(ValueError, match=r"got \(4, 2, \d+\), need \(3, 2, \d+\)"):
        kit.batch([older])
