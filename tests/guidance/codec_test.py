"""Oracle: numpy's own bit packing."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.guidance import codec

# Compiled as a whole: op by op, each shape would be compiled a dozen times.
encode = jax.jit(codec.encode, static_argnums=3)
decode = jax.jit(codec.decode, static_argnums=1)
KINDS = ["codes", "mantissa"]


def outcomes(*leading, width=48, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (*leading, width)).astype(np.uint8)
    codes[codes == 8] = 0
    scales = rng.integers(0, 127, (*leading, width // 16)).astype(np.uint8)
    global_ = rng.uniform(0.1, 2, (*leading, 1)).astype(np.float32)
    return codes, scales, global_


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_global", [True, False])
def test_what_is_encoded_comes_back(shape, kind, has_global):
    codes, scales, g = outcomes(*shape)
    record = encode(
        jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(g) if has_global else None, kind
    )
    values, step = decode(record, kind)
    np.testing.assert_array_equal(values, codes if kind == "codes" else codes & 1)
    scale = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(step, scale * g if has_global else scale)


def test_the_bytes_are_nibbles_low_first_or_bits_low_first():
    codes, scales, _ = outcomes(7)
    full = encode(jnp.asarray(codes), jnp.asarray(scales), None, "codes")
    np.testing.assert_array_equal(full.bits, codes[:, 0::2] + 16 * codes[:, 1::2])
    compact = encode(jnp.asarray(codes), jnp.asarray(scales), None, "mantissa")
    want = np.packbits(codes % 2, axis=-1, bitorder="little")
    np.testing.assert_array_equal(compact.bits, want)
    np.testing.assert_array_equal(compact.scales, scales)
    assert full.bits.dtype == compact.bits.dtype == jnp.uint8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_global", [True, False])
def test_site_bytes_are_the_bytes_of_the_arrays(kind, has_global):
    codes, scales, g = outcomes(width=2048)
    record = encode(
        jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(g) if has_global else None, kind
    )
    leaves = [record.bits, record.scales, *([record.global_scale] if has_global else [])]
    assert codec.site_bytes(2048, kind, int(has_global)) == sum(a.nbytes for a in leaves)


def test_the_kind_is_checked():
    codes, scales, _ = outcomes()
    with pytest.raises(ValueError, match=r"guidance kind: got sign, need one of \['codes', 'man"):
        codec.encode(jnp.asarray(codes), jnp.asarray(scales), None, "sign")
