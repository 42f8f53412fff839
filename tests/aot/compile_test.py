"""Jobs in processes of their own: what comes back, and what a failure says."""

import pathlib

import jax
import pytest

from trace_jax.aot import compile as aot
from trace_jax.aot import targets

HERE = str(pathlib.Path(__file__).parent)


def job(builder, target="h200", **changes):
    return aot.Job(builder=f"programs:{builder}", target=target, path=(HERE,), **changes)


def test_a_crash_of_the_compiler_is_an_error_that_says_how_it_died():
    says = r"got a crash \(SIGSEGV\), need(?s:.*)about to fall"
    with pytest.raises(aot.CompileError, match=says):
        aot.compile_job(job("segfault"))


def test_an_exception_in_the_builder_is_an_error_with_its_last_words():
    with pytest.raises(aot.CompileError, match=r"exit status 1(?s:.*)this program is not for you"):
        aot.compile_job(job("refuse"))


def test_a_compiler_that_hangs_is_given_up():
    with pytest.raises(aot.CompileError, match="got no answer in 3 s"):
        aot.compile_job(job("hang", timeout_s=3.0))


@pytest.mark.parametrize("target", ["h200", "v6e"])
def test_missing_compilers_are_an_error_that_says_how_to_get_them(tmp_path, monkeypatch, target):
    monkeypatch.setattr(aot, "PLUGINS", tmp_path)
    with pytest.raises(FileNotFoundError, match=f"compiler for {target}: .*Fix: make setup-aot"):
        aot.compile_job(job("refuse", target))


def test_unknown_targets_and_shapes_are_refused():
    with pytest.raises(ValueError, match="aot: target: got h100, need one of"):
        aot.compile_job(job("refuse", "h100"))
    with pytest.raises(ValueError, match=r"devices of h200: got \(8, 8\), need 3 positive numbers"):
        targets.topology("h200", (8, 8))


@pytest.mark.parametrize(
    ("target", "devices", "count"), [("h200", (1, 8, 8), 64), ("v6e", (4, 4), 16)]
)
def test_many_devices_can_be_described(target, devices, count):
    done = aot.compile_job(job("sum_over_devices", target, devices=devices))
    assert f"num_partitions={count}" in done.hlo
    assert "all-reduce" in done.hlo
    assert done.memory["argument"] == 4096  # one row a device


def test_lock_has_the_compilers_of_every_jax_that_is_locked():
    locked = (aot.ROOT / "requirements-dev.lock").read_text().splitlines()
    releases = [line.split(" ;")[0].removeprefix("jax==") for line in locked if line[:5] == "jax=="]
    assert jax.__version__ in releases
    lock = (aot.ROOT / "requirements-aot.lock").read_text().splitlines()
    names = [line.partition(" ")[0] for line in lock if line[:1].isalpha()]
    wanted = [f"jax-cuda13-{part}=={v}" for part in ("pjrt", "plugin") for v in releases]
    others = ("libtpu", "nvidia-cuda-nvcc")
    assert [name for name in names if not name.startswith(others)] == sorted(wanted)
    assert len([name for name in names if name.startswith("libtpu")]) == len(releases)
    assert len([name for name in names if name.startswith("nvidia-cuda-nvcc")]) == 1
