"""Named shapes: small ones that try every edge, and those of a real model.

Qwen3-30B-A3B has D = 2048 and F = 768: expert inputs are (tokens, 2048), hidden values
(8 tokens, 768), one row for each of a token's eight experts.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `quantize` on (M, K)."""

    name: str
    M: int
    K: int
    format: str = "nvfp4"
    dtype: str = "bfloat16"
    small: bool = False


def _small(name: str, M: int, K: int, format: str = "nvfp4", dtype: str = "bfloat16") -> Case:
    return Case(name=name, M=M, K=K, format=format, dtype=dtype, small=True)


CASES = (
    _small("nvfp4", 40, 96),
    _small("one_row", 1, 256),
    _small("no_rows", 0, 64),
    _small("odd", 37, 37, dtype="float32"),
    _small("one_value", 3, 1),
    _small("pow2", 13, 48, "nvfp4:global_rule=pow2"),
    _small("no_global", 13, 64, "nvfp4:global_rule=one", "float32"),
    _small("static_4", 13, 64, "nvfp4:scale_rule=static_4"),
    _small("4over6", 13, 64, "4over6"),
    _small("mxfp4", 37, 96, "mxfp4"),
    _small("mxfp4_odd", 13, 71, "mxfp4:rule=even", "float32"),
    Case(name="decode", M=64, K=2048),
    Case(name="tokens", M=16384, K=2048),
    Case(name="tokens_mxfp4", M=16384, K=2048, format="mxfp4"),
    Case(name="tokens_4over6", M=16384, K=2048, format="4over6"),
    Case(name="hidden", M=131072, K=768),
    Case(name="wide", M=4096, K=8192),
    Case(name="wide_float32", M=4096, K=8192, dtype="float32"),
)
