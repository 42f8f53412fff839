"""Oracle: a float64 search over the eight magnitudes on the block's power of two."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.formats import e8m0

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def search(x, bytes_):
    """Codes for blocks (n, 32) and their scale bytes; byte 0 is a block of zeros."""
    scale = np.where(bytes_ > 0, 2.0 ** (bytes_.astype(np.float64) - 127), 0)[:, None, None]
    magnitude = np.abs(x).astype(np.float64)
    magnitude = np.where(magnitude < 2.0**-126, 0, magnitude)[..., None]
    points = E2M1[EVEN_FIRST] * scale
    code = np.array(EVEN_FIRST)[np.argmin(np.abs(np.minimum(magnitude, 6 * scale) - points), -1)]
    return np.where((x < 0) & (code > 0), code + 8, code)


def parts(x, rule):
    form = formats.get("mxfp4", rule=rule)
    codes, scales = jax.jit(lambda x: form.quantize_rows(x, None))(jnp.asarray(x))
    return np.asarray(codes).reshape(-1, 32), np.asarray(scales).reshape(-1)


@pytest.mark.parametrize("rule", e8m0.RULES)
def test_every_bf16_value_gets_the_nearest_code_on_its_block_of_neighbours(rule):
    """Sorted by size, so that blocks of all magnitudes occur, subnormal to the largest."""
    finite = ALL_BF16[np.isfinite(ALL_BF16)]
    x = finite[np.argsort(np.abs(finite), kind="stable")].reshape(-1, 32)
    codes, scales = parts(x, rule)
    np.testing.assert_array_equal(codes, search(x, scales))
    assert np.all(np.diff(scales.astype(int)) >= 0)


@pytest.mark.parametrize("rule", e8m0.RULES)
def test_draws_get_the_nearest_code(rule):
    x = np.random.default_rng(0).standard_t(2, size=(512, 32)).astype(np.float32)
    x[::4] = np.round(x[::4] * 4) / 4
    codes, scales = parts(x, rule)
    np.testing.assert_array_equal(codes, search(x, scales))


def test_only_floor_saturates():
    """7.9 lies above 6 of a scale of 1; the other rules take a scale of 2."""
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = 7.9, -7.9
    for rule, want in {"floor": 6.0, "ceil": 8.0, "even": 8.0, "round_up": 8.0}.items():
        form = formats.get("mxfp4", rule=rule)
        both = jax.jit(lambda x, form=form: (q := formats.quantize(x, form), q.dequantize()))
        q, values = both(jnp.asarray(x))
        np.testing.assert_array_equal(values[0, :2], [want, -want])
        assert q.scales.dtype == jnp.float8_e8m0fnu and q.global_scale is None


def test_a_block_below_the_least_scale_flattens_to_zero_with_byte_0():
    """2^-127 is subnormal in float32, and backends flush it: byte 0 means zero, documented."""
    x = np.full((2, 32), 2.0**-125, np.float32)
    x[1] = 2.0**-124  # the least magnitude that "floor" keeps: 4 * 2^-126
    codes, scales = parts(x, "floor")
    np.testing.assert_array_equal(scales, [0, 1])
    assert not codes[0].any() and np.all(codes[1] == 6)
