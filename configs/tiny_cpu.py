"""The demo shrunk until compiling is all its cost: for tests and notebooks, not for accuracy.

    python launch/train.py --config=configs/tiny_cpu.py

Two layers, a handful of warm-start steps, two GRPO steps; every stage and every FP4 site is there.
Cost:     about 4 minutes on 2 busy cores, nearly all of it the first compilation.
Expect:   accuracy near 0; the mismatch metrics are meaningful all the same.
"""

from trace_jax import config as cfg


def get_config() -> cfg.Config:
    return cfg.Config(
        name="tiny_cpu",
        steps=2,
        model=cfg.Model(
            width=64,
            layers=2,
            heads=2,
            kv_heads=1,
            experts=4,
            expert_ffn=32,
        ),
        data=cfg.Data(
            task="spell_backward",
            task_args=(("min_word_len", 3), ("max_word_len", 4)),
            train_size=64,
            eval_size=8,
            prompts_per_step=4,
        ),
        warm_start=cfg.WarmStart(max_steps=4, batch=8, stop_at_accuracy=None, check_every=4),
        rollout=cfg.Rollout(group_size=4, max_new_tokens=6, bucket_batch=8),
        optim=cfg.Optim(micro_batch=8),
        run=cfg.Run(
            eval_every=2, eval_samples=1, checkpoint_every=1, tensorboard=False, plots=False
        ),
    )
