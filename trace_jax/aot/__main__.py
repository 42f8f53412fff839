"""Is every quantisation of the training step still there after the target's compiler?

    python -m trace_jax.aot --target=h200
    python -m trace_jax.aot --target=h200,b200,v6e,tpu7x --set quant.trainer=qat

Needs no accelerator, but the compilers: `make setup-aot`. Prints for each site how many of its
rounding decisions (see trace_jax/aot/survival.py) are written and how many are alive. Exit status:
0 all kept, 1 something was deleted, 2 it could not be said.
"""

import argparse
import sys
from collections.abc import Sequence

from trace_jax.aot import check, targets
from trace_jax.aot.compile import ROOT, CompileError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trace_jax.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help=f"of {', '.join(targets.TARGETS)}; or all")
    tiny = str(ROOT / "configs" / "tiny_cpu.py")
    parser.add_argument("--config", default=tiny, help="a file with get_config()")
    parser.add_argument(
        "--set", action="append", default=[], metavar="section.field=value", dest="settings"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one target")
    chosen = parser.parse_args(arguments)
    names = list(targets.TARGETS) if chosen.target == "all" else chosen.target.split(",")
    try:
        for name in names:
            targets.spec(name)
        reports = [
            check.check(name, chosen.config, chosen.settings, timeout_s=chosen.timeout)
            for name in names
        ]
    except (ValueError, FileNotFoundError, CompileError) as error:  # ours to explain
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(check.table(reports))
    return 0 if all(report.kept for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
