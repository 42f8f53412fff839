"""Trains one experiment: warm start, rollouts, rewards, updates, evaluation, plots.

    python launch/train.py                                       the demo: 10 minutes on 2 cores
    python launch/train.py --config=configs/tiny_cpu.py          the same, tiny
    python launch/train.py --set quant.trainer=qat --workdir=runs/qat
    python launch/train.py --set steps=20 --set optim.learning_rate=1e-4
    python launch/train.py --set data.task_args=min_word_len:3,max_word_len:4
    python launch/train.py --set warm_start=none --set run.init_from=runs/demo_cpu
    python launch/train.py --set data.task=none --set data.path=prompts.jsonl

Every field of trace_jax/config.py can be set. The same command again continues the run where it was
stopped. What it writes: metrics.jsonl, plots, samples and checkpoints, in the run directory.
"""

from absl import flags

from launch import cli

_CONFIG = flags.DEFINE_string(
    "config", "configs/demo_cpu.py", "a file with get_config(), or the name of one in configs/"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "the run directory (default: runs/<config name>)")
_SET = flags.DEFINE_multi_string("set", [], "section.field=value; may be repeated")


def main() -> None:
    from trace_jax import overrides  # JAX reads the environment that cli.run has set

    config = overrides.override(overrides.load(_CONFIG.value), _SET.value)

    from trace_jax import loop  # slow to import: after the errors that a user can make

    loop.run(config, _WORKDIR.value or f"runs/{config.name}")


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
