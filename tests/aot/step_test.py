"""The real training step, compiled for accelerators that are not here: nothing was deleted."""

import functools
import pathlib
import re

import pytest

from tests.slow import only
from trace_jax.aot import check, step, targets
from trace_jax.aot import compile as aot
from trace_jax.aot.compile import ROOT

HERE = str(pathlib.Path(__file__).parent)
TINY = str(ROOT / "configs" / "tiny_cpu.py")
NAIVE = "programs:naive_train_step"

# What NVFP4 has to compare |x| / step with, written out: midpoints of 0 .5 1 1.5 2 3 4 6 with ties
# to even, and for guided rounding the values themselves from both sides.
MIDPOINTS = {"x > 0.25", "x >= 0.75", "x > 1.25", "x >= 1.75", "x > 2.5", "x >= 3.5", "x > 5"}
BRACKET = {f"x >= {v}" for v in ("0.5", "1.5", "2", "3", "4", "6")}
BRACKET |= {f"x > {v}" for v in ("0", "0.5", "1.5", "2", "3", "4")}
# ... 1 * step is step, and the four comparisons that correct the block scale have no literal either
SCALE = {"to f8e4m3fn": 1, "x > computed": 2, "x = computed": 2}
GUIDED_SCALE = SCALE | {"x > computed": 3, "x >= computed": 1}
TO_BF16 = "to 8 exponent and 7 mantissa bits"


@functools.cache
def report(target, *settings, builder=check.TRAIN_STEP):
    return check.check(target, TINY, settings, builder=builder, path=(HERE,))


def site_of(report, name):
    (found,) = [s for s in report.sites if s.site[1] == name]
    return found


def test_every_place_that_rounds_is_on_the_list():
    tiny = check.overrides.load(TINY)
    sites = step.expected_sites(tiny.quant, tiny.model)
    names = ["k", "v", "expert_in", "expert_hidden", "moe.gate_up", "moe.down"]
    assert sites == [("layers[0:2]", name) for name in names]
    half = check.overrides.override(tiny, ["quant.guide_layers=last:1", "quant.kv=none"])
    sites = step.expected_sites(half.quant, half.model)
    assert sites == [(f"layers[{i}:{i + 1}]", name) for i in range(2) for name in names[2:]]
    plain = check.overrides.override(tiny, ["quant.trainer=bf16"])
    assert step.expected_sites(plain.quant, plain.model) == []


@pytest.mark.parametrize("target", only(targets.TARGETS, ["h200"]))
def test_guided_training_step_keeps_all_of_its_quantisation(target):
    done = report(target)
    assert done.kept, check.table([done])
    assert len(done.sites) == 6
    for name in ("k", "v", "expert_in"):
        written = site_of(done, name).written
        expected = dict.fromkeys(MIDPOINTS | BRACKET | {TO_BF16}, 1) | GUIDED_SCALE
        assert written == expected, name
    for name in ("moe.gate_up", "moe.down"):
        expected = dict.fromkeys(MIDPOINTS | {TO_BF16}, 1) | SCALE  # BF16: their source
        assert site_of(done, name).written == expected
    expected = dict.fromkeys(MIDPOINTS | {TO_BF16}, 1) | SCALE
    assert site_of(done, "expert_hidden").written == expected
    assert 0 < done.compiled.memory["argument"] < 16 * 2**20
    assert done.compiled.compile_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("target", list(targets.TARGETS))
def test_unguided_training_step_keeps_all_of_its_quantisation(target):
    done = report(target, "quant.trainer=qat")
    assert done.kept, check.table([done])
    assert len(done.sites) == 6


@pytest.mark.slow
@pytest.mark.parametrize("target", list(targets.TARGETS))
@pytest.mark.parametrize(
    "settings",
    [
        ("quant.guide_layers=last:1", "quant.guide=mantissa", "quant.kv=nvfp4"),
        ("quant.weights=mxfp4", "quant.acts=mxfp4", "quant.kv=mxfp4"),
        ("quant.weights=mxfp4", "quant.acts=mxfp8", "quant.kv=mxfp8"),
        ("quant.weights=hif4", "quant.acts=hif4", "quant.kv=hif4"),
    ],
    ids=lambda settings: ",".join(settings),
)
def test_other_formats_and_several_segments_survive_too(target, settings):
    done = report(target, *settings)
    assert done.kept, check.table([done])
    assert len(done.sites) == (12 if "last" in settings[0] else 6)


@pytest.mark.parametrize("target", only(["h200", "b200"], ["h200"]))
def test_the_check_sees_xla_gpu_delete_naive_fake_quantisation(target):
    """The negative control: what is deleted is reported, so the tests above can fail."""
    done = report(target, builder=NAIVE)
    assert not done.kept
    for name in ("expert_in", "expert_hidden", "moe.gate_up", "moe.down"):
        missing = site_of(done, name).missing
        assert missing["to f4e2m1fn"] == missing["to f8e4m3fn"] == 1, name
    for name in ("k", "v"):  # scales that one kernel hands to another stay in E4M3
        assert "to f4e2m1fn" in site_of(done, name).missing


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_tpus_keep_even_naive_fake_quantisation(target):
    done = report(target, builder=NAIVE)
    for found in done.sites:
        assert found.alive["to f4e2m1fn"] == found.alive["to f8e4m3fn"] == 1, found


TRAINER = ("fake_quant", "grouped_matmul", "token_logprob")
SAMPLER = ("quantize", "fp4_matmul", "kv_attention")


@pytest.mark.parametrize("target", ["h200", pytest.param("b200", marks=pytest.mark.slow)])
def test_training_step_of_kernels_keeps_all_of_its_quantisation(target):
    done = report(target, *(f"kernels.{op}=triton" for op in TRAINER))
    assert done.kept, check.table([done])
    for name in ("k", "v", "expert_in", "expert_hidden"):
        assert site_of(done, name).written == {"kernel of triton": 1}
    for name in ("moe.gate_up", "moe.down"):  # weights are rounded by XLA
        assert site_of(done, name).written.total() == 13


@pytest.mark.parametrize(
    ("target", "matmul", "instruction"),
    [
        ("h200", "triton", "wgmma.mma_async"),
        pytest.param("b200", "triton", "tcgen05.mma", marks=pytest.mark.slow),
        pytest.param("b200", "mosaic_gpu", "mxf4nvf4.block_scale", marks=pytest.mark.slow),
    ],
)
def test_whole_rollout_compiles_with_kernels(target, matmul, instruction):
    settings = [f"kernels.{op}=triton" for op in SAMPLER if op != "fp4_matmul"]
    settings.append(f"kernels.fp4_matmul={matmul}")
    job = aot.Job(
        builder="trace_jax.aot.step:rollout",
        target=target,
        kwargs={"config": TINY, "settings": settings},
        ptx=True,
    )
    done = aot.compile_job(job)
    assert instruction in done.ptx
    calls = set(re.findall(r'custom_call_target="([^"]*)"', done.hlo))
    assert ("mosaic_gpu_v2" in calls) == (matmul == "mosaic_gpu")
    assert "__gpu$xla.gpu.triton" in calls
