"""Checks every kernel on the device at hand: result, time, and share of what the device can do.

    python launch/gpu_check.py                        at most 8 minutes, runs/gpu_check.json
    python launch/gpu_check.py --minutes=2 --ops=quantize,fp4_grouped_matmul

First the ceilings are measured: bytes copied a second, and matrix products. Then for each op, case
and implementation that the device can run: the result against the op's specification, the time
against plain XLA and against the same work in BF16, and the shares of the ceilings. What matters
most comes first; what there was no time for is listed. Ops run in processes of their own: a kernel
that crashes or hangs is one failure. The JSON is written anew after each item. On a CPU this is a
dry run: small cases only, kernels interpreted. Exit status: 0 if all that ran is right, else 1.
"""

import sys
import time
from typing import Any

from absl import flags

from launch import cli

_MINUTES = flags.DEFINE_float("minutes", 8.0, "stop after this long", lower_bound=0.1)
_JSON = flags.DEFINE_string("json", "runs/gpu_check.json", "where to write the results")
_OPS = flags.DEFINE_list("ops", [], "only these; default: all")
_ITEM = flags.DEFINE_float("item_seconds", 90.0, "one item that takes longer has failed")
_PACKAGE = flags.DEFINE_string("package", "pallas_kernels", "where the ops are: for tests")


def main() -> None:
    from launch.benches import device_report
    from launch.benches.workers import Workers
    from pallas_kernels import catalogue

    deadline = time.monotonic() + 60 * _MINUTES.value
    ops = _OPS.value or list(catalogue.OPS)
    if _PACKAGE.value == "pallas_kernels" and not set(ops) <= set(catalogue.OPS):
        raise ValueError(f"--ops: got {','.join(ops)}, need some of {','.join(catalogue.OPS)}.")
    report: dict[str, Any] = {"facts": {}, "rows": [], "no_time": [], "targets": []}
    with Workers(_PACKAGE.value, _ITEM.value, deadline) as workers:
        workers.start(["facts", *ops])
        report["facts"] = workers.ask("facts", "facts")
        print(device_report.facts(report["facts"]), flush=True)
        device_report.write(report, _JSON.value)
        items = []
        for op in ops:
            listed = workers.ask(op, "cases", op=op)
            if isinstance(listed, dict) and listed.get("out_of_time"):
                report["no_time"].append({"op": op, "case": "", "impl": ""})
            elif isinstance(listed, dict):  # it could not even say what there is
                report["rows"].append({"op": op, "case": "", "impl": ""} | listed)
                print(device_report.line(report["rows"][-1]), flush=True)
            else:
                items += listed
        for item in device_report.by_importance(items):
            if time.monotonic() >= deadline:
                report["no_time"].append(item)
                continue
            asked = {name: item[name] for name in ("op", "case", "impl")}
            answer = workers.ask(item["op"], "check", **asked)
            if answer.get("out_of_time"):
                report["no_time"].append(item)
                continue
            row = device_report.shares(item | answer, report["facts"])
            report["rows"].append(row)
            print(device_report.line(row), flush=True)
            device_report.write(report, _JSON.value)
    report["targets"] = device_report.targets(report)
    device_report.write(report, _JSON.value)
    print(device_report.summary(report, _JSON.value))
    sys.exit(0 if device_report.all_right(report) else 1)


if __name__ == "__main__":
    cli.run(main, __doc__)
