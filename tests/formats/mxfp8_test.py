"""Oracle: ml_dtypes' cast of x / scale, which is exact as the scale is a power of two."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.formats import e8m0


@pytest.mark.parametrize("rule", e8m0.RULES)
def test_codes_are_those_of_the_cast(rule):
    x = np.random.default_rng(0).standard_t(2, size=(256, 64)).astype(np.float32)
    x *= np.float32(2.0) ** np.arange(-100, 100, 200 / 256)[:, None].astype(np.float32)
    form = formats.get("mxfp8", rule=rule)
    codes, scales = jax.jit(lambda x: form.quantize_rows(x, None))(jnp.asarray(x))
    scale = 2.0 ** (np.asarray(scales).astype(np.float64) - 127)
    scaled = (x / scale.repeat(32, -1)).clip(-448, 448).astype(np.float32)
    cast = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes, np.where(cast == 0x80, 0, cast))
    peaks = np.abs(x.reshape(256, 2, 32)).max(-1) / scale
    bounds = {"floor": (256, 512), "ceil": (128, 256), "even": (248, 496), "round_up": (224, 448)}
    low, high = bounds[rule]
    assert np.all((peaks >= low) & (peaks <= high))


def test_it_packs_as_it_is_and_decodes_to_values():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 40)).astype(np.float32))
    q, packed, values = jax.jit(
        lambda x: (q := formats.quantize(x, "mxfp8"), q.packed(), q.dequantize())
    )(x)
    np.testing.assert_array_equal(packed, q.codes)
    assert q.scales.shape == (4, 2)
    np.testing.assert_allclose(values, x, rtol=2.0**-4, atol=2.0**-9)
