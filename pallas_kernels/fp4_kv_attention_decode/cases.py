"""Named shapes: small ones that try every edge, and those of a real model.

Qwen3-30B-A3B has 32 query heads, 4 kv heads and heads of 128.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `attention_decode`, or of `write`, where `lengths` are the slots."""

    name: str
    B: int  # sequences
    C: int  # slots of each
    J: int = 4  # kv heads
    H: int = 32  # query heads
    K: int = 128
    lengths: tuple[int, ...] | None = None  # None: all of C
    page: int | None = None  # slots of a page; None: contiguous
    format: str = "nvfp4"
    dtype: str = "bfloat16"
    write: bool = False
    record: str | None = None  # of a write
    small: bool = False

    @property
    def length(self) -> tuple[int, ...]:
        """Of each sequence."""
        return self.lengths or (self.C,) * self.B


def _written(name: str, slots: tuple[int, ...], C: int, **fields: Any) -> Case:
    return _small(name, slots, C, write=True, **fields)


def _small(name: str, lengths: tuple[int, ...], C: int, **fields: Any) -> Case:
    return Case(name=name, B=len(lengths), C=C, lengths=lengths, small=True, **fields)


ATTEND = (
    _small("empty", (0,), 40, J=1, H=2, K=64, dtype="float32"),
    _small("one_slot", (1, 0), 40, J=2, H=2, K=64, dtype="float32"),
    _small("unlike_lengths", (0, 1, 37, 64, 65, 130), 130, J=2, H=8, K=64, dtype="float32"),
    _small("full", (128, 128), 128, J=1, H=8, K=128),
    _small("group_of_1", (90,), 90, J=2, H=2, K=128),
    _small("group_of_20", (33, 7), 50, J=1, H=20, K=64, dtype="float32"),
    _small("parts", (700, 257, 10), 700, J=1, H=4, K=32, dtype="float32"),  # several splits
    _small("width_of_50", (41, 12), 48, J=2, H=4, K=50, dtype="float32"),  # padded to 64
    _small("width_of_96", (41, 12), 48, J=1, H=4, K=96),  # no power of two
    _small("width_of_16", (41,), 48, J=1, H=4, K=16, dtype="float32"),  # one block
    _small("no_factor", (70, 3), 80, J=2, H=4, K=64, format="nvfp4:global_rule=one"),
    _small("mxfp4", (70, 3), 80, J=2, H=4, K=64, format="mxfp4", dtype="float32"),
    _small("mxfp8", (70, 3), 80, J=2, H=4, K=64, format="mxfp8", dtype="float32"),
    _small("float16", (70, 3), 80, J=2, H=4, K=64, dtype="float16"),
    _small("paged", (0, 5, 96, 61), 96, J=2, H=4, K=64, page=16, dtype="float32"),
    _small("pages_of_24", (50, 72), 72, J=2, H=4, K=64, page=24),  # pages cross tiles
    Case(name="b64_c4096", B=64, C=4096),
    Case(name="b64_c4096_mxfp4", B=64, C=4096, format="mxfp4"),
    Case(name="b64_c4096_mxfp8", B=64, C=4096, format="mxfp8"),
    Case(name="b64_c4096_no_factor", B=64, C=4096, format="nvfp4:global_rule=one"),
    Case(name="b64_c4096_pages_of_64", B=64, C=4096, page=64),
    Case(name="b4_c32768", B=4, C=32768),
    Case(name="b1_c32768", B=1, C=32768),
    Case(name="b64_uneven", B=64, C=4096, lengths=tuple(range(64, 4097, 64))),
)

# of few slots: what is written does not depend on how many there are
WRITE = (
    _written("write", (0, 5, 9), 10, J=2, H=2, K=64),
    _written("write_codes", (3, 0), 6, J=3, H=3, K=50, record="codes", dtype="float32"),
    _written("write_mantissa", (1, 31), 32, J=4, H=4, K=128, record="mantissa"),
    _written("write_mxfp4", (1, 3), 4, J=1, H=1, K=64, record="mantissa", format="mxfp4"),
    _written("write_paged", (17, 3), 32, J=2, H=2, K=64, record="codes", page=8),
    Case(name="write_b64", B=64, C=16, lengths=(7,) * 64, write=True, record="codes"),
    Case(name="write_b64_mantissa", B=64, C=16, lengths=(7,) * 64, write=True, record="mantissa"),
)
CASES = (*ATTEND, *WRITE)
