"""Oracle: NVFP4 of a matrix in numpy, E4M3 values from ml_dtypes, nearest by search in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.qat import sites

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

NVFP4 = formats.get("nvfp4")


def quantize_weight(w, dtype):
    return jax.jit(sites.quantize_weight, static_argnums=(1, 2))(w, NVFP4, dtype)


def weight_codes(w):
    return jax.jit(sites.weight_codes, static_argnums=1)(w, NVFP4)


def weights(seed=0, experts=3, rows=8, width=64):
    rng = np.random.default_rng(seed)
    spread = np.array([0.02, 1.0, 30.0])[:experts, None, None]
    return (rng.normal(size=(experts, rows, width)) * spread).astype(np.float32)


def matrix_by_hand(w_OK):
    """Values of one matrix: bf16 source, one global scale, blocks of 16 along K."""
    w = w_OK.astype(ml_dtypes.bfloat16).astype(np.float32)
    g = np.abs(w).max() * np.float32(1 / 2688)
    blocks = w.reshape(len(w), -1, 16)
    amax = np.abs(blocks).max(-1).astype(np.float64)
    scale = E4M3[np.argmin(np.abs(amax[..., None] - 6 * E4M3 * np.float64(g)), axis=-1)]
    step = (scale * g)[..., None]
    even_first = [0, 2, 4, 6, 1, 3, 5, 7]
    distance = np.abs(np.abs(blocks)[..., None] - E2M1[even_first] * np.float64(step)[..., None])
    magnitude = E2M1[even_first][np.argmin(distance, axis=-1)].astype(np.float32)
    return (np.sign(blocks) * magnitude * step).reshape(w.shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_expert_matrix_is_nvfp4_with_its_own_global_scale(dtype):
    w = weights()
    got = quantize_weight(jnp.asarray(w), dtype)
    want = np.stack([matrix_by_hand(matrix) for matrix in w])
    np.testing.assert_array_equal(got, want.astype(dtype))
    assert got.dtype == dtype


def test_the_source_is_the_bf16_cast_of_the_master():
    """F7: rounding the float32 master instead moves codes and scales, and the sides part."""
    w = jnp.asarray(weights(rows=64, width=256))
    cast = w.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(
        quantize_weight(w, jnp.float32), quantize_weight(cast, jnp.float32)
    )
    codes, scales, global_ = weight_codes(w)
    for got, want in zip((codes, scales, global_), weight_codes(cast), strict=True):
        np.testing.assert_array_equal(got, want)
    unrounded, _ = NVFP4.quantize_rows(w, global_)  # what quantising the master itself would give
    assert 0 < np.mean(np.asarray(unrounded) != np.asarray(codes)) < 0.05


def test_gate_and_up_share_one_global_scale():
    """F3: up = 4 * gate, stacked along the output axis of each expert."""
    gate = weights(rows=4)
    w = np.concatenate([gate, 4 * gate], axis=1)
    _, scales, global_ = weight_codes(jnp.asarray(w).astype(jnp.bfloat16).astype(jnp.float32))
    peak = np.abs(w).max((1, 2)).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(global_).reshape(-1), peak * np.float32(1 / 2688))
    assert global_.shape == (3, 1, 1)
    steps = np.asarray(NVFP4.steps(scales, global_))
    ratio = steps[:, 4:] / steps[:, :4]
    np.testing.assert_allclose(ratio, np.full(ratio.shape, 4), rtol=2.0**-4)  # E4M3's half an ulp


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_reaches_the_float32_master_unchanged(dtype):
    w = jnp.asarray(weights()).at[0].set(0)
    cotangent = jax.random.normal(jax.random.key(0), w.shape, jnp.float32).astype(dtype)
    _, pull = jax.vjp(lambda w: quantize_weight(w, dtype), w)
    gradient = pull(cotangent)[0]
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, cotangent.astype(jnp.float32))


def test_a_zero_matrix_and_a_zero_block_stay_zero():
    w = weights()
    w[1], w[2, 0, 16:32] = 0, 0
    got = np.asarray(quantize_weight(jnp.asarray(w), jnp.float32))
    assert not got[1].any() and not got[2, 0, 16:32].any() and np.all(np.isfinite(got))
