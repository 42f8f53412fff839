"""Oracle: each library's arithmetic in numpy float32, one operation a line, and ml_dtypes' casts.

`peers_test` compares with what TransformerEngine and ModelOpt themselves computed; vLLM cannot be
installed for that, so its order of operations is checked here only.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.formats import nvfp4, nvfp4_conventions

F = np.float32
CONVENTIONS = ["te", "modelopt", "vllm"]


def e4m3(x):
    """(bytes, values), saturating as hardware does."""
    cast = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return cast.view(np.uint8), cast.astype(np.float32)


def e2m1(y):
    code = np.clip(y, F(-6), F(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return np.where(code == 8, 0, code)


def oracle(x, convention):
    """(codes, scale bytes, global, values) of a matrix with one global scale."""
    top = np.abs(x).max()
    peaks = np.abs(x.reshape(len(x), -1, 16)).max(-1)
    sixth = F(1 / 6)
    if convention == "modelopt":
        whole = top / F(2688)
        wanted = peaks / (F(6) * whole)
        scales, value = e4m3(np.where(peaks == 0, F(1), np.maximum(wanted, F(2.0**-9))))
        step = value * whole
        y = x / step.repeat(16, -1)
    else:
        whole = F(2688) / top
        wanted = peaks * (whole * sixth) if convention == "te" else whole * (peaks * sixth)
        scales, value = e4m3(wanted)
        with np.errstate(divide="ignore"):
            step = value * (F(1) / whole) if convention == "te" else value / whole
            encode = F(1) / step if convention == "te" else whole / value
        y = x * np.where(value > 0, encode, F(0)).repeat(16, -1)
    codes = e2m1(y)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.where(codes & 8, F(-1), F(1)) * grid[codes & 7] * step.repeat(16, -1)
    return codes, scales, whole, values


def draws(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, size=(64, 64)).astype(np.float32)
    x[0] = np.round(x[0] * 4) / 4
    x[1, :16] = 0
    x[2, :16] *= F(1e-6)
    x[3:20] *= F(2.0) ** -np.arange(17, dtype=np.float32)[:, None]
    return x * F(10.0 ** (seed - 3))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("seed", range(7))
def test_codes_scales_global_and_values_have_the_bits_of_the_written_out_arithmetic(
    convention, seed
):
    x = draws(seed)
    form = nvfp4.NVFP4(convention=convention)

    @jax.jit
    def everything(x):
        g = form.global_scale(jnp.max(jnp.abs(x)).reshape(1, 1))
        codes, scales = form.quantize_rows(x, g)
        return codes, scales, g, form.dequantize_rows(codes, scales, g), form.decode_scale(g)

    *got, decode = (np.asarray(a) for a in everything(jnp.asarray(x)))
    for name, a, b in zip(
        ("codes", "scales", "global", "values"), got, oracle(x, convention), strict=True
    ):
        np.testing.assert_array_equal(a, np.broadcast_to(b, a.shape), err_msg=name)
    assert decode.item() == (got[2] if convention == "modelopt" else F(1) / got[2]).item()


def test_near_ties_of_the_block_scale_each_library_s_own_order_of_operations_decides():
    """Largest values within 3 ulps of a tie, under 200 maxima: the orders do differ there."""
    tops = np.random.default_rng(0).uniform(1, 2, (200, 1)).astype(np.float32)
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ties = (values[8:-1] + values[9:]) / 2
    want = {}
    for convention in CONVENTIONS:
        whole = tops / F(2688) if convention == "modelopt" else F(2688) / tops
        peaks = (ties * 6 * tops / 2688).astype(np.float32).view(np.int32)[..., None]
        peaks = (peaks + np.arange(-3, 4, dtype=np.int32)).view(np.float32).reshape(200, -1)
        if convention == "modelopt":
            wanted = peaks / (F(6) * whole)
        else:
            sixth = F(1 / 6)
            wanted = peaks * (whole * sixth) if convention == "te" else whole * (peaks * sixth)
        want[convention] = e4m3(wanted)[0]
        call = jax.jit(lambda p, g, c=convention: nvfp4_conventions.block_scales(p, g, c))
        np.testing.assert_array_equal(
            call(jnp.asarray(peaks), jnp.asarray(whole)), want[convention]
        )
    assert (want["te"] != want["vllm"]).any() and (want["te"] != want["modelopt"]).any()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_zero_block_has_the_scale_that_the_library_gives_it_and_no_byte_is_nan(convention):
    """F1: a zero block beside a tiny tensor maximum; F2: a tensor of zeros."""
    form = nvfp4.NVFP4(convention=convention)
    call = jax.jit(lambda x: (g := form.row_global(x), *form.quantize_rows(x, g)))
    zero_scale = 0x38 if convention == "modelopt" else 0  # 1.0
    for top in (0.0, 1e-38, 1e-20, 1.0, 3e38):
        x = np.zeros((1, 32), np.float32)
        x[0, 16] = top
        g, codes, scales = (np.asarray(a) for a in call(jnp.asarray(x)))
        assert scales[0, 0] == zero_scale and scales.max() <= 0x7E
        assert not codes[0, :16].any() and np.isfinite(g).all() and np.all(g > 0)
        if top == 0:
            assert g == 1
        elif top >= 1e-20:
            assert scales[0, 1] == 0x7E and codes[0, 16] == 7  # 448 and 6


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_without_a_global_scale_the_block_scale_is_the_step(convention):
    form = nvfp4.NVFP4(convention=convention, global_rule="one")
    assert form.global_scale(jnp.ones((1, 1))) is None
    x = jnp.asarray(draws(3)[:4])
    _, scales = jax.jit(lambda x: form.quantize_rows(x, None))(x)
    np.testing.assert_array_equal(form.steps(scales, None), nvfp4.scale_value(scales))
