"""Oracle: the rows of an array quantised one by one, in plain indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.formats import nvfp4

# Compiled as a whole: op by op, each shape would be compiled a dozen times.
quantize = jax.jit(
    formats.quantize, static_argnames=("format", "axis", "global_rule", "global_axes")
)
dequantize = jax.jit(lambda q, dtype=jnp.float32: q.dequantize(dtype), static_argnames="dtype")
quantize_rows = jax.jit(nvfp4.quantize_rows)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def data(*shape, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(*shape[:-1], 1)) * 2)
    return (rng.normal(size=shape) * scale).astype(np.float32)


def values_by_hand(q):
    """code * fl(scale * global), index by index."""
    codes, scales = np.asarray(q.codes), np.asarray(q.scales).astype(np.float32)
    globals_, out = np.asarray(q.global_scale), np.zeros(codes.shape, np.float32)
    for index in np.ndindex(codes.shape):
        block = list(index)
        block[q.axis] //= 16
        shared = tuple(i if n > 1 else 0 for i, n in zip(index, globals_.shape, strict=True))
        step = np.float32(scales[tuple(block)] * globals_[shared])
        value = np.float32(E2M1[codes[index] & 7]) * step
        out[index] = -value if codes[index] & 8 else value
    return out


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_axis_is_the_quantised_one_whatever_its_place(axis):
    x = data(16, 32, 48)
    got = quantize(jnp.asarray(x), "nvfp4", axis)
    last = quantize(jnp.asarray(np.moveaxis(x, axis, -1)), "nvfp4")
    np.testing.assert_array_equal(np.moveaxis(np.asarray(got.codes), axis, -1), last.codes)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(got.scales), axis, -1), last.scales)
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(dequantize(got)), axis, -1), dequantize(last)
    )
    np.testing.assert_array_equal(np.moveaxis(np.asarray(got.packed()), axis, -1), last.packed())
    assert got.scales.shape[axis] * 16 == x.shape[axis] == got.packed().shape[axis] * 2


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("tensor", (1, 1, 1)),
        ("row", (2, 3, 1)),
        ((2,), (2, 3, 1)),
        ((1, 2), (2, 1, 1)),
        ((0, -1), (1, 3, 1)),
        ((0, 1, 2), (1, 1, 1)),
    ],
)
def test_global_axes_share_one_global_scale(axes, shape):
    x = data(2, 3, 32)
    q = quantize(jnp.asarray(x), "nvfp4", global_axes=axes)
    assert q.global_scale.shape == shape
    for index in np.ndindex(shape):
        part = tuple(
            slice(None) if n == 1 else slice(i, i + 1) for i, n in zip(index, shape, strict=True)
        )
        own = quantize(jnp.asarray(x[part]), "nvfp4", global_axes="tensor")
        np.testing.assert_array_equal(np.asarray(q.codes)[part], own.codes)
        assert np.asarray(q.global_scale)[index] == np.asarray(own.global_scale).item()
        assert own.global_scale.item() == np.float32(np.abs(x[part]).max()) * np.float32(1 / 2688)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("axes", ["tensor", "row"])
def test_dequantize_is_code_times_step(axis, axes):
    q = quantize(jnp.asarray(data(32, 48)), "nvfp4", axis, global_axes=axes)
    want = values_by_hand(q)
    np.testing.assert_array_equal(dequantize(q), want)
    np.testing.assert_array_equal(dequantize(q, jnp.bfloat16), want.astype(jnp.bfloat16))


@pytest.mark.parametrize("rule", ["amax", "pow2", "one"])
def test_quantising_the_values_again_changes_nothing_under_the_same_global_scale(rule):
    q = quantize(jnp.asarray(data(16, 64)), "nvfp4", global_rule=rule)
    codes, scales = quantize_rows(dequantize(q), q.global_scale)
    full = np.asarray(q.codes & 7).reshape(16, 4, 16).max(-1) == 7
    normal = np.asarray(q.scales).astype(np.float32) >= 2.0**-6
    assert normal.any() and np.all(full[normal])
    first = jax.lax.bitcast_convert_type(q.scales, jnp.uint8)
    np.testing.assert_array_equal(np.asarray(scales)[full], np.asarray(first)[full])
    each = np.repeat(full, 16, axis=-1)
    np.testing.assert_array_equal(np.asarray(codes)[each], np.asarray(q.codes)[each])


def test_the_source_dtype_does_not_matter_if_the_numbers_are_the_same():
    x = jnp.asarray(data(4, 32)).astype(jnp.bfloat16)
    a, b = quantize(x, "nvfp4"), quantize(x.astype(jnp.float32), "nvfp4")
    for got, want in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_qarray_is_a_pytree_that_passes_through_jit():
    x = jnp.asarray(data(4, 32))
    q = quantize(x, "nvfp4", 1)
    assert (q.format, q.axis, q.scales.dtype) == ("nvfp4", 1, jnp.float8_e4m3fn)
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(4, 32), (4, 2), (1, 1)]
    np.testing.assert_array_equal(dequantize(q), q.dequantize())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "mxfp4"}, r"quantize: format: got mxfp4, need one of \['nvfp4'\]"),
        ({"global_rule": "mean"}, r"global_rule: got mean, need one of"),
        ({"global_axes": "column"}, r"global_axes: got column, need one of \['tensor', 'row'\]"),
        ({"global_axes": (0,)}, r"global_axes: got \(0,\), need axes containing axis 1"),
        ({"global_axes": (1, 2)}, r"global_axes: got 2, need an axis of an array of rank 2"),
        ({"axis": 2}, r"axis: got 2, need an axis of an array of rank 2"),
        ({"axis": 0}, r"got 24, need a multiple of 16\. Fix: pad the axis with zeros"),
    ],
)
def test_errors_say_what_they_got_and_what_they_need(options, match):
    with pytest.raises(ValueError, match=match):
        formats.quantize(jnp.zeros((24, 32)), **({"format": "nvfp4"} | options))
