"""Rotary positions against transformers' own functions."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import hf_models
from trace_jax import config as cfg
from trace_jax.models import attention

hf_models.need_torch()
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402


def llama3(scaling, theta, head_dim):
    factor, low, high, context = scaling
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )


@pytest.mark.parametrize(
    ("scaling", "theta", "head_dim"),
    [
        ((8.0, 1.0, 4.0, 8192), 500_000.0, 128),  # Llama 3.1
        ((32.0, 1.0, 4.0, 8192), 500_000.0, 64),  # Llama 3.2
        ((4.0, 2.0, 3.0, 64), 100.0, 20),
    ],
)
def test_llama3_frequencies_are_those_of_transformers(scaling, theta, head_dim):
    model = cfg.Model(rope_llama3=scaling, rope_theta=theta, head_dim=head_dim)
    got = np.asarray(attention.rotary_frequencies(model))
    embedding = modeling_llama.LlamaRotaryEmbedding(llama3(scaling, theta, head_dim))
    want = embedding.inv_freq.numpy()
    plain = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
    ratio = want / plain
    assert ratio.max() > 0.99  # the case has pairs that stay,
    assert ratio.min() < 1.01 / scaling[0]  # pairs that slow down fully,
    assert np.any((ratio < 0.98) & (ratio > 1.05 / scaling[0]))  # and pairs between
    np.testing.assert_allclose(got, want, rtol=2e-6)  # float32 powers


@pytest.mark.parametrize("fraction", [1.0, 0.25, 0.5])
def test_partial_rotation_is_that_of_transformers(fraction):
    model = cfg.Model(head_dim=32, rope_theta=1000.0, rotary_fraction=fraction)
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": fraction}
    config = transformers.Qwen3NextConfig(head_dim=32, rope_parameters=rope)
    embedding = modeling_qwen3_next.Qwen3NextRotaryEmbedding(config)
    rng = np.random.default_rng(0)
    x_BTHK = rng.standard_normal((2, 7, 3, 32)).astype(np.float32)
    position_BT = rng.integers(0, 300, (2, 7)).astype(np.int32)
    q = torch.from_numpy(x_BTHK)
    cos, sin = embedding(q, torch.from_numpy(position_BT))
    want, _ = modeling_qwen3_next.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)
    got = attention.rotary(model, jnp.asarray(position_BT))(jnp.asarray(x_BTHK))
    np.testing.assert_allclose(got, want.numpy(), atol=1e-4)  # angles up to 300 in float32
    untouched = x_BTHK[..., int(32 * fraction) :]
    np.testing.assert_array_equal(got[..., int(32 * fraction) :], untouched)
    assert np.abs(got - x_BTHK).max() > 1


def test_positions_turn_by_the_scaled_frequencies():
    """The angle between a rotated and an unrotated unit vector, in float64."""
    scaling = (4.0, 2.0, 3.0, 64)
    model = cfg.Model(rope_llama3=scaling, rope_theta=100.0, head_dim=20)
    frequency = modeling_llama.LlamaRotaryEmbedding(llama3(scaling, 100.0, 20)).inv_freq.numpy()
    x_BTHK = jnp.concatenate([jnp.ones((1, 1, 1, 10)), jnp.zeros((1, 1, 1, 10))], axis=-1)
    got = attention.rotary(model, jnp.full((1, 1), 29, jnp.int32))(x_BTHK)[0, 0, 0]
    angle = 29 * frequency.astype(np.float64)
    np.testing.assert_allclose(got, np.concatenate([np.cos(angle), np.sin(angle)]), atol=2e-5)
