"""Rows that are hard to round, and NVFP4 and MXFP4 by counting midpoints in numpy.

Independent of the library: grids from ml_dtypes, every midpoint compared, products rounded to
float32 as the specification says, errors of Four Over Six as whole numbers in float64.
"""

import ml_dtypes
import numpy as np

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E2M1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
TINY = np.float32(2.0**-126)


def hard_rows(M, K, dtype, seed=0):
    """Zeros, ties, tiny, huge, an outlier, NaN, Inf, an empty block; then rows of any size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((M, K)).astype(np.float32)
    special = [
        lambda row: row * 0,
        lambda row: np.resize(np.arange(-8, 8, dtype=np.float32) * 0.25, row.shape),
        lambda row: row * np.float32(1e-30),
        lambda row: row * np.float32(3e37),
        lambda row: np.where(np.arange(K) == K // 3, np.float32(1e6), row),
        lambda row: np.round(row * 4) / 4,
        lambda row: np.where(np.arange(K) < 16, np.float32(0), row),
        lambda row: np.where(np.arange(K) == K // 2, np.float32(np.nan), row),
        lambda row: np.where(np.arange(K) == K // 2, np.float32(-np.inf), row),
        lambda row: np.clip(row, -1, 1) * np.float32(3.38e38),
        lambda row: row * np.float32(1e-38),
        lambda row: row * np.float32(1e-36),
    ]
    # where there are few rows, others of them for every seed
    for m in range(min(M, len(special) + 1)):
        which = (m + seed) % (len(special) + 1)
        x[m] = special[which](x[m]) if which < len(special) else x[m]
    x[len(special) + 1 :] *= np.exp(3 * rng.standard_normal((max(0, M - 13), K))).astype(np.float32)
    return x.astype(dtype)


def count_passed(x, grid, step):
    """Codes of |x| on a grid of magnitudes times a step: midpoints passed, ties to even codes."""
    x = x[..., None]
    bounds = ((grid[:-1] + grid[1:]) / 2).astype(np.float32) * step[..., None]
    odd = np.arange(len(grid) - 1) % 2 == 1
    return np.sum((x > bounds) | ((x == bounds) & odd), axis=-1)


def largest(x, axis, **keep):
    """max|x|, NaN if there is one."""
    return np.max(np.abs(x), axis=axis, initial=0, **keep)


def row_global(x, format):
    """float32 (M, 1), or None."""
    if format.name == "mxfp4" or format.global_rule == "one":
        return None
    scales = {"max": 448, "static_4": 448}.get(format.scale_rule, 256)
    target = np.float32(1 / ({"static_4": 4}.get(format.scale_rule, 6) * scales))
    amax = largest(x, 1, keepdims=True)
    g = np.maximum(amax, np.float32(2.0**-100)) * target
    if format.global_rule == "pow2":
        with np.errstate(invalid="ignore"):
            g = np.exp2(np.ceil(np.log2(g.astype(np.float64)))).astype(np.float32)
    return np.where(np.isfinite(amax) & (amax >= TINY), g, np.float32(1))


def nvfp4_scale(amax, g, top):
    """E4M3 bytes: midpoints times `top` are exact, the product with g rounds once."""
    byte = count_passed(np.where(np.isfinite(amax), amax, 0), np.float32(top) * E4M3, g)
    return np.where(np.isfinite(amax), byte, 127)


def mxfp4_scale(amax, rule):
    """E8M0 bytes by what the rules mean, in float64."""
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(amax.astype(np.float64)))
    power = np.ldexp(1.0, np.where(np.isfinite(exponent), exponent, 0).astype(int))
    fraction = amax / power
    more = {
        "floor": False,
        "ceil": fraction > 1,
        "even": fraction >= 1.75,  # rounds up to 2 with one bit of mantissa
        "round_up": fraction > 1.5,
    }[rule]
    byte = np.where(amax >= TINY, np.maximum(exponent + more + 127 - 2, 0), 0)
    return np.where(np.isfinite(amax), byte, 255).astype(np.int64)


def decode_scale(byte, format):
    if format.name == "nvfp4":
        return byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.where(byte == 0, 0.0, np.ldexp(1.0, np.minimum(byte, 254) - 127)).astype(np.float32)
    return np.where(byte == 255, np.float32(np.nan), scale)


def magnitudes(x, step):
    """E2M1 magnitude codes of values under their steps; 0 where there is nothing to round."""
    step = np.broadcast_to(step, x.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        code = count_passed(np.abs(x), E2M1, step)
        return np.where((step > 0) & (np.abs(x) >= TINY), code, 0)


def block_error(x, value, amax, rule):
    """Whole numbers: errors on the grid of 24 bits of the block's binade."""
    with np.errstate(divide="ignore"):
        exponent = np.where(amax >= TINY, np.floor(np.log2(np.where(amax > 0, amax, 1))), -127)
    unit = np.ldexp(1.0, (exponent - 23).astype(int))[..., None]
    x, value = x.astype(np.float64), value.astype(np.float64)
    value = np.where(np.isinf(value), 2.0**128, value)  # what overflows is the next power of two
    given, got = (np.floor(np.where(np.abs(v) < TINY, 0, np.abs(v)) / unit) for v in (x, value))
    error = np.minimum(np.abs(got - given), 2**24 - 1).astype(object)  # exact: Python integers
    if rule == "mse":
        return np.sum(error * error, axis=-1)
    return np.sum(error, axis=-1) if rule == "mae" else np.max(error, axis=-1)


def quantize(x, format, g=None):
    """(codes (M, padded), scale bytes, global scales or None) of float32 rows."""
    x = np.pad(x, [(0, 0), (0, -x.shape[1] % format.block)]).astype(np.float32)
    g = row_global(x, format) if g is None else g
    blocks = x.reshape(len(x), x.shape[1] // format.block, format.block)
    amax, factor = largest(blocks, 2), np.float32(1) if g is None else g
    factor = np.broadcast_to(factor, amax.shape)

    def step_of(byte):
        return (decode_scale(byte, format) * factor)[..., None].astype(np.float32)

    rule = getattr(format, "scale_rule", "max")
    with np.errstate(invalid="ignore", over="ignore"):
        if format.name == "mxfp4":
            byte = mxfp4_scale(amax, format.rule)
        elif rule in ("max", "static_4"):
            byte = nvfp4_scale(amax, factor, {"max": 6, "static_4": 4}[rule])
        else:
            tried = [nvfp4_scale(amax, factor, top) for top in (6, 4)]
            ok = np.isfinite(amax)
            clean = np.where(ok[..., None], blocks, 0)
            values = [E2M1[magnitudes(clean, step_of(b))] * step_of(b) for b in tried]
            values = [np.where(ok[..., None], v, 0) for v in values]
            errors = [block_error(clean, v, np.where(ok, amax, 0), rule) for v in values]
            byte = np.where((errors[1] < errors[0]) & ok, tried[1], tried[0])
        code = magnitudes(blocks, step_of(byte))
    code = np.where((blocks < 0) & (code > 0), code + 8, code)
    return code.reshape(x.shape).astype(np.uint8), byte.astype(np.uint8), g
