"""Measures the parts that are meant to be fast, each in turn with a peer in the same process.

    python launch/bench.py                         every suite
    python launch/bench.py --suites=formats,step --repeats=11 --json=bench.json

Suites: formats (quantisers against a memory copy; guided against plain fake quantisation),
guidance (codec and store), step (a training step with guidance against one without), kernels.
Times are medians; "ratio" is ours / peer, median and range over the pairs. Give it an otherwise
idle machine.

    python launch/bench.py --suites=kernels

prints for each op and case of pallas_kernels the bytes and operations that it cannot do without,
the least time that they take on an H200, B200, TPU v6e and TPU7x (m: moving bytes takes longest, c:
computing), and for each implementation the time on this device, with its share of the copy
bandwidth measured here, or "not measured": on a CPU plain XLA runs the small cases. Last, grouped
matmuls over 8, 32 and 128 experts at the same active work, against what else JAX offers.
"""

import importlib
import json
import os
import pathlib
import platform

from absl import flags

from launch import cli

SUITES = ("formats", "guidance", "step", "kernels")
_SUITES = flags.DEFINE_list("suites", list(SUITES), "which to run")
_REPEATS = flags.DEFINE_integer("repeats", 7, "timed rounds after a warm-up", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "also write the rows to this file")


_HEADER = f"{'ms':>9} {'GB/s':>7} {'ratio':>7}  range          peer"


def main() -> None:
    import jax

    for suite in _SUITES.value:
        if suite not in SUITES:
            raise ValueError(f"--suites: got {suite}, need some of {','.join(SUITES)}.")
    machine = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    rows = []
    for suite in _SUITES.value:
        module = importlib.import_module(f"launch.benches.{suite}")
        print(f"\n{suite:<44} {getattr(module, 'HEADER', _HEADER)}")
        line = getattr(module, "line", _line)
        for row in module.run(_REPEATS.value):
            print(line(row), flush=True)
            rows.append(row | {"suite": suite})
    if _JSON.value:
        text = json.dumps({"machine": machine, "rows": rows}, indent=1)
        pathlib.Path(_JSON.value).write_text(text, encoding="utf-8")


def _line(row: dict) -> str:
    speed = f"{row['gb_s']:7.2f}" if "gb_s" in row else " " * 7
    low, high = row["ratio_range"]
    spread = f"{low:.2f}-{high:.2f}"
    return (
        f"{row['name']:<44} {row['seconds'] * 1e3:9.2f} {speed} {row['ratio']:7.2f}"
        f"  {spread:<13}  {row['peer']}"
    )


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
