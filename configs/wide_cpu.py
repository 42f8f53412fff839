"""Eight layers of width 512, for measuring guidance: scales have as many blocks as in real models.

    python launch/train.py --config=configs/wide_cpu.py                 a warm start, no GRPO
    python launch/probe.py --config=configs/wide_cpu.py --start=runs/wide_cpu \\
        --set quant.guide_scale_bits=2 --set quant.guide_global_bits=16

Cost:     1.5 minutes on 2 cores, then 1 for the probe.
Expect:   the table of docs/guidance.md: the paper's compact mode costs 592 bytes a token, the
          choice 430 with a smaller gap.
"""

import dataclasses

from configs import tiny_cpu
from trace_jax import config as cfg


def get_config() -> cfg.Config:
    tiny = tiny_cpu.get_config()
    return dataclasses.replace(
        tiny,
        name="wide_cpu",
        steps=0,
        model=cfg.Model(
            width=512, layers=8, heads=4, kv_heads=2, head_dim=64, experts=4, expert_ffn=128
        ),
        data=dataclasses.replace(tiny.data, train_size=256, prompts_per_step=8),
        warm_start=cfg.WarmStart(max_steps=60, batch=32, check_every=30, stop_at_accuracy=None),
    )
