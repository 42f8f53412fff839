"""Directories that are damaged, or that lie: refused by name; nothing in them is taken on trust."""

import json
import os
import zlib

import numpy as np
import pytest

from tests.rollout.sglang.wire_tensors import (
    CONFIG,
    changed_tensors,
    some_tensors,
)
from trace_jax.rollout.sglang import wire


def full(tmp_path):
    return wire.write_full(tmp_path, "1.1", some_tensors(), CONFIG).path


def delta(tmp_path):
    old = some_tensors()
    new = changed_tensors(old, 0.02, 0)
    return wire.write_delta(tmp_path, "2.2", "1.1", old, new, CONFIG).path


@pytest.mark.parametrize("make", [full, delta])
def test_every_flipped_bit_of_a_file_is_found(tmp_path, make):
    path = make(tmp_path)
    wire.verify(path)
    rng = np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for place in {0, len(good) - 1, *rng.integers(0, len(good), 60).tolist()}:
            bad = bytearray(good)
            bad[place] ^= 1 << int(rng.integers(0, 8))
            file.write_bytes(bad)
            with pytest.raises(ValueError) as error:
                wire.verify(path)
            assert file.name in str(error.value)
        file.write_bytes(good)
    wire.verify(path)


@pytest.mark.parametrize("make", [full, delta])
def test_files_that_are_missing_truncated_longer_or_more_are_named(tmp_path, make):
    path = make(tmp_path)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for bad in (None, b"", good[:-1], good + b"\0"):
            file.unlink()
            if bad is not None:
                file.write_bytes(bad)
            with pytest.raises(ValueError) as error:
                wire.verify(path)
            assert file.name in str(error.value)
            file.write_bytes(good)
    (path / "model-2.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"also \['model-2.safetensors'\]"):
        wire.verify(path)


def test_links_and_pipes_are_not_followed(tmp_path):
    path = full(tmp_path)
    good = tmp_path / "elsewhere"
    (path / "model.safetensors").rename(good)
    (path / "model.safetensors").symlink_to(good)
    with pytest.raises(ValueError, match=r"model.safetensors: got a symbolic link"):
        wire.verify(path)
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: got no regular file"):
        wire.verify(path)


def rewrite(path, change):
    """The manifest with a change and a checksum that fits."""
    file = path / wire.MANIFEST
    facts = json.loads(file.read_text())
    del facts["crc32"]
    change(facts)
    body = json.dumps(facts, separators=(",", ":")).encode()
    file.write_bytes(body[:-1] + b',"crc32":%d}' % zlib.crc32(body))


def outside(name):
    def change(facts):
        for entry in facts["tensors"].values():
            entry["file"] = name
        facts["files"][name] = facts["files"].pop("model.safetensors")

    return change


def of_tensor(**changes):
    return lambda facts: facts["tensors"]["norm"].update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda facts: facts.update(protocol=2), "protocol: got 2, need 1"),
        (lambda facts: facts.pop("protocol"), "protocol: got None"),
        (outside("../model.safetensors"), "no path"),
        (outside("/etc/passwd"), "no path"),
        (outside(".."), "no path"),
        (outside("a/b"), "no path"),
        (lambda facts: facts["files"].update({"../x": {"bytes": 1, "crc32": 1}}), "no path"),
        (lambda facts: facts.update(version="../7"), "no path"),
        (lambda facts: facts.update(kind="delta", base="../7"), "no path"),
        (lambda facts: facts.update(kind="delta"), "'full' without a base"),
        (lambda facts: facts.update(base="1.0"), "'full' without a base"),
        (lambda facts: facts.update(extra=1), "the fields of a manifest"),
        (lambda facts: facts.pop("tensors"), "the fields of a manifest"),
        (lambda facts: facts.update(tensors=[1]), "the fields of a manifest"),
        (lambda facts: facts["files"].pop("config.json"), "files: got"),
        (lambda facts: facts["files"].update(more={"bytes": 1, "crc32": 1}), "files: got"),
        (lambda facts: facts.update(changes={"norm": {}}), "the fields of a manifest"),
        (of_tensor(dtype="F31"), "'F31'"),
        (of_tensor(dtype=["F32"]), "['F32']"),
        (of_tensor(shape=[-1]), "numbers (-1,"),
        (of_tensor(shape=[2.5]), wire.MANIFEST),
        (of_tensor(shape=[True]), "numbers (True,"),
        (of_tensor(shape=[2**47]), "bytes, need <="),
        (of_tensor(shape=[34]), "model.safetensors: got another header"),
        (of_tensor(dtype="I32"), "model.safetensors: got another header"),
        (of_tensor(crc32=7), "norm: got crc32"),
        (lambda facts: facts["tensors"].pop("norm"), "model.safetensors: got another header"),
        (
            lambda facts: facts["tensors"].update(two=facts["tensors"]["norm"]),
            "model.safetensors: got another header",
        ),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path, change, said):
    path = full(tmp_path)
    rewrite(path, lambda facts: None)
    wire.verify(path)  # the checksum is right
    rewrite(path, change)
    with pytest.raises(ValueError) as error:
        wire.verify(path)
    assert said in str(error.value)


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 10**5, b'{"a":', b"\xff", b"[1]"])
def test_text_that_is_no_manifest_is_refused(tmp_path, text):
    path = full(tmp_path)
    signed = text[:-1] + b',"crc32":%d}' % zlib.crc32(text[:-1] + b"}")
    for bad in (text, signed):
        (path / wire.MANIFEST).write_bytes(bad)
        with pytest.raises(ValueError, match=wire.MANIFEST):
            wire.verify(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"form": "zip"}, "'zip'"),
        ({"values": 10**6}, "changes of"),
        ({"index": -1}, "numbers"),
        ({"base_crc32": None}, "a base that the others change"),
        ({"form": "whole"}, "all bytes of the tensor"),
    ],
)
def test_a_change_that_lies_is_refused(tmp_path, change, said):
    path = delta(tmp_path)
    rewrite(path, lambda facts: facts["changes"]["a.weight"].update(change))
    with pytest.raises(ValueError) as error:
        wire.manifest(path)
    assert said in str(error.value)


