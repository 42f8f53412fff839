"""Named shapes: small ones that try every edge, and the experts of a real model.

Qwen3-30B-A3B has 128 experts, 8 a token: gate and up are (O, K) = (1536, 2048), down (2048, 768).
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `fp4_grouped_matmul`, or of `grouped_matmul` and its gradient."""

    name: str
    M: int
    outputs: int
    K: int
    sizes: tuple[int, ...]  # rows of each group
    w: str = "nvfp4"  # a format; in training a dtype
    x: str = "bfloat16"  # a format or a dtype
    w_factor: str = "matrix"  # "matrix" | "row"
    block: int = 1
    out: str = "bfloat16"
    train: bool = False
    small: bool = False

    @property
    def E(self) -> int:
        """Groups."""
        return len(self.sizes)

    @property
    def active(self) -> int:
        """Groups that have rows."""
        return sum(size > 0 for size in self.sizes)


def _small(name: str, sizes: tuple[int, ...], outputs: int, K: int, **fields: Any) -> Case:
    shape = {"M": sum(sizes), "out": "float32", "w": "nvfp4"} | fields
    return Case(name=name, sizes=sizes, outputs=outputs, K=K, small=True, **shape)


def _train(name: str, sizes: tuple[int, ...], outputs: int, K: int, **fields: Any) -> Case:
    dtype = fields.get("x", "float32")
    return _small(
        name, sizes, outputs, K, train=True, **{"x": dtype, "w": dtype, "out": dtype} | fields
    )


def routed(tokens: int, block: int = 1) -> tuple[int, ...]:
    """Rows of 128 experts when each token has 8 different ones at random, in whole blocks."""
    random = np.random.default_rng(tokens)
    chosen = np.argsort(random.random((tokens, 128)), axis=1)[:, :8]
    sizes = np.bincount(chosen.reshape(-1), minlength=128)
    return tuple(int(size) for size in -(-sizes // block) * block)


def _experts(name: str, tokens: int, outputs: int, K: int, **fields: Any) -> Case:
    sizes = routed(tokens, fields.get("block", 1))
    return Case(name=name, M=sum(sizes), sizes=sizes, outputs=outputs, K=K, **fields)


GATE_UP, DOWN = {"outputs": 1536, "K": 2048}, {"outputs": 2048, "K": 768}
BF16 = {"w": "bfloat16", "x": "bfloat16", "train": True}
CASES = (
    _small("tiny_groups", (1, 0, 2, 0, 0, 1, 3, 0, 1, 0, 0, 0, 0, 0, 2, 1), 24, 32),
    _small("large_groups", (70, 61), 40, 64, x="nvfp4", w_factor="row"),
    _small("empty_ends", (0, 5, 0, 0, 9, 0), 17, 48),
    _small("all_in_one", (0, 37, 0), 66, 48, x="nvfp4"),
    _small("one_row", (0, 0, 1), 8, 16),
    _small("no_rows", (0, 0), 8, 16),
    _small("rows_without_group", (3, 0, 4), 9, 32, M=31, w_factor="row"),
    _small("no_row_has_a_group", (0, 0), 9, 32, M=5, x="nvfp4"),
    _small("odd", (5, 1, 7), 71, 48, x="nvfp4"),  # K is 3 blocks
    _small("blocks", (16, 0, 8, 24), 20, 32, M=56, block=8, x="nvfp4"),
    _small("long_rows", (2, 3), 8, 544, x="nvfp4"),  # K is no whole number of steps
    _small("mxfp4", (5, 6), 33, 96, w="mxfp4", x="mxfp4"),
    _small("w4a8", (5, 6), 33, 48, x="mxfp8"),  # x padded to 64
    _small("float32", (5, 6), 33, 24, x="float32"),  # w padded to 32
    _train("train", (5, 0, 9, 1), 24, 40, M=18),
    _train("train_blocks", (16, 0, 8), 20, 33, M=32, block=8),
    _train("train_bf16", (37, 0, 20), 34, 48, M=60, x="bfloat16"),
    _experts("decode_t16_gate_up", 16, **GATE_UP),
    _experts("decode_t16_down", 16, **DOWN),
    _experts("decode_t64_gate_up", 64, **GATE_UP),
    _experts("decode_t64_down", 64, **DOWN),
    _experts("decode_t256_gate_up", 256, **GATE_UP),
    _experts("decode_t256_down", 256, **DOWN),
    _experts("w4a4_t64_gate_up", 64, x="nvfp4", **GATE_UP),
    _experts("prefill_gate_up", 2048, **GATE_UP),
    _experts("prefill_down", 2048, **DOWN),
    _experts("prefill_w4a4_gate_up", 2048, x="nvfp4", **GATE_UP),
    _experts("prefill_mxfp4_gate_up", 2048, w="mxfp4", x="mxfp4", **GATE_UP),
    _experts("prefill_w4a8_gate_up", 2048, x="mxfp8", **GATE_UP),
    _experts("training_gate_up", 2048, block=64, **GATE_UP, **BF16),
    _experts("training_down", 2048, block=64, **DOWN, **BF16),
)
