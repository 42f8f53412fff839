"""Named shapes: small ones that try every edge, and those of a real model (Qwen3-30B-A3B)."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call, or one call and its gradient."""

    name: str
    M: int  # tokens
    V: int = 151936  # vocabulary
    D: int = 2048  # width
    dtype: str = "bfloat16"  # of the hidden states
    head_dtype: str = "bfloat16"
    temperature: float = 1.0
    top_k: int = 0
    gradient: bool = False
    small: bool = False


def _small(name: str, M: int, V: int, D: int, **fields) -> Case:
    return Case(name=name, M=M, V=V, D=D, small=True, **fields)


CASES: tuple[Case, ...] = (
    _small("one_of_one", 1, 1, 1),
    _small("one_token", 1, 300, 64),
    _small("odd", 131, 261, 33, temperature=0.7),
    _small("odd_gradient", 131, 261, 33, temperature=0.7, gradient=True),
    _small("tiles", 128, 256, 128, gradient=True),
    _small("master_head", 16, 130, 64, head_dtype="float32", gradient=True),
    _small("float32", 7, 101, 24, dtype="float32", head_dtype="float32", gradient=True),
    _small("top", 7, 101, 24, dtype="float32", head_dtype="float32", top_k=5),
    Case(name="m8192", M=8192),
    Case(name="m8192_gradient", M=8192, gradient=True),
    Case(name="m8192_master_head_gradient", M=8192, head_dtype="float32", gradient=True),
    Case(name="m256", M=256),  # of one decode step
    Case(name="m256_top20", M=256, top_k=20),
)
