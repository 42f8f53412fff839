"""The benchmark runs and writes what it measures. What it measures is never asserted."""

import json
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from launch.benches import kernels
from pallas_kernels import catalogue
from pallas_kernels.common.bench import Bench
from pallas_kernels.common.cost import Cost

ROOT = pathlib.Path(__file__).resolve().parents[2]


def bench(*flags):
    command = [sys.executable, "launch/bench.py", "--repeats=1", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "suite", ["formats", "guidance", pytest.param("step", marks=pytest.mark.slow)]
)
def test_a_suite_runs_and_writes_its_rows(suite, tmp_path):
    done = bench(f"--suites={suite}", f"--json={tmp_path / 'rows.json'}")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "rows.json").read_text())
    assert {"jax", "device", "cores", "load_before"} <= written["machine"].keys()
    assert len(written["rows"]) >= 5
    for row in written["rows"]:
        assert row["suite"] == suite and row["seconds"] > 0 and row["peer"]
        assert row["name"] in done.stdout


def test_an_unknown_suite_names_the_choices():
    done = bench("--suites=speed")
    assert done.returncode == 2
    assert "--suites: got speed, need some of formats,guidance,step,kernels" in done.stderr


def toy(**changes):
    bench = Bench(
        op="toy",
        case="one",
        impls=("xla", "triton"),
        cost=Cost(read=3 * 10**9, written=10**9, operations=10**13),
        make=lambda seed: (jnp.ones(8, jnp.float32),),
        run=lambda impl: lambda x: x + x,
        reference=lambda x: x * 2,
        tolerance=0.0,
        small=True,
    )
    return Bench(**vars(bench) | changes)


def test_a_kernel_has_its_bound_on_each_device_and_a_time_where_it_can_run():
    row = kernels._row(toy(), 2, 1e9)
    assert row["bounds"]["v6e"] == {"seconds": pytest.approx(1e13 / 918e12), "by": "compute"}
    assert list(row["bounds"]) == ["h200", "b200", "v6e", "tpu7x"]
    measured = row["measured"]["xla"]
    assert measured["gb_s"] == pytest.approx(4 / measured["seconds"])
    assert measured["copy_share"] == pytest.approx(4 / measured["seconds"])
    assert row["measured"]["triton"] is None
    text = kernels.line(row)
    assert "4000 MB 1e+04 Gop bf16" in text and "v6e 1.09e+04c" in text
    assert "xla:" in text and "not measured: triton" in text


def test_a_real_size_is_not_run_on_a_cpu():
    def make(seed):
        raise AssertionError("it was to be left alone")

    row = kernels._row(toy(small=False, make=make), 2, 1e9)
    assert row["measured"] == {"xla": None, "triton": None}
    assert "not measured: xla, triton" in kernels.line(row)


def test_a_kernel_is_held_against_its_baseline():
    def baseline(x, y):
        return x * y

    two = jnp.ones(8, jnp.float32)
    bench = toy(baseline=baseline, baseline_make=lambda seed: (two, two), baseline_name="BF16")
    row = kernels._row(bench, 3, 1e9)
    assert row["peer_seconds"] > 0 and row["measured"]["xla"]["ratio"] > 0
    assert " of BF16" in kernels.line(row)


@pytest.mark.slow
def test_the_suite_of_kernels_has_every_case_and_the_peers(tmp_path):
    done = bench("--suites=kernels", f"--json={tmp_path / 'rows.json'}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    named = {row["name"] for row in rows}
    for op in catalogue.OPS:
        for case in catalogue.benches(op):
            assert f"{op} {case.case}" in named
    assert [row for row in rows if "bounds" not in row]
