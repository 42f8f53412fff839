"""The specification of quantize: `trace_jax.formats`, row by row. Also what "xla" runs."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.packed import Packed
from trace_jax.formats import Format


def quantize(
    x: Float[Array, "*A K"], global_: Float[Array, "*#A 1"] | None, *, format: Format
) -> Packed:
    """Codes, scale bytes and factors of rows.

    Args: global_: float32 global scales; None: that of each row, if the format has one.
    """
    exact = format.pad(x.astype(jnp.float32))
    if global_ is None:
        global_ = format.row_global(exact)
    codes, scales = format.quantize_rows(exact, global_)
    factor = None if global_ is None else format.decode_scale(global_)
    return Packed(codes=format.pack_codes(codes), scales=scales, factor=factor, format=format)
