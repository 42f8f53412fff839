"""Packed operands in numpy float64, decoded by ml_dtypes."""

import ml_dtypes
import numpy as np


def values(x):
    """(code * scale, factor) of a `Packed`, or (array, 1) of a plain one."""
    if not hasattr(x, "codes"):
        return np.asarray(x, np.float64), np.ones((1,) * x.ndim)
    codes = np.asarray(x.codes)
    if x.format.name == "mxfp8":
        elements = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        pair = np.stack([codes & 15, codes >> 4], axis=-1).reshape(
            *codes.shape[:-1], 2 * codes.shape[-1]
        )
        elements = pair.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    kind = ml_dtypes.float8_e4m3fn if x.format.name == "nvfp4" else ml_dtypes.float8_e8m0fnu
    scales = np.asarray(x.scales).view(kind).astype(np.float64)
    factor = np.ones((1,) * codes.ndim) if x.factor is None else np.asarray(x.factor, np.float64)
    return elements * np.repeat(scales, x.format.block, axis=-1), factor


def product(x, w):
    """x w^T with the factors, and the sum of its magnitudes, which bounds rounding."""
    (a, a_factor), (b, b_factor) = values(x), values(w)
    width = min(a.shape[1], b.shape[1])
    a, b = a[:, :width] * a_factor, b[:, :width] * b_factor
    return a @ b.T, np.abs(a) @ np.abs(b).T
