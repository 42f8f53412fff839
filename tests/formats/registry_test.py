"""Formats by name, with options, and back to text."""

import pytest

from trace_jax import formats
from trace_jax.formats import registry
from trace_jax.formats.hif4 import HiF4
from trace_jax.formats.mxfp4 import MXFP4
from trace_jax.formats.nvfp4 import NVFP4


def test_a_name_a_text_keywords_and_an_object_give_a_format():
    assert formats.get("nvfp4") == NVFP4()
    assert formats.get("nvfp4:global_rule=one,block_shape=16x16") == NVFP4(
        global_rule="one", block_shape="16x16"
    )
    assert formats.get("mxfp4:rule=even", rule="ceil") == MXFP4(rule="ceil")
    assert formats.get(HiF4()) == HiF4()
    assert formats.get(NVFP4(), convention="te") == NVFP4(convention="te")
    assert formats.get("4over6") == NVFP4(scale_rule="mse")
    assert formats.get("4over6:scale_rule=mae") == NVFP4(scale_rule="mae")


@pytest.mark.parametrize(
    "text",
    ["nvfp4", "nvfp4:convention=vllm", "nvfp4:scale_rule=mse", "mxfp8:rule=even", "hif4"],
)
def test_a_format_is_spelt_as_it_is_read(text):
    assert formats.spell(formats.get(text)) == text
    assert formats.get(formats.spell(formats.get(text))) == formats.get(text)


def test_every_format_has_a_name_and_is_hashable():
    for name, kind in registry.FORMATS.items():
        assert kind.name == name and len({kind(), kind()}) == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("fp4", r"format: got 'fp4', need one of \['4over6', 'hif4', 'mxfp4', 'mxfp8', 'nvfp4'\]"),
        ("nvfp4:rule=even", r"format nvfp4: got 'rule=even', need option=value with an option of"),
        ("mxfp4:rule", r"format mxfp4: got 'rule', need option=value"),
        ("mxfp4:rule=nearest", r"mxfp4: rule: got nearest, need one of \['floor', 'ceil', 'even'"),
        (
            "nvfp4:scale_rule=six",
            r"nvfp4: scale_rule: got six, need one of \['max', 'static_4', 'mse'",
        ),
    ],
)
def test_errors_name_the_choices(text, match):
    with pytest.raises(ValueError, match=match):
        formats.get(text)
