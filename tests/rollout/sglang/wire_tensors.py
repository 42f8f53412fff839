"""Tensors of every kind that travels, for the tests of directories."""

import ml_dtypes
import numpy as np

CONFIG = {"model_type": "qwen3_moe", "layers": 2}


def some_tensors(seed=0):
    """Every kind that travels: codes, scales, a number, all bit patterns of bfloat16, nothing."""
    rng = np.random.default_rng(seed)
    return {
        "a.weight": rng.integers(0, 256, (24, 40), np.uint8),
        "a.weight_scale": rng.integers(0, 127, (24, 5), np.uint8),
        "a.weight_scale_2": np.array(rng.random(), np.float32),
        "norm": rng.standard_normal(33).astype(np.float32),
        "bits": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256),
        "none": np.zeros((0, 3), np.float32),
        "flags": np.array([True, False, True]),
        "turned": rng.integers(-9, 9, (4, 6), np.int32).T,
    }


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        assert bits(found[name]) == bits(array), name


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def changed_tensors(old, share, seed):
    rng = np.random.default_rng(seed)
    new = {}
    for name, array in old.items():
        flat = np.frombuffer(bits(array), np.uint8).copy()
        hit = rng.random(flat.size) < share
        if name == "flags":
            hit[:] = False  # other bytes than 0 and 1 are no booleans
        flat[hit] ^= rng.integers(1, 256, int(hit.sum()), np.uint8)
        new[name] = flat.view(array.dtype).reshape(array.shape)
    return new
