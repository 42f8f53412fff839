"""The benchmark runs and writes what it measures. What it measures is never asserted."""

import json
import pathlib
import subprocess
import sys

import pytest

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
    assert "--suites: got speed, need some of formats,guidance,step" in done.stderr
