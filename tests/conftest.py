"""Tests run on four virtual CPU devices, with strict dtype promotion and no rank promotion."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

CACHE = pathlib.Path(__file__).resolve().parents[1] / ".jax_cache"

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiled programs are kept between runs, small ones too: compiling is most of the suite's time.
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
