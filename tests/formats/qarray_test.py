"""Oracle: the rows of an array quantised one by one, in plain indexing."""

import pathlib

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
quantize_rows = jax.jit(nvfp4.NVFP4().quantize_rows)
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


@pytest.mark.parametrize("form", ["nvfp4", "4over6", "nvfp4:convention=vllm", "mxfp4"])
def test_gate_and_up_stored_apart_have_what_the_fused_matrix_has(form):
    """F3: up is 4 * gate, and an engine keeps one global scale for both halves."""
    gate = data(32, 48)
    halves = [jnp.asarray(gate), jnp.asarray(4 * gate)]
    apart = jax.jit(lambda a, b: formats.quantize_together([a, b], form))(*halves)
    fused = jax.jit(lambda x: formats.quantize(x, form))(jnp.concatenate(halves))
    for q, rows in zip(apart, (slice(0, 32), slice(32, 64)), strict=True):
        np.testing.assert_array_equal(q.codes, fused.codes[rows])
        np.testing.assert_array_equal(
            jax.lax.bitcast_convert_type(q.scales, jnp.uint8),
            jax.lax.bitcast_convert_type(fused.scales[rows], jnp.uint8),
        )
        if form != "mxfp4":
            assert q.global_scale.item() == fused.global_scale.item()
            alone = quantize(halves[0], form)
            assert alone.global_scale.item() != fused.global_scale.item()


def test_arrays_together_may_differ_along_shared_axes_only():
    a, b = jnp.asarray(data(2, 8, 32)), jnp.asarray(data(2, 4, 32, seed=1))
    together = jax.jit(lambda a, b: formats.quantize_together([a, b], "nvfp4", global_axes=(1, 2)))
    first, second = together(a, b)
    assert first.global_scale.shape == second.global_scale.shape == (2, 1, 1)
    np.testing.assert_array_equal(first.global_scale, second.global_scale)
    with pytest.raises(ValueError, match=r"global scales: got .*, need one shape"):
        formats.quantize_together([a, b], "nvfp4", global_axes="row")


def test_nan_is_seen_wherever_it_is_and_however_large_the_array():
    """XLA:CPU's float maximum over an axis drops NaN for some shapes, this one among them."""
    for place in (0, 77, 4095):
        x = np.ones((32, 128), np.float32)
        x.reshape(-1)[place] = np.nan
        q = quantize(jnp.asarray(x), "nvfp4")
        assert q.global_scale.item() == 1
        assert np.isnan(np.asarray(dequantize(q))).sum() == 16


def test_a_block_far_below_the_tensor_maximum_flattens_and_says_so():
    """F12: 1e-6 of the maximum is below E4M3's least scale; modelopt's rule takes that one."""
    x = data(4, 64)
    x[0, 0] = np.abs(x).max() * 2
    x[2, :32] = 1e-6 * x[0, 0]
    for form, zero in [("nvfp4", True), ("nvfp4:convention=modelopt", False), ("mxfp4", False)]:
        q = quantize(jnp.asarray(x), form)
        assert (not np.asarray(dequantize(q))[2, 16:32].any()) == zero
        if form == "nvfp4":
            assert float(q.scales[2, 1]) == 0 and not np.asarray(q.codes)[2, 16:32].any()


def test_the_source_dtype_does_not_matter_if_the_numbers_are_the_same():
    x = jnp.asarray(data(4, 32)).astype(jnp.bfloat16)
    a, b = quantize(x, "nvfp4"), quantize(x.astype(jnp.float32), "nvfp4")
    for got, want in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_qarray_is_a_pytree_that_passes_through_jit():
    x = jnp.asarray(data(4, 32))
    q = quantize(x, "nvfp4", 1)
    assert (q.format, q.axis, q.scales.dtype) == (nvfp4.NVFP4(), -1, jnp.float8_e4m3fn)
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(4, 32), (4, 2), (1, 1)]
    np.testing.assert_array_equal(dequantize(q), q.dequantize())


def test_the_examples_of_the_documentation_run():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    blocks = text.split("```python\n")[1:]
    assert blocks
    for block in blocks:  # traced, not compiled: op by op that takes ten seconds
        jax.eval_shape(lambda block=block: exec(block.partition("```")[0], {}))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "nvfp5"}, r"format: got 'nvfp5', need one of \['4over6', 'hif4', 'mxfp4', "),
        ({"global_rule": "mean"}, r"global_rule: got mean, need one of"),
        ({"global_axes": "column"}, r"global_axes: got column, need one of \['tensor', 'row'\]"),
        ({"global_axes": (0,)}, r"global_axes: got \(0,\), need axes containing axis 1"),
        ({"global_axes": (1, 2)}, r"global_axes: got 2, need an axis of an array of rank 2"),
        ({"axis": 2}, r"axis: got 2, need an axis of an array of rank 2"),
    ],
)
def test_errors_say_what_they_got_and_what_they_need(options, match):
    with pytest.raises(ValueError, match=match):
        formats.quantize(jnp.zeros((24, 32)), **({"format": "nvfp4"} | options))


@pytest.mark.parametrize("name", ["nvfp4", "4over6", "mxfp4", "mxfp8", "hif4"])
def test_a_batch_of_qarrays_made_under_vmap_decodes_like_each_of_them(name):
    x = jax.random.normal(jax.random.key(0), (3, 4, 40))
    many = jax.jit(jax.vmap(lambda x: formats.quantize(x, name)))(x)
    values = jax.jit(lambda q: q.dequantize())(many)
    for i in range(3):
        one = jax.jit(lambda x: formats.quantize(x, name))(x[i])
        np.testing.assert_array_equal(values[i], one.dequantize())
        sliced = jax.tree.map(lambda a, i=i: a[i], many)
        np.testing.assert_array_equal(sliced.dequantize(), one.dequantize())


@pytest.mark.parametrize("name", ["nvfp4", "4over6", "mxfp4", "mxfp8", "hif4"])
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,)])
def test_an_empty_array_is_quantised_to_an_empty_one(name, shape):
    q = formats.quantize(jnp.zeros(shape), name)
    assert q.codes.shape == q.dequantize().shape == shape
    assert q.scales.size == 0
