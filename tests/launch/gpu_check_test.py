"""The device check, on this CPU: what fails is one failure, and nothing is lost or left unsaid."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.benches import device_report, device_time, kernel_check
from pallas_kernels import catalogue

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def gpu_check(tmp_path, *flags):
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "launch/gpu_check.py", f"--json={path}", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done, json.loads(path.read_text()) if path.exists() else None


def test_each_failure_is_one_row_and_the_rest_goes_on(tmp_path):
    ops = "right,wrong,refusing,crashing,hanging,poisoned,broken"
    flags = ("--package=toy_kernels", f"--ops={ops}", "--item_seconds=10", "--minutes=5")
    done, report = gpu_check(tmp_path, *flags)
    assert done.returncode == 1, done.stderr
    rows = {(row["op"], row["impl"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 13
    kernel = {op: rows[op, "triton_interpret"] for op in ops.split(",") if op != "broken"}
    assert kernel["right"]["right"] is True and kernel["right"]["error"] == 0
    assert kernel["wrong"]["right"] is False and 1e-3 < kernel["wrong"]["error"] < 1e-1
    assert kernel["refusing"]["failed"].startswith("NotImplementedError: refusing: got a kernel")
    assert "died with status -11" in kernel["crashing"]["failed"]
    assert "the context is dead" in kernel["poisoned"]["failed"]
    assert "about to fall" in kernel["crashing"]["failed"]
    assert "no answer in 10 s" in kernel["hanging"]["failed"]
    assert "No module named 'no_such_module'" in rows["broken", ""]["failed"]
    for op in kernel:  # the same op's next item has a new process
        assert rows[op, "xla"]["right"] is True and rows[op, "xla"]["seconds"] > 0
    assert report["facts"]["ceilings"]["copy"] > 1e8 and report["no_time"] == []
    assert {target["verdict"] for target in report["targets"]} == {"not measured"}
    assert "13 ran, 6 failed, 0 had no time" in done.stdout


@pytest.mark.slow
def test_a_dry_run_keeps_to_its_minutes_and_lists_what_is_left(tmp_path):
    done, report = gpu_check(tmp_path, "--ops=quantize", "--minutes=0.1")
    ran, left = report["rows"], report["no_time"]
    assert done.returncode == (0 if ran else 1), done.stdout
    assert all(row["right"] for row in ran) and left
    small = [bench for bench in catalogue.benches("quantize") if bench.small]
    named = {(item["case"], item["impl"]) for item in ran + left}
    if named != {("", "")}:  # a machine so slow that it could not even list them
        assert len(ran + left) == len(named) == sum(len(bench.impls) for bench in small)
    assert f"{len(left)} had no time" in done.stdout and "no time: quantize " in done.stdout


def test_all_right_is_status_0(tmp_path):
    done, report = gpu_check(tmp_path, "--package=toy_kernels", "--ops=right")
    assert done.returncode == 0, done.stdout
    assert [row["impl"] for row in report["rows"]] == ["triton_interpret", "xla"]


def test_unknown_ops_name_the_choices(tmp_path):
    done, _ = gpu_check(tmp_path, "--ops=quantise")
    assert done.returncode == 2
    assert "--ops: got quantise, need some of quantize,fake_quant" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("op", catalogue.OPS)
def test_a_dry_run_finds_the_small_cases_right(tmp_path, op):
    done, report = gpu_check(tmp_path, f"--ops={op}", "--minutes=12", "--item_seconds=300")
    assert done.returncode == 0, done.stdout
    ran = {(row["case"], row["impl"]) for row in report["rows"]}
    small = [bench for bench in catalogue.benches(op) if bench.small]
    assert {case for case, impl in ran if impl == "xla"} == {bench.case for bench in small}
    assert any(impl.endswith("_interpret") for _, impl in ran)
    assert all(row["right"] for row in report["rows"]) and not report["no_time"]


def row(op, case, impl="triton", **values):
    same = {"op": op, "case": case, "impl": impl, "small": False, "bytes": 10**8, "right": True}
    return same | values


def verdicts(rows, platform="cuda"):
    report = {"rows": rows, "facts": {"platform": platform}}
    return [(target["verdict"], target["worst"]) for target in device_report.targets(report)]


def test_a_target_is_its_worst_case_and_needs_right_results():
    fast, slow = row("quantize", "a", copy_share=0.9), row("quantize", "b", copy_share=0.7)
    assert verdicts([fast])[0] == ("pass", "a")
    assert verdicts([fast, slow])[0] == ("fail", "b")
    assert verdicts([fast, slow | {"small": True}])[0] == ("pass", "a")
    assert verdicts([fast, slow | {"bytes": 10**6}])[0] == ("pass", "a")  # a launch takes longer
    assert verdicts([fast, slow | {"impl": "xla"}])[0] == ("pass", "a")
    assert verdicts([fast, {**slow, "right": False, "copy_share": 0.9}])[0][0] == "fail"
    assert verdicts([row("quantize", "a", failed="crash")])[0] == ("fail", None)
    assert verdicts([fast], "cpu")[0][0] == "not measured"
    assert verdicts([])[0] == ("not measured", None)


def test_what_matters_most_comes_first_and_ops_take_turns():
    items = [
        {"op": op, "case": "c", "impl": impl, "small": small, "bytes": 10**8}
        for op in ("token_logprob", "quantize", "fake_quant")
        for impl in ("xla", "triton")
        for small in (True, False)
    ]
    order = [
        (item["op"], item["impl"], item["small"]) for item in device_report.by_importance(items)
    ]
    assert order[:2] == [("quantize", "triton", False), ("fake_quant", "triton", False)]
    assert order[2:6] == [
        ("token_logprob", "triton", False),
        ("token_logprob", "triton", True),
        ("quantize", "triton", True),
        ("fake_quant", "triton", True),
    ]
    assert {impl for _, impl, _ in order[6:]} == {"xla"}
    assert len(order) == len(items)


def test_shares_are_of_the_measured_ceilings_and_of_kernels_alone():
    facts = {"ceilings": {"copy": 4e12, "compute": {"bf16": 8e14}}}
    timed = {"bytes": 10**9, "operations": 10**11, "kind": "bf16", "seconds": 1.0}
    timed |= {"kernel_seconds": 5e-4, "xla_seconds": 2e-3, "baseline_seconds": 2e-3}
    timed |= {"xla_kernel_seconds": 1e-3, "baseline_kernel_seconds": None}
    got = device_report.shares(timed, facts)
    assert got["copy_share"] == pytest.approx(0.5) and got["compute_share"] == pytest.approx(0.25)
    assert got["gb_s"] == pytest.approx(2000)
    assert got["xla_ratio"] == pytest.approx(2) and got["baseline_ratio"] == pytest.approx(4)
    assert "copy_share" not in device_report.shares({"op": "a"}, facts)  # it was not timed


PROFILE = """
planes { id: 1 name: "/device:GPU:0"
  lines { id: 1 name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 1000000 } }
  lines { id: 2 name: "Stream #14(MemcpyD2D)"
    events { metadata_id: 1 offset_ps: 3000000 duration_ps: 2000000 } }
  lines { id: 3 name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "kern" } } }
