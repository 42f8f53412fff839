"""Whatever fails while a checkpoint is replaced, the old one or the new one is whole, and named."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest

from trace_jax.hf import directory


def filled(path, text="old"):
    path.mkdir(parents=True)
    (path / "model").write_text(text)
    return path


def put(path, text="new", **options):
    with directory.fresh(path, **{"overwrite": True, **options}) as new:
        (new / "model").write_text(text)


def everything(path):
    """{file: text} of all files below."""
    return {str(f.relative_to(path)): f.read_text() for f in path.rglob("*") if f.is_file()}


def failing(monkeypatch, when):
    """Renames fail where `when(source, target)` says so."""
    rename, replace = os.rename, os.replace

    def wrap(real):
        def call(source, target, **options):
            if when(pathlib.Path(source), pathlib.Path(target)):
                raise OSError(errno.EIO, "I/O error")
            return real(source, target, **options)

        return call

    monkeypatch.setattr(os, "rename", wrap(rename))
    monkeypatch.setattr(os, "replace", wrap(replace))


def test_failure_of_the_last_rename_puts_the_old_one_back_and_keeps_the_new(tmp_path, monkeypatch):
    target = filled(tmp_path / "out")
    failing(monkeypatch, lambda source, _: source.name == "new")
    with pytest.raises(OSError, match="I/O error") as error:
        put(target)
    assert error.value.errno == errno.EIO
    assert (target / "model").read_text() == "old"
    (kept,) = tmp_path.glob(".out-*/new")
    assert f"complete in {kept}" in str(error.value) and str(target) in str(error.value)
    assert everything(kept) == {"model": "new"}


def test_failure_of_the_first_rename_keeps_both(tmp_path, monkeypatch):
    target = filled(tmp_path / "out")
    failing(monkeypatch, lambda source, _: source == target)
    with pytest.raises(OSError, match="complete in"):
        put(target)
    assert sorted(everything(tmp_path).values()) == ["new", "old"]
    assert (target / "model").read_text() == "old"


def test_when_nothing_can_be_renamed_back_both_are_named(tmp_path, monkeypatch):
    target = filled(tmp_path / "out")
    failing(monkeypatch, lambda _, to: to == target)
    with pytest.raises(OSError, match="complete in") as error:
        put(target)
    for name, text in (("new", "new"), ("old", "old")):
        (kept,) = tmp_path.glob(f".out-*/{name}")
        assert str(kept) in str(error.value)
        assert everything(kept) == {"model": text}


def test_interrupt_between_the_renames_puts_the_old_one_back(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    target = filled(tmp_path / "out")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(target)
    assert (target / "model").read_text() == "old"


def test_kill_between_the_renames_loses_nothing(tmp_path):
    target = filled(tmp_path / "out")
    code = """
import os, sys
from trace_jax.hf import directory
os.replace = lambda *_: os._exit(9)
with directory.fresh(sys.argv[1], overwrite=True) as new:
    (new / "model").write_text("new")
"""
    root = pathlib.Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code, str(target)], cwd=root, timeout=120)
    assert run.returncode == 9
    assert sorted(everything(tmp_path).values()) == ["new", "old"]


def test_failure_with_nothing_there_before_keeps_the_new(tmp_path, monkeypatch):
    failing(monkeypatch, lambda source, _: source.name == "new")
    with pytest.raises(OSError, match="complete in"):
        put(tmp_path / "out")
    assert list(everything(tmp_path).values()) == ["new"]


@pytest.mark.parametrize("full", [False, True])
def test_link_stays_and_its_target_is_replaced(full, tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    filled(real) if full else real.mkdir()
    link.symlink_to(real)
    put(link)
    assert link.is_symlink()
    assert everything(real) == {"model": "new"}
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_dangling_link_gets_its_target(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    put(tmp_path / "link", overwrite=False)
    assert everything(tmp_path / "far" / "away") == {"model": "new"}
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("full", [False, True])
def test_working_directory_is_replaced_and_stays_the_working_directory(full, tmp_path, monkeypatch):
    here = tmp_path / "here"
    filled(here) if full else here.mkdir()
    monkeypatch.chdir(here)
    put(".")
    assert everything(here) == {"model": "new"} == everything(pathlib.Path("."))
    assert os.listdir(tmp_path) == ["here"]


def test_what_can_not_be_replaced_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    def refused(path, said, error: type[Exception] = ValueError, **options):
        before = sorted(tmp_path.rglob("*"))
        with (
            pytest.raises(error, match=said),
            directory.fresh(path, **{"overwrite": True, **options}),
        ):
            raise AssertionError("was told to write")
        assert sorted(tmp_path.rglob("*")) == before

    target = filled(tmp_path / "out")
    (tmp_path / "loop").symlink_to("loop")
    refused("/", "got a mount point")
    refused(tmp_path / "loop", "a symbolic link to itself")
    refused(target, "overwrite=True", FileExistsError, overwrite=False)
    refused(target / "model" / "below", "ile exists|ot a directory", OSError)
    monkeypatch.setattr(os.path, "ismount", lambda path: pathlib.Path(path) == target)
    refused(target, "got a mount point")
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda path, mode: pathlib.Path(path) != target)
    refused(target, "read-only")
