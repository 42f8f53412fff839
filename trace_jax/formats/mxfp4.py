"""MXFP4: E2M1 codes in blocks of 32, one E8M0 scale a block; see `e8m0` for the scale."""

import dataclasses
from typing import Any, ClassVar

from trace_jax.formats import e2m1
from trace_jax.formats.e8m0 import MX


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(MX):
    """MXFP4 with its rule for the scale."""

    name: ClassVar[str] = "mxfp4"
    element: ClassVar[Any] = e2m1
    mantissa_bits: ClassVar[int] = 1
