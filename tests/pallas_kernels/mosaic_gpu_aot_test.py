"""Machine code of Blackwell's FP4 kernel for a described B200: instructions and resources."""

import functools
import pathlib
import re

import pytest

from pallas_kernels.common import blackwell
from trace_jax import formats
from trace_jax.aot import compile as aot
from trace_jax.aot import resources

HERE = str(pathlib.Path(__file__).parent)
# Qwen3-30B-A3B: 128 experts, 8 a token; decode of 128 tokens, prefill of 4096
GATE_UP, DOWN = {"outputs": 1536, "width": 2048}, {"outputs": 2048, "width": 768}
EXPERTS = {"experts": 128}
PROGRAMS = {
    "decode nvfp4": ("grouped", GATE_UP | EXPERTS | {"rows": 1024, "format": "nvfp4"}),
    "decode down nvfp4": ("grouped", DOWN | EXPERTS | {"rows": 1024, "format": "nvfp4"}),
    "decode mxfp4": ("grouped", GATE_UP | EXPERTS | {"rows": 1024, "format": "mxfp4"}),
    "prefill nvfp4": ("grouped", GATE_UP | EXPERTS | {"rows": 32768, "format": "nvfp4"}),
    "prefill down mxfp4": ("grouped", DOWN | EXPERTS | {"rows": 32768, "format": "mxfp4"}),
    "one token nvfp4": ("dense", {"rows": 1, "outputs": 2048, "width": 2048, "format": "nvfp4"}),
    "odd nvfp4": ("dense", {"rows": 100, "outputs": 130, "width": 48, "format": "nvfp4"}),
    "dense mxfp4": (
        "dense",
        {"rows": 50, "outputs": 4096, "width": 2048, "format": "mxfp4", "out_dtype": "float16"},
    ),
    "dense pair nvfp4": (
        "dense",
        {"rows": 8192, "outputs": 2048, "width": 4096, "format": "nvfp4", "out_dtype": "float32"},
    ),
}
QUICK = {"decode nvfp4", "prefill nvfp4", "dense mxfp4", "one token nvfp4"}
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]


@functools.cache
def compiled(name):
    builder, kwargs = PROGRAMS[name]
    builder = f"mosaic_programs:{builder}"
    job = aot.Job(builder=builder, target="b200", kwargs=kwargs, path=(HERE,), ptx=True)
    return aot.compile_job(job)


def problem(name):
    _, how = PROGRAMS[name]
    return blackwell.Problem(
        tiling=blackwell.tiling(how["rows"], how.get("experts", 1), how["outputs"]),
        block=formats.get(how["format"]).block,
        outputs=how["outputs"],
        bytes=how["width"] // 2,
        out_dtype=blackwell.stored(how.get("out_dtype", "bfloat16")),
    )


@pytest.mark.parametrize("name", EACH)
def test_b200_gets_block_scaled_instructions_fed_by_tma(name):
    ptx, of = compiled(name).ptx, problem(name)
    ctas = 2 if of.tiling.pair else 1
    kind = {
        16: "mxf4nvf4.block_scale.scale_vec::4X",
        32: "mxf4.block_scale.scale_vec::2X",
    }[of.block]
    issued = re.findall(r"tcgen05\.mma[\w.:]*", ptx)
    assert set(issued) == {f"tcgen05.mma.cta_group::{ctas}.kind::{kind}"}
    assert len(issued) == of.tiling.stages * 256 // 64  # K of an instruction is 64
    scales = re.findall(r"tcgen05\.cp[\w.:]*", ptx)
    assert set(scales) == {f"tcgen05.cp.cta_group::{ctas}.32x128b.warpx4"}
    assert len(scales) == of.tiling.stages * of.groups * (1 + of.x_tiles)
    loads = re.findall(r"cp\.async\.bulk\.tensor[\w.]*\.shared::\w+\.global[\w.:]*", ptx)
    assert len(loads) >= 4 and all("mbarrier::complete_tx" in load for load in loads)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta", ptx)
    assert "mma.sync" not in ptx and "wgmma" not in ptx  # no other way was taken


@pytest.mark.parametrize("name", EACH)
def test_b200_kernel_stays_within_its_resources(name):
    found = resources.resources(compiled(name), "b200")
    (kernel,) = [one for one in found if "mosaic" in one.kernel]
    of = problem(name)
    assert kernel.excess == []
    assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0
    assert 0 <= kernel.shared - of.shared_memory <= 1024  # barriers and padding come on top
    assert kernel.registers * 256 <= 65536  # a block of two warpgroups


def test_codes_reach_the_kernel_without_a_copy():
    hlo = compiled("decode nvfp4").hlo
    call = next(line for line in hlo.splitlines() if 'custom_call_target="mosaic_gpu' in line)
    names = re.search(r"custom-call\(([^)]*)\)", call)[1]
    operands = [name.strip() for name in re.sub(r"/\*.*?\*/", "", names).split(",")]
    made = {}
    for name, rows in ((operands[2], 128 * 1536), (operands[5], 1024)):
        line = re.search(rf"(?m)^\s*{re.escape(name)} = (\S+) (\S+?)\(", hlo)
        made[rows] = line[2]
        assert line[1].startswith(f"u8[{rows},1024]")
    assert set(made.values()) <= {"bitcast", "parameter"}
