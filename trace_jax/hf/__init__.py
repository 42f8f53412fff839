"""Hugging Face checkpoints in and out: configurations, names, safetensors, NVFP4."""

import pathlib

from trace_jax import config as cfg
from trace_jax.hf import config_json


def model_of(path: str | pathlib.Path, dtype: str = "bfloat16") -> cfg.Model:
    """The model section of a checkpoint directory: `model=hf.model_of("checkpoints/mine")`.

    Args:   dtype: that it computes in, "bfloat16" | "float32".
    Raises: FileNotFoundError or ValueError as `config_json` does.
    """
    where = str(pathlib.Path(path) / "config.json")
    return config_json.model_of(config_json.read(path), dtype, where)
