"""Tests run on four virtual CPU devices, with strict dtype promotion and no rank promotion."""

import gc
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

CACHE = pathlib.Path(__file__).resolve().parents[1] / ".jax_cache"

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiled programs are kept between runs, small ones too: compiling is most of the suite's time.
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


# A file stays on one worker: those that take minutes come first, so that none of them is the last.
LONG = ("loop_test.py", "asynchrony_test.py", "step_test.py", "gpu_check_test.py", "seam_test.py")
LONG += ("models_test.py", "parity_hf_test.py", "fp4_grouped_matmul_test.py", "fake_quant_test.py")


def pytest_collection_modifyitems(items):
    """Files of LONG first, in that order; everything else as it was collected."""
    place = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


@pytest.fixture(autouse=True, scope="module")
def few_memory_mappings():
    """Drops compiled programs when there are many, after a module.

    XLA:CPU maps some ten pieces of memory for each program, and Linux ends a process at 65,530 of
    them (vm.max_map_count); one worker that runs most of the suite gets there.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 15_000:
        jax.clear_caches()
        gc.collect()
