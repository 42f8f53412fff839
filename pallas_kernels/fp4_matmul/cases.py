"""Named shapes: small ones that try every edge, and those of a real model.

Qwen3-30B-A3B has D = 2048 and 32 query heads of 128: its attention is projected out by
(O, K) = (2048, 4096).
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `fp4_matmul`."""

    name: str
    M: int
    outputs: int
    K: int
    w: str = "nvfp4"
    x: str = "bfloat16"  # a format, or the dtype of a plain x
    w_factor: str = "matrix"  # "matrix" | "row"
    out: str = "bfloat16"
    small: bool = False


def _small(name: str, M: int, outputs: int, K: int, **fields: Any) -> Case:
    return Case(name=name, M=M, outputs=outputs, K=K, out="float32", small=True, **fields)


def _attention_out(name: str, M: int, **fields: Any) -> Case:
    return Case(name=name, M=M, outputs=2048, K=4096, **fields)


CASES = (
    _small("w4a16", 5, 24, 64),
    _small("one_row", 1, 16, 32),
    _small("no_rows", 0, 16, 32),
    _small("one_output", 3, 1, 16, w_factor="row"),
    _small("odd", 13, 71, 48, x="nvfp4", w_factor="row"),  # K is 3 blocks
    _small("two_tiles", 19, 130, 80, x="nvfp4"),
    _small("long_rows", 3, 8, 544, x="nvfp4"),  # K is no whole number of steps
    _small("many_rows", 150, 40, 96, x="nvfp4", w_factor="row"),
    _small("mxfp4", 9, 33, 96, w="mxfp4", x="mxfp4"),
    _small("w4a8", 9, 33, 96, x="mxfp8"),
    _small("w4a8_mxfp4", 9, 33, 96, w="mxfp4", x="mxfp8"),
    _small("w4a8_padded", 9, 33, 48, x="mxfp8"),  # x padded to 64
    _small("float32", 9, 33, 48, x="float32"),
    _small("float32_padded", 4, 33, 24, x="float32"),  # w padded to 32
    _small("mxfp4_w4a16", 9, 33, 64, w="mxfp4"),
    _attention_out("m16", 16),
    _attention_out("m16_w4a4", 16, x="nvfp4"),
    _attention_out("m256_w4a4", 256, x="nvfp4"),
    _attention_out("m8192", 8192),
    _attention_out("m8192_w4a4", 8192, x="nvfp4"),
    _attention_out("m8192_mxfp4", 8192, w="mxfp4", x="mxfp4"),
    _attention_out("m8192_w4a8", 8192, x="mxfp8"),
)
