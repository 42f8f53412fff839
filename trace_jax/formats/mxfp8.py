"""MXFP8: E4M3 codes in blocks of 32, one E8M0 scale a block; see `e8m0` for the scale."""

import dataclasses
from typing import Any, ClassVar

from trace_jax.formats import e4m3
from trace_jax.formats.e8m0 import MX


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(MX):
    """MXFP8 (E4M3) with its rule for the scale: the activations of W4A8."""

    name: ClassVar[str] = "mxfp8"
    element: ClassVar[Any] = e4m3
    mantissa_bits: ClassVar[int] = 3
