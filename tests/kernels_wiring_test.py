"""Each op of `config.kernels` is really what the stages of a run call: programs are traced."""

import dataclasses
import functools
import re

import jax
import jaxtyping
import pytest

from trace_jax import config as cfg
from trace_jax import config_checks, overrides, stages
from trace_jax.aot import step, targets

TRAINER = {  # names of the kernels of each op, as they stand in a program
    "fake_quant": {"fake_quant_nvfp4"},
    "grouped_matmul": {"grouped_matmul", "grouped_matmul_dx", "grouped_matmul_dw"},
    "token_logprob": {"token_logprob_forward", "token_logprob_gradient"},
}
SAMPLER = {
    "quantize": {"quantize_nvfp4"},
    "fp4_matmul": {"fp4_grouped_matmul"},
    "kv_attention": {"fp4_kv_attention_decode", "fp4_kv_write"},
}


@functools.cache
def kernels_of(builder, *settings):
    """Names of the kernels in a traced program of the tiny configuration."""
    here = targets.Topology(name="cpu", shape=(1,), devices=(jax.devices()[0],))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # states of shapes, not arrays
        program, arguments = builder(here, "tiny_cpu", settings)
        text = str(jax.make_jaxpr(program)(*arguments))
    return set(re.findall(r"pallas_call\[.*?\n\s*name=(\w+)", text, re.DOTALL))


def with_kernel(op):
    return f"kernels.{op}=triton_interpret"


def test_every_op_is_on_the_list():
    assert {*TRAINER, *SAMPLER} == set(config_checks.KERNELS)


@pytest.mark.parametrize("op", [None, *TRAINER])
def test_a_training_step_has_the_kernels_of_the_op_that_is_chosen_and_no_others(op):
    settings = [] if op is None else [with_kernel(op)]
    assert kernels_of(step.train_step, *settings) == (TRAINER[op] if op else set())


@pytest.mark.parametrize("op", [None, *SAMPLER])
def test_a_rollout_has_the_kernels_of_the_op_that_is_chosen_and_no_others(op):
    settings = [] if op is None else [with_kernel(op)]
    assert kernels_of(step.rollout, *settings) == (SAMPLER[op] if op else set())


def test_the_stages_hand_the_chosen_kernels_to_the_engine(monkeypatch):
    chosen = cfg.Kernels(quantize="triton_interpret", debug=True)
    seen, core = [], stages.jax_engine.Core

    def spy(*args, **kwargs):
        seen.append(kwargs["kernels"])
        return core(*args, **kwargs)

    monkeypatch.setattr(stages.jax_engine, "Core", spy)
    stages._programs.cache_clear()
    stages.build(dataclasses.replace(overrides.load("tiny_cpu"), kernels=chosen))
    stages._programs.cache_clear()
    assert seen == [chosen]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["kernels.fp4_matmul=mosaic_tpu"], "config.kernels.fp4_matmul: got mosaic_tpu, need one"),
        (["kernels.quantize=cuda"], "config.kernels.quantize: got cuda, need one of"),
        (
            ["kernels.fp4_matmul=triton_interpret", "quant.weights=hif4"],
            "config.kernels.fp4_matmul: got triton_interpret with quant.weights=hif4",
        ),
        (  # activations may be that, weights may not
            ["kernels.fp4_matmul=triton_interpret", "quant.weights=mxfp8", "quant.acts=mxfp8"],
            "config.kernels.fp4_matmul: got triton_interpret with quant.weights=mxfp8",
        ),
        (
            ["kernels.fake_quant=triton_interpret", "quant.acts=mxfp8"],
            "config.kernels.fake_quant: got triton_interpret with quant.acts=mxfp8",
        ),
        (
            ["kernels.fp4_matmul=mosaic_gpu", "quant.acts=none"],
            "config.kernels.fp4_matmul: got mosaic_gpu with quant.weights=nvfp4, quant.acts=None",
        ),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_with_the_configuration(settings, says):
    with pytest.raises((ValueError, NotImplementedError), match=says):
        overrides.override(overrides.load("tiny_cpu"), settings)


def test_what_this_device_cannot_run_is_refused_before_anything_is_built():
    config = overrides.override(overrides.load("tiny_cpu"), ["kernels.fp4_matmul=triton"])
    with pytest.raises(
        NotImplementedError, match=r"config.kernels.fp4_matmul: impl triton: got cpu"
    ):
        stages.build(config)


def test_the_record_of_a_run_says_what_has_no_work():
    config = overrides.override(
        overrides.load("tiny_cpu"), ["quant.acts=none", "kernels.grouped_matmul=triton_interpret"]
    )
    said = stages.kernels_text(config)
    assert "grouped_matmul triton_interpret" in said and "fp4_matmul xla" in said
    assert "(not used: quantize)" in said
