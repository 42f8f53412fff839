# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One RL step by hand
#
# You will sample answers in FP4, look at the codes and the guidance the rollout recorded, run the
# trainer's forward with and without that guidance, and take one GRPO update.
#
# Hardware: a laptop's CPU. Time: about two minutes, nearly all of it compilation.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import overrides, parity, policy, stages, update
from trace_jax.data import batching
from trace_jax.formats import e2m1, get, quantize
from trace_jax.guidance import codec
from trace_jax.reward.pool import RewardPool

# %% [markdown]
# ## 1. What FP4 does to a row of numbers
# NVFP4 keeps 4-bit codes, one E4M3 scale per 16 values and one float32 global scale.

# %%
x = jax.random.normal(jax.random.key(0), (1, 32))
q = quantize(x, "nvfp4")
print("codes ", np.asarray(q.codes[0, :16]))
print("scales", np.asarray(q.scales.astype(jnp.float32)), "global", float(q.global_scale[0, 0]))
print("error ", float(jnp.abs(q.dequantize() - x).max()))

# %% [markdown]
# ## 2. A tiny policy, its FP4 sampler, and a few answers
# `stages.build` makes every stage of a run from a configuration. `sync` packs the expert weights.

# %%
config = overrides.override(overrides.load("tiny_cpu"), ["model.compute_dtype=bfloat16"])
built = stages.build(config)
params = stages.initial_params(built)
params = params | {"embed": params["embed"] * 8}  # sharper answers than a fresh model's
weights = built.sync(params, 0)
packed = weights.params["segments"][0]["moe"]["down"]["codes"]
print("the sampler holds", weights.bytes, "bytes; packed codes are", packed.dtype, packed.shape)

# %%
prompts = built.prompts.train[: config.data.prompts_per_step]
trajectories = built.generate(weights, prompts, config.rollout.group_size, jax.random.key(1))
first = trajectories[0]
print(repr(built.tokenizer.decode(first.prompt.tokens, special=True)), "->", first.response_T)
print("log-probs", first.sampler_logprobs_R, "finish", first.finish_reason)

# %% [markdown]
# ## 3. The guidance: what the rollout rounded to
# One record per site: packed codes and scale bytes of the routed experts' input, and of K and V.

# %%
for site, record in first.guidance.sites.items():
    print(f"{site:10} bits {record.bits.shape}  scales {record.scales.shape} (layers, tokens, ...)")
record = jax.tree.map(jnp.asarray, first.guidance.sites["expert_in"])
kept = codec.decode(record, format=get("nvfp4"), coding=first.guidance.spec.coding)
print("token 0, layer 0:", np.asarray(e2m1.decode(kept.values)[0, 0, :8] * kept.steps[0, 0, 0]))

# %% [markdown]
# ## 4. Rewards, advantages, a batch

# %%
texts = [built.tokenizer.response_text(t.response_T) for t in trajectories]
with RewardPool("exact") as pool:
    scored = pool.score_all(trajectories, texts)
print("rewards", [s.reward for s in scored])
gains = np.where(np.arange(len(scored)) % 2 == 0, 1.0, -1.0)  # nobody is right yet: pretend

# %%
batch = batching.collate(
    scored,
    gains,
    length=None,
    bucket_tokens=config.rollout.bucket_tokens,
    pad_id=built.tokenizer.pad_id,
    rows=len(scored),
)
print("tokens", batch.tokens_BT.shape, "trained", int(batch.loss_mask_BS.sum()))

# %% [markdown]
# ## 5. The trainer's forward: on its own, and guided
# Both sides are FP4. Rounding on its own, the trainer lands on other codes than the rollout did.


# %%
def gap(trainer: str) -> dict[str, float]:
    quant = dataclasses.replace(config.quant, trainer=trainer)
    log_probs = jax.jit(policy.make_log_probs(config.model, quant, temperature=1.0))
    found, counts = log_probs(params, batch)
    numbers = parity.parity_metrics(
        np.asarray(found), batch.sampler_logprobs_BS, batch.loss_mask_BS
    )
    return numbers | stages.summarise_sites(counts)


for trainer in ("bf16", "qat", "trace"):
    found = gap(trainer)
    mean, agreement = found["parity/logprob_abs_diff_nats"], found.get("guide/agreement")
    print(f"{trainer:6} mean log-prob gap {mean:.6f} nats, codes as in the rollout: {agreement}")

# %% [markdown]
# ## 6. One update
# The log-probs before the update are pi_old; the importance weight is pi_old / mu, capped at 5.

# %%
batch, numbers = stages.add_log_probs(built, params, None, batch)
state = update.init_state(params, update.make_optimizer(*stages.policy_optimizer_args(config)))
state, trained = stages.train(built, state, batch, step=0)
for name in ("loss/policy", "loss/importance_weight", "update/grad_norm"):
    print(f"{name:24} {trained[name]:.5f}")
assert trained["update/skipped"] == 0
