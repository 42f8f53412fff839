"""Arithmetic on tiles inside kernels: int32 bytes to float32, without tables or subnormals.

Written with comparisons, shifts and exact products only, so that Triton, Mosaic and XLA give the
same bits. `trace_jax.formats` is the specification.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.formats import Format


def e2m1_value(code: Int[Array, "*A"]) -> Float[Array, "*A"]:
    """float32 of E2M1 codes 0..15 in int32.

    The eight magnitudes are a convex, piecewise linear function of the code: max(m/2, m-2, 2m-8).
    """
    m = (code & 7).astype(jnp.float32)
    magnitude = jnp.maximum(jnp.maximum(m * 0.5, m - 2.0), 2.0 * m - 8.0)
    return jnp.where(code >= 8, -magnitude, magnitude)


def e4m3_value(byte: Int[Array, "*A"]) -> Float[Array, "*A"]:
    """float32 of E4M3 bytes in int32; NaN for 0x7F and 0xFF."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = jax.lax.bitcast_convert_type(((exponent + 120) << 23) | (mantissa << 20), jnp.float32)
    small = mantissa.astype(jnp.float32) * 2.0**-9
    magnitude = jnp.where(exponent == 0, small, normal)
    magnitude = jnp.where((byte & 127) == 127, jnp.float32(jnp.nan), magnitude)
    return jnp.where(byte >= 128, -magnitude, magnitude)


def e8m0_value(byte: Int[Array, "*A"]) -> Float[Array, "*A"]:
    """float32 of E8M0 bytes in int32: 0 for byte 0, NaN for 0xFF."""
    bits = jnp.where(byte == 255, 0x7FC00000, byte << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_value(byte: Int[Array, "*A"], format: Format) -> Float[Array, "*A"]:
    """float32 of a format's scale bytes in int32."""
    return e4m3_value(byte) if format.name == "nvfp4" else e8m0_value(byte)
