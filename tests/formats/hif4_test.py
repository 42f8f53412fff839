"""Oracle: the format's encoding written again in numpy, float64 but where it says bf16 or fl."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.formats import e2m1, hif4

FORM = hif4.HiF4()
quantize_rows = jax.jit(lambda x: FORM.quantize_rows(x, None))
dequantize_rows = jax.jit(lambda c, s: FORM.dequantize_rows(c, s, None))
E6M2 = np.array([(1 + m / 4) * 2.0**e for e in range(-48, 16) for m in range(4)])[:-1]  # 255 values


def bf16(x):
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def product(a, b):
    """fl(a b) in float32."""
    return (np.asarray(a, np.float32) * np.asarray(b, np.float32)).astype(np.float64)


def oracle(x):
    """(codes, bytes (n, 4), values) of blocks of 64, (n, 64)."""
    v16 = np.abs(x).reshape(-1, 16, 4).max(-1).astype(np.float64)
    v8 = v16.reshape(-1, 8, 2).max(-1)
    factor = bf16(product(v8.max(-1), bf16(np.float32(1 / 7))).astype(np.float32))
    distance = np.abs(np.clip(factor, E6M2[0], E6M2[-1])[:, None] - E6M2)
    tied = np.where(distance == distance.min(-1, keepdims=True), np.arange(255) % 2, 2)
    byte = np.argmin(tied, axis=-1)  # nearest, the even one first
    scale = E6M2[byte][:, None]
    inverse = bf16((1 / scale).astype(np.float32))
    e8 = product(v8, inverse) >= 4
    e16 = product(v16, inverse) * 2.0 ** -e8.repeat(2, -1).astype(float) >= 2
    power = 2.0 ** (e8.repeat(2, -1).astype(int) + e16)
    scaled = product(np.abs(x), inverse).reshape(-1, 16, 4) / power[..., None]
    code = np.minimum(np.floor(4 * scaled + 0.5), 7).reshape(-1, 64)
    values = np.sign(x) * code / 4 * (scale * power).repeat(4, -1)
    codes = np.where((x < 0) & (code > 0), code + 8, code)
    low = np.packbits(e8, axis=-1, bitorder="little")
    high = np.packbits(e16, axis=-1, bitorder="little")
    return codes, np.concatenate([byte[:, None], low, high], axis=-1), values


def compare(x):
    codes, scales = quantize_rows(jnp.asarray(x))
    want_codes, want_scales, want_values = oracle(x.reshape(-1, 64))
    np.testing.assert_array_equal(np.asarray(scales).reshape(-1, 4), want_scales)
    np.testing.assert_array_equal(np.asarray(codes).reshape(-1, 64), want_codes)
    values = dequantize_rows(codes, scales)
    np.testing.assert_array_equal(np.asarray(values).reshape(-1, 64), want_values)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("power", [-52, -20, 0, 14, 17])
def test_codes_scales_and_values_are_those_of_the_written_out_encoding(dtype, power):
    """From blocks that partly flatten to blocks that saturate; ties in every fourth row."""
    rng = np.random.default_rng(power + 100)
    x = rng.standard_t(3, size=(64, 128)).astype(np.float32)
    x[::4] = np.round(x[::4] * 8) / 8
    x *= np.exp2(rng.integers(-3, 1, (64, 32))).repeat(4, -1).astype(np.float32)
    compare((x * np.float32(2.0**power)).astype(dtype).astype(np.float32))


def test_every_bf16_value_in_a_block_with_a_given_maximum():
    """All 65,280 finite values, each in a block whose largest is at most that of the block."""
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    every = every[np.isfinite(every) & (np.abs(every) <= 6.5)]
    every = np.pad(every, (0, -every.size % 63)).reshape(-1, 63)
    compare(np.concatenate([np.full((len(every), 1), 6.5, np.float32), every], axis=-1))


def test_super_scales_have_their_values_and_reciprocals():
    every = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(hif4.super_value(jnp.asarray(every)), E6M2)
    np.testing.assert_array_equal(
        hif4.reciprocal(jnp.asarray(every)), bf16((1 / E6M2).astype(np.float32))
    )
    assert np.isnan(hif4.super_value(jnp.array([255], jnp.uint8)))[0]


def test_a_zero_block_has_the_least_scale_and_what_is_not_finite_is_nan():
    x = np.zeros((4, 64), np.float32)
    x[1, 5], x[2, 5], x[3, 5] = np.inf, np.nan, 3e38
    codes, scales = quantize_rows(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(scales)[:3], [[0] * 4, [255, 0, 0, 0], [255, 0, 0, 0]])
    assert not np.asarray(codes)[:3].any()
    values = np.asarray(dequantize_rows(codes, scales))
    assert np.isnan(values[1:3]).all() and not values[0].any()
    assert values[3, 5] == 7 * 49152  # saturates: there is no global scale


def test_a_bit_of_each_group_doubles_the_step():
    scales = np.array([[48 * 4, 0b00000001, 0b00000001, 0b10000000]], np.uint8)  # S = 1
    steps = np.asarray(FORM.steps(jnp.asarray(scales), None))[0]
    np.testing.assert_array_equal(steps, [4, 2] + [1] * 13 + [2])
    bits = e2m1.unpack_bits(jnp.asarray(scales))
    assert bits.shape == (1, 32)


def test_quantising_again_changes_values_only_for_the_two_reasons_documented():
    """S follows the largest value, which rounding can move; and 1.75 * bf16(1/1.75) is below 1."""
    x = np.random.default_rng(5).standard_t(3, size=(4096, 64)).astype(np.float32)
    codes, scales = quantize_rows(jnp.asarray(x))
    values = dequantize_rows(codes, scales)
    codes_again, scales_again = quantize_rows(values)
    again = np.asarray(dequantize_rows(codes_again, scales_again))
    same = np.all(again == np.asarray(values), axis=-1)
    byte, byte_again = np.asarray(scales)[:, 0], np.asarray(scales_again)[:, 0]
    assert np.all(same | (byte != byte_again) | (byte % 4 == 3))
    assert 0.7 < same.mean() < 0.95
