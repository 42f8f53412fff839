"""NVFP4 as other libraries round it, for bit-exact comparison with them and their checkpoints.

With vm = max|x_block|, all operations in float32, "/" correctly rounded (`division`), E4M3 nearest
even and at most 448:
    te        S = 2688 / amax;  s = E4M3(vm * (S * fl(1/6)));    step = s * (1/S)
              code of x * (1/step)
    vllm      S = 2688 / amax;  s = E4M3(S * (vm * fl(1/6)));    step = s / S
              code of x * (S/s)
    modelopt  g = amax / 2688;  s = E4M3(max(vm / (6 g), 2^-9)), 1 if vm = 0;   step = s * g
              code of x / step
S encodes (the global scale that te and vllm keep), g decodes; E2M1 codes are nearest, ties to even.
The following hold here whatever the library does: a block with NaN or Inf has scale 0x7F, all-zero
(or not finite) input has a global scale of 1, amax counts as at least 2^-100, so that nothing is
subnormal, blocks of scale 0 have codes 0, and minus zero is written as 0.
On a GPU vLLM and TransformerEngine may use approximate reciprocals; these are their references.
Source: TransformerEngine's NVFP4QuantizerRef, vLLM's nvfp4 emulation, ModelOpt's NVFP4QTensor.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from trace_jax.formats import e2m1, e4m3
from trace_jax.formats.base import product
from trace_jax.formats.division import divide

CONVENTIONS = ("te", "modelopt", "vllm")
_LARGEST = 2688.0  # 6 * 448
_SIXTH = float(np.float32(1 / 6))
_NAN_BYTE = 0x7F


def global_scale(amax: Float[Array, "*A"], convention: str) -> Float[Array, "*A"]:
    """S or g for a maximum magnitude; see the module's text."""
    usable = jnp.isfinite(amax) & (amax >= jnp.float32(2.0**-126))
    amax = jnp.where(usable, jnp.maximum(amax, jnp.float32(2.0**-100)), jnp.float32(_LARGEST))
    if convention == "modelopt":
        return divide(amax, jnp.float32(_LARGEST))
    return divide(jnp.float32(_LARGEST), amax)


def decode_scale(global_: Float[Array, "*A"], convention: str) -> Float[Array, "*A"]:
    """1/S where the global scale encodes, itself where it decodes."""
    encodes = convention in ("te", "vllm")
    return divide(jnp.float32(1), global_) if encodes else global_


def block_scales(
    amax: Float[Array, "*A N"], global_: Float[Array, "*#A 1"] | None, convention: str
) -> UInt8[Array, "*A N"]:
    """E4M3 bytes for the largest magnitude of each block."""
    finite = jnp.isfinite(amax)
    amax = jnp.where(finite, amax, jnp.float32(0))
    whole = jnp.float32(1) if global_ is None else global_
    if convention == "te":
        scale = amax * product(whole, jnp.float32(_SIXTH))
    elif convention == "vllm":
        scale = whole * product(amax, jnp.float32(_SIXTH))
    else:
        scale = divide(amax, product(jnp.float32(6), whole))
        scale = jnp.where(amax == 0, jnp.float32(1), jnp.maximum(scale, jnp.float32(2.0**-9)))
    byte = e4m3.round_nearest(scale, jnp.float32(1))
    return jnp.where(finite, byte, jnp.uint8(_NAN_BYTE))


def steps(
    scales: UInt8[Array, "*A N"], global_: Float[Array, "*#A 1"] | None, convention: str
) -> Float[Array, "*A N"]:
    """The step of each block; see the module's text."""
    value = e4m3.decode(scales)
    if global_ is None:
        return value
    if convention == "vllm":
        return divide(value, global_)
    return product(value, decode_scale(global_, convention))


def round_rows(
    x: Float[Array, "*A K"],
    scales: UInt8[Array, "*A N"],
    global_: Float[Array, "*#A 1"] | None,
    convention: str,
    spread: Callable[[Array], Array],
) -> UInt8[Array, "*A K"]:
    """The codes; `spread` repeats one number per block to its values."""
    step = steps(scales, global_, convention)
    if convention == "modelopt":
        scaled = divide(x, spread(step))  # the one division per value: no product is the same
    else:
        value = e4m3.decode(scales)
        encode = jnp.float32(1) if global_ is None else global_
        inverse = divide(encode, value) if convention == "vllm" else divide(jnp.float32(1), step)
        scaled = x * spread(jnp.where(step > 0, inverse, jnp.float32(0)))
    return e2m1.round_nearest(scaled, jnp.float32(1))