def test_a_change_of_no_tensor_is_refused(tmp_path):
    path = delta(tmp_path)
    rewrite(path, lambda facts: facts["changes"].update(no=facts["changes"]["a.weight"]))
    with pytest.raises(ValueError, match="change of no: got no such tensor"):
        wire.manifest(path)


def test_a_delta_over_another_base_is_refused_and_nothing_is_left(tmp_path):
    old = some_tensors()
    new = changed_tensors(old, 0.05, 0)
    path = wire.write_delta(tmp_path, "2.2", "1.1", old, new, CONFIG).path
    other = wire.write_full(tmp_path, "1.0", old, CONFIG).path
    with pytest.raises(ValueError, match=r"base: got version 1.0 in .*need version 1.1"):
        wire.apply(path, other, tmp_path / "made")
    for name in ("bits", "none"):  # the one changes, the other does not
        wrong = {**old, name: np.ones((2, 2), np.float32)}
        forged = wire.write_full(tmp_path, "1.1", wrong, CONFIG, name=f"forged-{name}").path
        with pytest.raises(ValueError, match=f"forged-{name}: {name}: got F32"):
            wire.apply(path, forged, tmp_path / "made")
    with pytest.raises(ValueError, match="got a full directory, need a delta"):
        wire.apply(other, other, tmp_path / "made")
    with pytest.raises(ValueError, match="got a delta, need a full directory"):
        wire.apply(path, path, tmp_path / "made")
    with pytest.raises(ValueError, match="got a delta, need a full directory"):
        wire.read(path)
    assert not [file for file in os.listdir(tmp_path) if "made" in file]


def test_a_base_that_was_damaged_after_its_manifest_is_found_by_apply(tmp_path):
    old = some_tensors()
    new = changed_tensors(old, 0.05, 0)
    base = wire.write_full(tmp_path, "1.1", old, CONFIG).path
    path = wire.write_delta(tmp_path, "2.2", "1.1", old, new, CONFIG).path
    good = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"made/model.safetensors: turned: got crc32"):
        wire.apply(path, base, tmp_path / "made")
    assert not [file for file in os.listdir(tmp_path) if "made" in file]
    with pytest.raises(ValueError, match="turned: got crc32"):
        wire.read(base)
