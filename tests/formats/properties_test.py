"""What holds of every format and option alike, on the same hard numbers."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from trace_jax import formats
from trace_jax.formats import e8m0
from trace_jax.formats.base import parity

NVFP4 = [
    "nvfp4",
    "nvfp4:global_rule=pow2",
    "nvfp4:global_rule=one",
    "nvfp4:convention=te",
    "nvfp4:convention=modelopt",
    "nvfp4:convention=vllm",
    "nvfp4:block_shape=16x16",
    "nvfp4:scale_rule=static_4",
    "4over6",
    "nvfp4:scale_rule=mae",
    "nvfp4:scale_rule=abs_max",
    "4over6:block_shape=16x16",
]
MX = [f"{name}:rule={rule}" for name in ("mxfp4", "mxfp8") for rule in e8m0.RULES]
ALL = [*NVFP4, *MX, "hif4"]
KINDS = ["nvfp4:convention=te", "4over6:block_shape=16x16", "mxfp4", "mxfp8:rule=even", "hif4"]
WIDTH = 128
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def hard_rows():
    """32 rows: draws, ties, zeros, outliers, the ends of float32, subnormal numbers."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(2, size=(32, WIDTH)).astype(np.float32)
    x[0] = 0
    x[1, 64:] = 0
    x[2, :64] *= np.float32(1e-6)
    x[3] = np.round(x[3] * 4) / 4
    x[4, 7] = 3e4
    x[5] *= np.repeat(np.float32(2.0) ** -np.arange(0, 32, 4), 16)
    x[6] = np.where(x[6] < 0, -0.0, 0.0)
    x[7, ::3] = -0.0
    x[8] = 6 * 448
    return x


