"""Compares precision modes of one experiment: same data, same keys, same starting policy.

    python launch/compare.py                                  bf16, qat, trace-full, trace-compact
    python launch/compare.py --start=runs/demo_cpu --lags=0,1,2,3 --set steps=8
    python launch/compare.py --modes=qat,trace-full,trace-mantissa,trace-last-1

Modes: bf16 (no FP4 at all), naive (FP4 rollout, BF16 trainer), qat (both round on their own),
trace-full (4-bit codes, all layers), trace-mantissa (1 bit, all layers), trace-compact (1 bit,
latter half: the paper's), trace-lean (the same with 2 bits a scale), trace-last-1 (1 bit, last
layer), trace-hidden (trace-full, and the input of the second expert matmul too), configured (the
quant section as it is, with --set). Prints the table and writes comparison.json and comparison.png
to the workdir. The same command again continues where it was stopped.
"""

from absl import flags

from launch import cli

_CONFIG = flags.DEFINE_string("config", "configs/demo_cpu.py", "a file with get_config()")
_WORKDIR = flags.DEFINE_string("workdir", None, "output folder (default: runs/compare_<name>)")
_MODES = flags.DEFINE_list("modes", ["bf16", "qat", "trace-full", "trace-compact"], "see above")
_LAGS = flags.DEFINE_list("lags", ["0"], "how many versions old the rollouts are")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "one run of every arm for each")
_START = flags.DEFINE_string(
    "start", None, "a run to start from, {seed} is replaced (default: a warm start per seed)"
)
_SET = flags.DEFINE_multi_string("set", [], "section.field=value; may be repeated")


def main() -> None:
    from trace_jax import overrides

    config = overrides.override(overrides.load(_CONFIG.value), _SET.value)
    lags, seeds = cli.integers("--lags", _LAGS.value), cli.integers("--seeds", _SEEDS.value)

    import pathlib

    from trace_jax import compare, report

    workdir = pathlib.Path(_WORKDIR.value or f"runs/compare_{config.name}")
    rows = compare.compare(
        config, workdir, modes=_MODES.value, lags=lags, seeds=seeds, start=_START.value
    )
    print(report.comparison_table(rows, compare.COLUMNS))
    print(report.comparison_plot(rows, workdir / "comparison.png"))


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
