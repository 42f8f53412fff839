"""Named shapes: small ones that try every edge, and a real model's (see `quantize.cases`)."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `fake_quant` on (M, K)."""

    name: str
    M: int
    K: int
    format: str = "nvfp4"
    dtype: str = "bfloat16"
    kind: str | None = "codes"  # of the record; None: nothing was recorded
    ste: str = "plain"
    guided: bool = True
    small: bool = False


def _small(name: str, M: int, K: int, format: str = "nvfp4", **fields) -> Case:
    return Case(name=name, M=M, K=K, format=format, small=True, **fields)


CASES = (
    _small("codes", 13, 96),
    _small("mantissa", 13, 96, kind="mantissa"),
    _small("plain", 13, 96, kind=None),
    _small("compared", 13, 48, guided=False, dtype="float32"),
    _small("clipped_odd", 13, 37, ste="clipped", dtype="float32"),
    _small("one_row", 1, 64, kind="mantissa"),
    _small("no_rows", 0, 64),
    _small("mxfp4", 13, 96, "mxfp4"),
    _small("mxfp4_clipped", 5, 300, "mxfp4:rule=even", kind="mantissa", ste="clipped"),
    _small("no_global", 13, 48, "nvfp4:global_rule=one", dtype="float32"),
    _small("4over6", 5, 64, "4over6", kind="mantissa"),
    Case(name="tokens", M=16384, K=2048),
    Case(name="tokens_mantissa", M=16384, K=2048, kind="mantissa"),
    Case(name="tokens_plain", M=16384, K=2048, kind=None),
    Case(name="tokens_mxfp4", M=16384, K=2048, format="mxfp4"),
    Case(name="hidden", M=131072, K=768),
    Case(name="wide_clipped", M=4096, K=8192, ste="clipped"),
)
