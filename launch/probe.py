"""Measures which guidance matters, and chooses sites and layers under a byte budget.

    python launch/probe.py --start=runs/demo_cpu                     budget: 4/5 of compact guidance
    python launch/probe.py --start=runs/demo_cpu --budget=100 --set quant.guide_scale_bits=2

Rolls out one step of the run's policy with everything recorded, then recomputes the trainer's
log-probs with some of it followed. Prints what each site of each layer contributes, a comparison
with the paper's latter half of the layers, and the setting to train with. Guidance is coded as
quant.guide and its scale bits say; the default here is mantissa bits.
"""

from absl import flags

from launch import cli

_CONFIG = flags.DEFINE_string("config", "configs/demo_cpu.py", "a file with get_config()")
_START = flags.DEFINE_string("start", "runs/demo_cpu", "the run whose policy to measure")
_BUDGET = flags.DEFINE_integer("budget", None, "bytes per token", lower_bound=0)
_TRIES = flags.DEFINE_integer(
    "tries", None, "measurements for improving the choice (default: 4 a unit)", lower_bound=1
)
_SET = flags.DEFINE_multi_string("set", [], "section.field=value; may be repeated")


def main() -> None:
    from trace_jax import overrides

    settings = ["quant.guide=mantissa", *_SET.value]
    config = overrides.override(overrides.load(_CONFIG.value), settings)

    from trace_jax import sensitivity

    budget = _BUDGET.value
    if budget is None:
        budget = sensitivity.compact_bytes(config) * 4 // 5
    report = sensitivity.measure(config, _START.value, budget=budget, tries=_TRIES.value)
    print(sensitivity.describe(report, budget))


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