def extreme_rows():
    """Rows that a tensor's global scale cannot serve together; each is quantised by itself."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8, WIDTH)).astype(np.float32)
    x[0] *= np.float32(1e38) / np.abs(x[0]).max()
    x[1] *= np.float32(1e-36)
    x[2] = rng.integers(0, 1 << 23, WIDTH, dtype=np.uint32).view(np.float32)  # subnormal
    x[3, 3] = 2.0**-126
    x[4] = np.float32(2.0**-126)
    x[5] *= np.float32(1e-30)
    x[6] *= np.float32(1e30)
    x[7, :64] = np.float32(2.9e38)
    return x


@functools.cache
def run(text, per_row=False):
    """One compiled function: everything that the tests ask about a format."""
    form = formats.get(text)
    tiled = "16x16" in text

    def everything(x):
        largest = jnp.max(jnp.abs(x), axis=-1 if per_row and not tiled else None, keepdims=True)
        largest = largest.reshape(-1, 1)
        global_ = form.global_scale(largest)
        codes, scales = form.quantize_rows(x, global_)
        steps = form.steps(scales, global_)
        values = form.dequantize_rows(codes, scales, global_)
        low, high = form.element.bracket(x, form.spread(steps))
        again = form.quantize_rows(values, global_)
        return {
            "codes": codes,
            "scales": scales,
            "steps": steps,
            "values": values,
            "low": low,
            "high": high,
            "codes again": again[0],
            "scales again": again[1],
            "values again": form.dequantize_rows(*again, global_),
            "rounded": form.round_rows(x, scales, global_),
        }

    return form, jax.jit(everything)


def results(text, x, per_row=False):
    form, everything = run(text, per_row)
    return form, {k: np.asarray(v) for k, v in everything(jnp.asarray(x)).items()}


@pytest.fixture(scope="module", params=ALL)
def hard(request):
    """(format, input, results) of the hard rows."""
    x = hard_rows()
    return *results(request.param, x), x


def index_of(form, codes):
    return np.asarray(form.element.index(jnp.asarray(codes))).astype(np.int32)


def test_the_code_is_one_of_the_two_around_the_value_and_one_bit_tells_which(hard):
    """What guidance rests on: bracket, and the alternating lowest bit (TRACE, RECONSTRUCT)."""
    form, got, _ = hard
    index = index_of(form, got["codes"])
    low, high = got["low"].astype(np.int32), got["high"].astype(np.int32)
    assert np.all((low <= index) & (index <= high) & (high - low <= 1))
    bit = np.asarray(parity(jnp.asarray(got["codes"])))
    low_bit = np.asarray(parity(form.element.from_index(jnp.asarray(got["low"]))))
    np.testing.assert_array_equal(np.where(low_bit == bit, low, high), index)


def test_codes_scales_and_steps_have_their_shapes_and_minus_zero_is_never_written(hard):
    form, got, x = hard
    assert got["codes"].shape == x.shape and got["codes"].dtype == np.uint8
    assert got["scales"].shape == (32, WIDTH // form.block * form.scale_bytes)
    assert got["steps"].shape == (32, WIDTH // form.span) and got["steps"].dtype == np.float32
    assert form.block % form.span == 0
    assert not np.any(got["codes"] == 1 << (form.element.BITS - 1))
    assert got["codes"].max() < 1 << form.element.BITS


def test_rounding_on_the_own_scales_gives_the_own_codes(hard):
    _, got, _ = hard
    np.testing.assert_array_equal(got["rounded"], got["codes"])


def test_finite_input_decodes_to_finite_numbers_of_the_same_sign_and_zero_to_zero(hard):
    form, got, x = hard
    assert np.all(np.isfinite(got["values"])) and np.all(np.isfinite(got["steps"]))
    assert np.all((got["values"] == 0) | (np.sign(got["values"]) == np.sign(x)))
    assert not got["values"][x == 0].any() and not got["codes"][x == 0].any()
    if form.scale_dtype != jnp.uint8:
        assert np.all(np.isfinite(got["scales"].view(form.scale_dtype).astype(np.float32)))


def test_quantising_the_values_again_gives_the_same_values(hard):
    """Codes and scales may change (MX "ceil" and "round_up" find a finer scale), values may not.

    But for E4M3 scales of 1, 2 or 3 times 2^-9, whose neighbours are far, and HiF4 (its own test).
    """
    form, got, _ = hard
    same = (got["values"] == got["values again"]).reshape(32, -1, form.block).all(-1)
    if form.name == "nvfp4":
        assert np.all(same | ((got["scales"] >= 1) & (got["scales"] <= 3)))
    elif form.name != "hif4":
        assert same.all()


@pytest.mark.parametrize("text", ALL)
def test_the_ends_of_float32_are_no_exception(text):
    """Each row by itself: huge, tiny, subnormal; nothing becomes NaN, subnormal numbers are 0."""
    x = extreme_rows()
    if "16x16" in text:
        x = x[:, None].repeat(16, axis=1)
        form, everything = run(text)
        got = {k: np.asarray(v)[:, 0] for k, v in jax.vmap(everything)(jnp.asarray(x)).items()}
        x = x[:, 0]
    else:
        form, got = results(text, x, per_row=True)
    assert not np.isnan(got["values"]).any() and not np.isnan(got["steps"]).any()
    assert np.isfinite(got["values"][:7]).all()
    assert not got["values"][2].any()  # subnormal
    index = index_of(form, got["codes"])
    assert np.all((got["low"] <= index) & (index <= got["high"]))
    if "global_rule=one" not in text and text != "hif4":  # those cannot reach that far
        error = np.abs(got["values"] - x)[[0, 5, 6]]
        assert np.all(error <= np.abs(x[[0, 5, 6]]).max(-1, keepdims=True) / 3)


@pytest.mark.parametrize("text", ALL)
def test_a_block_with_nan_or_inf_decodes_to_nan_and_hides_nothing(text):
    x = np.random.default_rng(2).normal(size=(32, WIDTH)).astype(np.float32)
    x[1, 5], x[2, 70], x[3, 100] = np.nan, np.inf, -np.inf
    form, got = results(text, x)
    bad = ~np.isfinite(x).reshape(32, -1, form.block).all(-1)
    if "16x16" in text:
        bad = bad.reshape(2, 16, -1).any(1, keepdims=True).repeat(16, 1).reshape(32, -1)
    nan = np.isnan(got["values"]).reshape(32, -1, form.block)
    np.testing.assert_array_equal(nan, np.broadcast_to(bad[..., None], nan.shape))
    assert np.isnan(got["steps"]).sum() == bad.sum() * (form.block // form.span)


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4:convention=vllm", *KINDS])
def test_every_bf16_value_is_rounded_to_the_nearest_of_the_written_out_values(text):
    """float64 search over the values of all codes on the block's steps; ties may go either way."""
    finite = ALL_BF16[np.isfinite(ALL_BF16) & (np.abs(ALL_BF16) < 1e38)]
    order = np.argsort(np.abs(finite), kind="stable")
    x = finite[order][: finite.size // WIDTH * WIDTH].reshape(-1, WIDTH)
    form, got = results(text, x, per_row=True)
    last = (1 << (form.element.BITS - 1)) - 1 - (form.name == "mxfp8")
    grid = np.asarray(form.element.decode(jnp.arange(last + 1, dtype=jnp.uint8)), np.float64)
    magnitude = np.abs(x).astype(np.float64)
    magnitude[magnitude < 2.0**-126] = 0
    step = got["steps"].astype(np.float64).repeat(form.span, axis=-1)
    near = np.searchsorted((grid[:-1] + grid[1:]) / 2, magnitude / np.where(step > 0, step, np.inf))
    best = np.abs(magnitude - grid[near] * step)
    error = np.abs(magnitude - np.abs(got["values"].astype(np.float64)))
    # float32: fl(midpoint * step); HiF4 multiplies by a bf16 reciprocal, which is 1 part in 500 off
    slack = 2.0**-22 if form.name != "hif4" else 2.0**-8
    assert np.all(error - best <= slack * magnitude)


@pytest.mark.parametrize("text", KINDS[1:])  # te: its division alone takes seconds op by op
def test_eager_jit_vmap_scan_and_grad_agree_to_the_bit(text):
    form = formats.get(text)
    x = jnp.asarray(hard_rows())
    global_ = form.global_scale(jnp.max(jnp.abs(x)).reshape(1, 1))

    def rows(x):
        codes, scales = form.quantize_rows(x, global_)
        return codes, scales, form.dequantize_rows(codes, scales, global_)

    def loss(x):
        out = rows(x)
        return jnp.sum(x * jax.lax.stop_gradient(out[2])), out

    want = jax.jit(rows)(x)
    tiles = x.reshape(2, 16, WIDTH)
    others = {
        "eager": rows(x),
        "vmap": jax.tree.map(lambda a: a.reshape(32, -1), jax.jit(jax.vmap(rows))(tiles)),
        "scan": jax.tree.map(
            lambda a: a.reshape(32, -1),
            jax.jit(lambda t: jax.lax.scan(lambda c, x: (c, rows(x)), 0, t)[1])(tiles),
        ),
        "grad": jax.jit(jax.value_and_grad(jax.checkpoint(loss), has_aux=True))(x)[0][1],
    }
    for name, got in others.items():
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("text", KINDS)
@pytest.mark.parametrize("spec", [("a", "b"), ("b", "a"), (None, ("a", "b"))])
def test_a_2x2_mesh_gives_the_bits_of_one_device_even_where_shards_cut_blocks(text, spec):
    """Width 80 over two or four devices: 40 or 20 values a shard, blocks of 16, 32 or 64."""
    x = np.random.default_rng(3).standard_t(2, size=(48, 80)).astype(np.float32)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = jax.device_put(jnp.asarray(x), NamedSharding(mesh, PartitionSpec(*spec)))
    both = jax.jit(lambda x: (q := formats.quantize(x, text), q.dequantize()))
    assert len(placed.addressable_shards) == 4 and placed.addressable_shards[0].data.shape[1] < 80
    for a, b in zip(
        jax.tree.leaves(both(placed)), jax.tree.leaves(both(jnp.asarray(x))), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("text", ["nvfp4", "4over6:block_shape=16x16", "mxfp8", "hif4"])
@pytest.mark.parametrize("width", [17, 80, 232, 464])
def test_odd_widths_are_padded_with_zeros_that_leave_no_trace(text, width):
    x = np.random.default_rng(width).normal(size=(16, width)).astype(np.float32)
    form = formats.get(text)
    whole = np.pad(x, [(0, 0), (0, 3 * form.block - width % form.block)])  # two blocks of zeros
    both = jax.jit(lambda x: (q := formats.quantize(x, text), q.dequantize(), q.packed()))
    short, values, packed = both(jnp.asarray(x))
    long, long_values, _ = both(jnp.asarray(whole))
    blocks = -(-width // form.block) * form.scale_bytes
    assert short.codes.shape == values.shape == x.shape and short.scales.shape == (16, blocks)
    np.testing.assert_array_equal(short.codes, long.codes[:, :width])
    np.testing.assert_array_equal(short.scales, long.scales[:, :blocks])
    np.testing.assert_array_equal(values, long_values[:, :width])
    assert not np.asarray(long.codes)[:, width:].any()
    assert packed.shape == (16, -(-width // 2) if form.element.BITS == 4 else width)


def float_operations(jaxpr):
    """Names of primitives that make floats, also in nested programs."""
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")
        ):
            if hasattr(value, "jaxpr"):
                yield from float_operations(value.jaxpr)
        if any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars):
            yield str(eqn.primitive)


@pytest.mark.parametrize("text", ALL)
def test_no_float_is_added_so_no_compiler_can_fuse_or_reorder_a_sum(text):
    """Codes and scales come of comparisons, single products and integers, whatever the backend."""
    form = formats.get(text)
    program = jax.make_jaxpr(lambda x, g: form.quantize_rows(x, g))
    names = set(float_operations(program(jnp.ones((32, WIDTH)), jnp.ones((1, 1))).jaxpr))
    assert "mul" in names or form.name.startswith("mx")
    assert not names & {
        "add",
        "sub",
        "reduce_sum",
        "reduce_max",
        "dot_general",
        "exp",
        "exp2",
        "log",
        "pow",
    }
    # nothing hangs on a quotient: of E4M3 it only says where to look
    assert "div" not in names or form.name in ("nvfp4", "mxfp8")


def test_a_float64_source_is_rounded_to_float32_first():
    """E4M3 from float64 directly and through float32 differ at -431.99999999999994 (F10)."""
    x = np.full((1, 32), -431.99999999999994)
    x[0, 1:] = 448
    assert np.float32(x[0, 0]) == -432
    both = jax.jit(lambda x: (q := formats.quantize(x, "mxfp8"), q.dequantize()))
    got, want = both(jnp.asarray(x)), both(jnp.asarray(x.astype(np.float32)))
    np.testing.assert_array_equal(got[0].codes, want[0].codes)
    assert got[1][0, 0] == -448  # -432 is a tie, and -448 the even code
