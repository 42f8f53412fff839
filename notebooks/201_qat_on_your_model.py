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
# # Quantisation-aware training of a model you already have
#
# You will put a recipe over three models that know nothing of FP4 (a Linen MLP, an NNX transformer,
# google-tunix's Qwen3-MoE), read the audit, record a rollout's rounding, and train guided by it.
#
# Hardware: a laptop's CPU. Time: about one minute. The third model needs google-tunix, without its
# dependencies: `python -m pip install --no-deps -r requirements-peers.lock`.

# %%
import importlib.util
import sys
import types
import warnings

# %%
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from trace_jax import qat

# %% [markdown]
# ## 1. A stock Linen MLP
# A rule says by path what is FP4. Everything that was left alone is in the table, with the reason.


# %%
class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(nn.relu(nn.Dense(64, name="up")(x)))


x = jax.random.normal(jax.random.key(0), (4, 32))
variables = Mlp().init(jax.random.key(1), x)

# %%
rule = qat.Rule("up", weights="nvfp4", inputs="nvfp4")
q = qat.linen(Mlp(), qat.Recipe(rules=(rule,), exclude=("head",)), variables, x)
print(q.audit)
print("moved by", float(jnp.abs(q.apply(q.params, x) - Mlp().apply(variables, x)).max()))

# %% [markdown]
# A misspelt path is an error before anything runs.

# %%
try:
    qat.linen(Mlp(), qat.Recipe(rules=(rule,), exclude=("haed",)), variables, x)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 2. An NNX transformer of stock modules
# K and V are quantised where they enter attention. The last layer is kept as it is.


# %%
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, rngs=rngs, decode=False)
        self.mlp = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), is_causal=True)
        return x + self.mlp(nnx.gelu(self.norm(x)))


# %%
class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


# %%
tokens = jax.random.randint(jax.random.key(2), (8, 12), 0, 16)
rules = (
    qat.Rule("layers/*/mlp", weights="nvfp4", inputs="nvfp4"),
    qat.Rule("layers/*/attention", tensors="nvfp4:global_rule=one", guide="mantissa"),
    qat.Rule("layers/*/attention/*", weights="nvfp4"),
)
recipe = qat.Recipe(rules=rules, layers="layers/*", keep_last=1)
q = qat.nnx(Transformer(nnx.Rngs(0)), recipe, tokens)
print(q.audit)

# %% [markdown]
# ## 3. Record, then follow
# The sampler's weights differ a little from the trainer's, here by a BF16 cast and 0.2 %. On its
# own the trainer rounds some values to the other side; following the records, it lands where the
# sampler did.

# %%
low = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32) * 1.002, q.params)
sampled, records = jax.jit(q.record)(low, tokens)
guided, stats = jax.jit(q.guided)(q.params, records, tokens)
plain = jax.jit(q.apply)(q.params, tokens)
print("gap of plain QAT", float(jnp.abs(plain - sampled).mean()))
print("gap when guided ", float(jnp.abs(guided - sampled).mean()))
q.audit.check(stats)  # every site of the audit really produced codes

# %% [markdown]
# ## 4. Train
# `q.guided` is a pure function of parameters and records: any optimiser will do.


# %%
def loss(params, records):
    logits, _ = q.guided(params, records, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


# %%
step = jax.jit(jax.value_and_grad(loss))
for i in range(3):
    value, gradient = step(low, records)
    low = jax.tree.map(lambda w, g: w - 0.1 * g, low, gradient)
    print(f"step {i}: loss {float(value):.4f}")

# %% [markdown]
# ## 5. google-tunix's Qwen3-MoE
# Its expert weights are three-axis parameters that the model's code slices, so tools that watch
# operations pass them by. The recipe names them; the router keeps its unquantised input.
# (The first cell loads tunix's model file without the rest of that package.)

# %%
root = importlib.util.find_spec("tunix").submodule_search_locations[0]
for name in ("", ".models", ".models.qwen3", ".generate", ".utils"):
    sys.modules[f"tunix{name}"] = package = types.ModuleType(f"tunix{name}")
    package.__path__ = [root + name.replace(".", "/")]
warnings.simplefilter("ignore", DeprecationWarning)
qwen3 = importlib.import_module("tunix.models.qwen3.model")

# %%
shape = {"num_layers": 2, "vocab_size": 16, "embed_dim": 32, "hidden_dim": 32, "num_heads": 2}
shape |= {"head_dim": 16, "num_kv_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
shape |= {"rope_theta": 10000, "norm_eps": 1e-6, "use_tied_embedding": False}
model = qwen3.Qwen3(qwen3.ModelConfig(**shape, param_dtype=jnp.float32), rngs=nnx.Rngs(0))
causal = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (8, 12, 12))
inputs = (tokens, jnp.broadcast_to(jnp.arange(12), (8, 12)), None, causal)

# %%
experts = qat.Rule(
    "layers/*/mlp", weights="nvfp4", inputs="nvfp4", axis=-2,
    share_scale=("gate_proj", "up_proj"), bypass=("router",),
)  # fmt: skip
recipe = qat.Recipe(rules=(experts,), exclude=("**/router",), layers="layers/*")
q = qat.nnx(model, recipe, *inputs)
print(q.audit)

# %%
(logits, _), records = jax.jit(q.record)(q.params, *inputs)
(guided, _), stats = jax.jit(q.guided)(q.params, records, *inputs)
q.audit.check(stats)
assert (guided == logits).all()
print("logits moved by", float(jnp.abs(logits - model(*inputs)[0]).max()))
