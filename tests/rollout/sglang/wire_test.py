"""Directories of weights: bit for bit, whole or not at all, and nothing in them taken on trust."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from tests.rollout.sglang.wire_tensors import (
    CONFIG,
    bits,
    changed_tensors,
    contents,
    same,
    some_tensors,
)
from trace_jax.rollout.sglang import wire, wire_delta, wire_files, wire_manifest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_a_full_directory_reads_back_bit_for_bit(tmp_path):
    tensors = some_tensors()
    written = wire.write_full(tmp_path, "7.12", tensors, CONFIG)
    assert written.path == tmp_path / "7.12"
    assert written.bytes == sum(file.stat().st_size for file in written.path.iterdir())
    same(wire.read(written.path), tensors)
    found = wire.verify(written.path)
    assert (found.version, found.base, found.kind) == ("7.12", None, "full")
    assert found.tensors["bits"].dtype == "BF16"  # with every NaN's payload, as bytes above
    assert json.loads((written.path / "config.json").read_text()) == CONFIG
    assert os.listdir(tmp_path) == ["7.12"]


def test_the_files_are_what_the_safetensors_library_reads(tmp_path):
    tensors = some_tensors()
    path = wire.write_full(tmp_path, "1.1", tensors, CONFIG).path
    found = safetensors.numpy.load_file(path / "model.safetensors")
    same({name: found[name] for name in tensors}, tensors)
    assert all(found[name].dtype == array.dtype for name, array in tensors.items())


def test_large_directories_have_shards_that_their_index_names(tmp_path, monkeypatch):
    monkeypatch.setattr(wire_files, "SHARD_BYTES", 3000)
    tensors = some_tensors()
    path = wire.write_full(tmp_path, "1.1", tensors, CONFIG).path
    same(wire.read(path), tensors)
    wire.verify(path)
    index = json.loads((path / wire_manifest.INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 2
    for file in set(index.values()):
        inside = safetensors.numpy.load_file(path / file)
        assert set(inside) == {name for name, where in index.items() if where == file}


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_applied_delta_is_the_full_directory_byte_for_byte(tmp_path, share, seed):
    old = some_tensors(seed)
    new = changed_tensors(old, share, seed)
    base = wire.write_full(tmp_path, "1.1", old, CONFIG).path
    delta = wire.write_delta(tmp_path, "2.2", "1.1", old, new, CONFIG).path
    made = wire.apply(delta, base, tmp_path / "made").path
    whole = wire.write_full(tmp_path, "2.2", new, CONFIG, name="whole").path
    assert contents(made) == contents(whole)
    same(wire.read(made), new)
    found = wire.verify(delta)
    wire.verify(made)
    assert (found.base, found.kind) == ("1.1", "delta")
    assert bool(found.changes) == (share > 0 and any(bits(old[n]) != bits(new[n]) for n in old))
    assert not list(delta.glob("*.safetensors"))  # a server without the plug-in takes none of it


def test_a_delta_adds_removes_and_reshapes_tensors(tmp_path):
    old = some_tensors()
    new = {**old, "more": np.arange(5, dtype=np.int64), "norm": np.zeros(4, np.float32)}
    del new["a.weight"]
    base = wire.write_full(tmp_path, "1.1", old, CONFIG).path
    delta = wire.write_delta(tmp_path, "2.2", "1.1", old, new, {"other": 1}).path
    made = wire.apply(delta, base, tmp_path / "made").path
    same(wire.read(made), new)
    assert contents(made) == contents(
        wire.write_full(tmp_path, "2.2", new, {"other": 1}, name="whole").path
    )


def test_deltas_apply_one_after_another(tmp_path):
    versions = [some_tensors()]
    for i in range(4):
        versions.append(changed_tensors(versions[-1], 0.03, i))
    loaded = wire.write_full(tmp_path, "0.0", versions[0], CONFIG).path
    for i in range(1, 5):
        args = (tmp_path, f"{i}.{i}", f"{i - 1}.{i - 1}", versions[i - 1], versions[i], CONFIG)
        delta = wire.write_delta(*args).path
        loaded = wire.apply(delta, loaded, tmp_path / f"made{i}").path
    same(wire.read(loaded), versions[4])


def brute_force(change, old):
    """The new bytes, by a loop over the format's description."""
    out, values = old.tolist(), change.values.tolist()
    if change.form == "whole":
        return values
    at, index = 0, change.index.tolist()
    if change.form == "bitmap":
        places = [i for i in range(len(old)) if index[i // 8] >> (i % 8) & 1]
    elif change.form == "place32":
        places = [
            int.from_bytes(bytes(index[i : i + 4]), "little") for i in range(0, len(index), 4)
        ]
    else:
        places = []
        for byte in index:
            if byte == 255:
                at += 255
            else:
                places.append(at + byte)
                at += byte + 1
    for place, value in zip(places, values, strict=True):
        out[place] = value
    return out


def test_each_form_of_a_change_is_taken_where_it_is_smallest_and_exact():
    rng, seen = np.random.default_rng(0), set()
    for case in range(400):
        size = int(rng.integers(1, 3000))
        old = rng.integers(0, 256, size, np.uint8)
        new = old.copy()
        share = 10.0 ** rng.uniform(-4, 0)
        places = np.flatnonzero(rng.random(size) < share)
        if case % 3 == 0:
            places = rng.integers(0, size, 1)
        new[places] ^= 0x10
        change = wire_delta.encode(old, new)
        if change is None:
            assert (old == new).all()
            continue
        seen.add(change.form)
        count = int((old != new).sum())
        gaps = np.diff(np.flatnonzero(old != new), prepend=-1) - 1
        sizes = [size, -(-size // 8) + count, 2 * count + int((gaps // 255).sum()), 5 * count]
        assert change.bytes == min(sizes), (change.form, sizes)
        assert brute_force(change, old) == new.tolist()
        room = old.copy()
        wire_delta.decode(change, room, "here")
        assert (room == new).all()
    assert seen == set(wire_delta.FORMS)


def test_a_change_of_one_byte_in_a_large_tensor_costs_five():
    old = np.zeros(10**6, np.uint8)
    for place in (0, 254, 255, 256, 10**6 - 1):
        new = old.copy()
        new[place] = 1
        change = wire_delta.encode(old, new)
        assert change.bytes <= 5
        room = old.copy()
        wire_delta.decode(change, room, "here")
        assert (room == new).all()


@pytest.mark.parametrize(
    ("form", "index", "values", "said"),
    [
        ("zip", [], [], "form 'zip'"),
        ("whole", [], [1], "(0, 1) bytes"),
        ("bitmap", [1], [1], "a bitmap of 1 bytes"),
        ("bitmap", [3, 0], [1], "2 places"),
        ("gap8", [255], [], "an unfinished gap"),
        ("gap8", [16], [1], "place 16"),
        ("gap8", [1, 2], [1], "2 places"),
        ("place32", [1, 0, 0], [1], "3 bytes"),
        ("place32", [0, 0, 0, 255], [1], "place 4278190080"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(form, index, values, said):
    change = wire_delta.Change(
        form=form, index=np.array(index, np.uint8), values=np.array(values, np.uint8)
    )
    with pytest.raises(ValueError, match="here: ") as error:
        wire_delta.decode(change, np.zeros(16, np.uint8), "here")
    assert said in str(error.value)


def test_versions_are_names_and_never_reused(tmp_path):
    tensors = some_tensors()
    for version in ("../1", "/1", "", ".1", "a b", "x" * 200):
        with pytest.raises(ValueError, match="weights: version"):
            wire.write_full(tmp_path, version, tensors, CONFIG)
    path = wire.write_full(tmp_path, "1.1", tensors, CONFIG).path
    before = contents(path)
    with pytest.raises(FileExistsError, match="versions are never reused"):
        wire.write_full(tmp_path, "1.1", some_tensors(1), CONFIG)
    assert contents(path) == before and os.listdir(tmp_path) == ["1.1"]


def test_tensors_that_cannot_be_written_are_named(tmp_path):
    for bad in (np.zeros(2, np.complex64), np.zeros(2, ">f4"), np.array(["a"])):
        with pytest.raises(ValueError, match="weights: odd: dtype"):
            wire.write_full(tmp_path, "1.1", {"odd": bad}, CONFIG)
    with pytest.raises(ValueError, match="weights: tensors: got none"):
        wire.write_full(tmp_path, "1.1", {}, CONFIG)
    assert not os.listdir(tmp_path)


class Full:
    """A file that takes `room` bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._file.close()

    def write(self, part):
        self._room -= memoryview(part).nbytes
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(part)


@pytest.mark.parametrize("room", [0, 100, 2000, 131_500])
def test_a_disk_that_fills_up_leaves_nothing_and_is_named(tmp_path, monkeypatch, room):
    old = some_tensors()
    base = wire.write_full(tmp_path, "1.1", old, CONFIG).path
    path = wire.write_delta(tmp_path, "2.2", "1.1", old, some_tensors(1), CONFIG).path
    real = pathlib.Path.open

    def opened(self, mode="r", *args, **kwargs):
        file = real(self, mode, *args, **kwargs)
        return Full(file, room) if mode == "xb" else file

    monkeypatch.setattr(pathlib.Path, "open", opened)
    writes = [
        lambda: wire.write_full(tmp_path, "3.3", old, CONFIG),
        lambda: wire.apply(path, base, tmp_path / "made"),
    ]
    if room < 1000:
        writes.append(lambda: wire.write_delta(tmp_path, "3.3", "1.1", old, old, CONFIG))
    for write in writes:
        with pytest.raises(OSError) as error:
            write()
        assert error.value.errno == errno.ENOSPC
        assert str(tmp_path) in str(error.value) and "bytes free, need" in str(error.value)
        assert sorted(os.listdir(tmp_path)) == ["1.1", "2.2"]


def test_a_disk_without_room_is_known_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(wire_files, "free_bytes", lambda folder: 5000)
    with pytest.raises(OSError, match="got a full disk, 5000 bytes free, need 1"):
        wire.write_full(tmp_path, "1.1", some_tensors(), CONFIG)
    assert not os.listdir(tmp_path)


def test_a_real_full_disk(tmp_path):
    """By the limit on the size of files, which the kernel enforces."""
    code = f"""
import resource, signal, numpy as np
from trace_jax.rollout.sglang import wire
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    wire.write_full({str(tmp_path)!r}, "1.1", {{"a": np.zeros(9000, np.uint8)}}, {{}})
except OSError as error:
    print("refused", error.errno)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"refused {errno.EFBIG}\n", done.stderr
    assert not os.listdir(tmp_path)


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(wire_manifest, "dumps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wire.write_full(tmp_path, "1.1", some_tensors(), CONFIG)
    assert not os.listdir(tmp_path)


def test_the_wire_needs_neither_jax_nor_ml_dtypes():
    code = """
import sys
for name in ("jax", "jaxlib", "flax", "ml_dtypes", "torch"):
    sys.modules[name] = None
from trace_jax.rollout.sglang import wire
print("imported", *sorted({"jax", "ml_dtypes"} & {n for n, m in sys.modules.items() if m}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "imported\n", done.stderr