planes { id: 2 name: "/host:CPU"
  lines { id: 1 name: "Stream" events { metadata_id: 1 offset_ps: 0 duration_ps: 70000000 } } }
"""


def test_busy_time_is_that_of_any_stream_of_the_device():
    made = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    )
    assert device_time.busy_seconds(made) == pytest.approx(6e-6)  # 0 to 5 and 9 to 10 us


def test_a_profiler_that_sees_no_device_says_so():
    assert device_time.kernel_seconds_per_call(jax.jit(jnp.copy), [(jnp.ones(8),)]) is None


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "want", "exact", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], False, 0),
        ([3.0, 4.1], [3.0, 4.0], False, 0.1 / np.sqrt(12.5)),
        ([NAN, 4.0], [NAN, 4.0], False, 0),
        ([INF, 4.0], [INF, 4.0], False, 0),
        ([NAN, 4.0], [3.0, 4.0], False, INF),
        ([3.0, 4.0], [NAN, 4.0], False, INF),
        ([INF, 4.0], [-INF, 4.0], False, INF),
        ([0.0, 1e-3], [0.0, 0.0], False, 1e-3),
        ([0.0, NAN], [0.0, NAN], True, 0),
        ([-0.0], [0.0], True, INF),  # bit for bit
        ([1.0], [np.nextafter(np.float32(1), np.float32(2))], True, INF),
        ([1.0, 2.0], [1.0], False, INF),
    ],
)
def test_differences(got, want, exact, error):
    got, want = jnp.asarray(got, jnp.float32), jnp.asarray(want, jnp.float32)
    found = kernel_check.difference({"a": got}, {"a": want}, exact=exact)
    assert found == pytest.approx(error, rel=1e-4)


def test_codes_are_compared_exactly_and_the_worst_leaf_counts():
    codes, value = jnp.asarray([1, 2], jnp.uint8), jnp.ones(2, jnp.float32)
    assert kernel_check.difference((codes, value), (codes, value), exact=False) == 0
    assert kernel_check.difference((codes, value), (codes + 1, value), exact=False) == INF
    assert kernel_check.difference((codes,), (codes.astype(jnp.int32),), exact=False) == INF
