"""Known models have as many parameters as their publishers say, and a config.json of their own."""

import jax
import pytest

from trace_jax.hf import config_json
from trace_jax.models import known, transformer

# Where a count to the last parameter is public it is given, otherwise billions as published.
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-360M-Instruct": 361_821_120,
    "Qwen3-Next-80B-A3B": 80,
    "Qwen3.5-35B-A3B": 35,
    "Qwen3.5-122B-A10B": 122,
}


def test_each_known_model_is_counted_here():
    assert PARAMETERS.keys() == known.FIELDS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_model_has_the_published_number_of_parameters(name):
    model = known.get(name)
    shapes = jax.eval_shape(lambda key: transformer.init(model, 1, key), jax.random.key(0))
    count, wanted = sum(leaf.size for leaf in jax.tree.leaves(shapes)), PARAMETERS[name]
    if wanted > 1e6:
        assert count == wanted
    else:  # to the digits that are published
        digits = len(str(wanted).partition(".")[2])
        assert round(count / 1e9, digits) == wanted


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_model_is_one_of_transformers(name):
    model = known.get(name)
    assert config_json.model_of(config_json.config_of(model)) == model


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"got 'Qwen9', need one of \['Llama-3\.1-8B', "):
        known.get("Qwen9")
