"""The library's front door loads what it names when it is first used, and nothing before."""

import subprocess
import sys

import pytest

import trace_jax
from trace_jax.hf import load, nvfp4, save
from trace_jax.models import forward


def test_names_are_the_functions_they_stand_for():
    assert trace_jax.load is load.load
    assert trace_jax.save is save.save
    assert trace_jax.logits is forward.logits
    assert trace_jax.save_nvfp4 is nvfp4.save_nvfp4
    assert trace_jax.load_quantised is nvfp4.load_quantised
    assert set(trace_jax.__all__) <= set(dir(trace_jax))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'trace_jax' has no attribute 'lood'"):
        _ = trace_jax.lood


def test_formats_do_not_load_the_models():
    code = (
        "import sys, trace_jax.formats\n"
        "heavy = [m for m in sys.modules if m.startswith(('trace_jax.hf', 'trace_jax.models'))]\n"
        "assert not heavy, heavy\n"
        "assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
