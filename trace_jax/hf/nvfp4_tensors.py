"""NVFP4 tensors on disk, in the layout of NVIDIA's ModelOpt.

A matrix `x.weight` (N, K) is three tensors:
    x.weight          uint8 (N, K/2): two E2M1 codes a byte, the even column in the low four bits
    x.weight_scale    float8_e4m3fn (N, K/16): one scale for 16 columns, not interleaved
    x.weight_scale_2  float32, one number: the global scale, which multiplies when decoding
    value = fl(e2m1(code) * fl(scale * scale_2))
Beside them may stand `x.input_scale` (of activations) and `self_attn.{k,v}_proj.{k,v}_scale` (of
the KV cache); they are float32 numbers of decoding too.
Source: ModelOpt's export and SGLang's `modelopt_quant`, for names and dtypes.
"""

import dataclasses
import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from trace_jax.checks import message, require
from trace_jax.hf import files

BLOCK = 16
SCALE, GLOBAL = "_scale", "_scale_2"  # after the name of the weight
_BESIDE = (".input_scale", ".k_scale", ".v_scale")  # scales of what is not a weight
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUE = np.concatenate([_E2M1, -_E2M1])
_NAN_BYTE = 0x7F


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """One matrix, or several with leading axes."""

    codes: np.ndarray  # uint8 (..., N, K/2)
    scales: np.ndarray  # uint8 (..., N, K/16), E4M3 bytes
    global_: np.ndarray  # float32 (..., 1, 1)

    def values(self) -> np.ndarray:
        """float32 (..., N, K)."""
        both = np.stack([self.codes & 15, self.codes >> 4], axis=-1)
        codes = _VALUE[both.reshape(*self.codes.shape[:-1], -1)]
        step = self.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * self.global_
        return codes * np.repeat(step, BLOCK, axis=-1)


def parts(weight: str, shape: tuple[int, ...]) -> dict[str, files.Declared]:
    """The three tensors of a matrix `weight` of a shape, as `files.write` wants them."""
    *rows, width = shape
    return {
        weight: (np.uint8, (*rows, width // 2)),
        weight + SCALE: (ml_dtypes.float8_e4m3fn, (*rows, width // BLOCK)),
        weight + GLOBAL: (np.float32, ()),
    }


class Dequantised(files.Reader):
    """Tensors of an NVFP4 checkpoint; `tensors` has its matrices in float32, without their scales.

    Raises: ValueError naming every matrix that lacks a scale, or has one of another shape or dtype.
    """

    def __init__(self, stored: Mapping[str, files.Stored]):
        self.stored = dict(stored)
        self.packed = {
            name
            for name, tensor in stored.items()
            if name.endswith(".weight")
            and (tensor.dtype == np.uint8 or name + SCALE in stored or name + GLOBAL in stored)
        }
        _check(stored, self.packed)
        whole = {}
        for name, tensor in stored.items():
            if name in self.packed:
                shape = (*tensor.shape[:-1], tensor.shape[-1] * 2)
                kind = np.dtype(np.float32)
                whole[name] = dataclasses.replace(tensor, shape=shape, dtype=kind)
            elif name.removesuffix(GLOBAL).removesuffix(SCALE) not in self.packed and not (
                name.endswith(_BESIDE)
            ):
                whole[name] = tensor
        super().__init__(whole)

    def read(self, name: str) -> np.ndarray:
        """The tensor, or the values of a packed one."""
        return self.read_packed(name).values() if name in self.packed else super().read(name)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """As `read`, into a contiguous array."""
        if name in self.packed:
            out.reshape(self.tensors[name].shape)[...] = self.read(name)
        else:
            super().read_into(name, out)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of `read`."""
        return (
            self.read(name)[start:stop] if name in self.packed else super().rows(name, start, stop)
        )

    def read_packed(self, name: str) -> Packed:
        """Codes and scales of a packed matrix.

        Raises: ValueError if a scale is not a number or the global scale not positive.
        """
        with files.Reader(self.stored) as raw:
            codes = raw.read(name)
            scales = raw.read(name + SCALE).view(np.uint8)
            global_ = raw.read(name + GLOBAL).reshape(1, 1)
        where = str(self.stored[name].file)
        good = np.isfinite(global_).all() and (global_ > 0).all()
        got = f"{global_.item()} in {name + GLOBAL}"
        require(bool(good), where, got, "a finite number > 0")
        good = not ((scales & _NAN_BYTE) == _NAN_BYTE).any()
        require(good, where, f"NaN in {name + SCALE}", "finite scales")
        return Packed(codes=codes, scales=scales, global_=global_)


def _check(stored: Mapping[str, files.Stored], packed: set[str]) -> None:
    """Every packed matrix has its scales, and no scale stands alone."""
    problems = []
    for name in sorted(packed):
        *rows, half = stored[name].shape or (0,)
        wanted = parts(name, (*rows, half * 2))
        for part, (dtype, shape) in wanted.items():
            if part not in stored:
                problems.append(f"no {part}")
                continue
            got = stored[part]
            same = math.prod(got.shape) == 1 if part.endswith(GLOBAL) else got.shape == shape
            if got.dtype != np.dtype(dtype) or not same:
                need = f"{np.dtype(dtype)} {shape}"
                problems.append(f"{part} is {got.dtype} {got.shape}, not {need}")
        if len(stored[name].shape) != 2 or half * 2 % BLOCK:
            problems.append(f"{name} is {stored[name].shape}, not (N, K/2) with K a multiple of 16")
    for name in stored:
        for end in (GLOBAL, SCALE):
            if name.endswith(".weight" + end) and name.removesuffix(end) not in packed:
                problems.append(f"{name} without its weight")
    if problems:
        where = str(next(iter(stored.values())).file.parent)
        need = "for each NVFP4 matrix weight (uint8), weight_scale (float8_e4m3fn), weight_scale_2"
        raise ValueError(message(where, files.some(problems), need))
