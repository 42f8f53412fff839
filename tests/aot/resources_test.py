"""What kernels take, read from ptxas and from dumps; each limit is shown a kernel beyond it."""

import pytest

from trace_jax.aot import launches, resources
from trace_jax.aot.compile import Compiled, CompileError

HEAD = ".version 9.0\n.target {arch}\n.address_size 64\n"
PLAIN = """
.visible .entry {name}(.param .u64 p)
{{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    st.global.u32 [%rd1], %r1;
    ret;
}}
"""
LOCAL = """
.visible .entry local(.param .u64 p, .param .u32 i)
{
    .local .align 4 .b8 depot[64];
    .shared .align 4 .b8 tile[512];
    .reg .b64 %rd<6>;
    .reg .b32 %r<4>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [i];
    mov.u32 %r2, %tid.x;
    mov.u64 %rd2, depot;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.local.u32 [%rd4], %r2;
    and.b32 %r3, %r2, 15;
    mul.wide.u32 %rd3, %r3, 4;
    add.s64 %rd5, %rd2, %rd3;
    ld.local.u32 %r3, [%rd5];
    st.shared.u32 [tile], %r3;
    ld.shared.u32 %r3, [tile+4];
    st.global.u32 [%rd1], %r3;
    ret;
}
"""


def compiled(ptx, **shared):
    return Compiled(
        hlo="", written="", ptx=ptx, memory={}, lower_s=0.0, compile_s=0.0, shared=shared
    )


@pytest.mark.parametrize(("target", "arch"), [("h200", "sm_90a"), ("b200", "sm_100a")])
def test_every_kernel_of_every_module_is_counted(target, arch):
    head = HEAD.format(arch=arch)
    both = head + PLAIN.format(name="b") + LOCAL
    text = "\n".join(["", f"// without a kernel\n{head}", head + PLAIN.format(name="a"), both])
    found = resources.resources(compiled(text, a=7168, local=1024), target)
    kernels = {one.kernel: one for one in found}
    assert sorted(kernels) == ["a", "b", "local"]
    assert all(0 < one.registers <= 32 for one in found)
    assert (kernels["a"].stack, kernels["a"].shared, kernels["a"].excess) == (0, 7168, [])
    assert kernels["b"].excess == ["a launch that is not known"]
    assert kernels["local"].stack == 64 and kernels["local"].shared == 512 + 1024
    assert kernels["local"].excess == ["64 bytes of local memory (0 stored, 0 loaded by spills)"]
    lines = resources.table(found).splitlines()
    assert lines[0].split() == ["kernel", "registers", "local", "shared"]
    assert sorted(line.split()[0] for line in lines[1:]) == ["a", "b", "local"]


SAID = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kern' for 'sm_90a'
ptxas info    : Function properties for kern
    280 bytes stack frame, 300 bytes spill stores, 304 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {smem} bytes smem
"""


def parsed(registers=255, smem=16, launched=0):
    said = SAID.format(registers=registers, smem=smem)
    return resources._parsed("kern", said, launched)


def test_spills_are_read_and_are_too_much():
    found = parsed()
    assert (found.stack, found.spill_stores, found.spill_loads) == (280, 300, 304)
    assert (found.registers, found.static_shared, found.shared) == (255, 16, 16)
    says = "280 bytes of local memory (300 stored, 304 loaded by spills)"
    assert found.excess == [says]


def test_limits_are_those_of_a_thread_and_of_a_block():
    assert parsed(launched=232448 - 16).excess[1:] == []
    assert parsed(launched=232448 - 15).excess[1:] == [
        "232449 bytes of shared memory, at most 232448"
    ]
    assert parsed(registers=256).excess[1:] == ["256 registers, at most 255"]


def test_ptx_that_ptxas_refuses_is_an_error_with_what_it_says():
    text = HEAD.format(arch="sm_90a") + PLAIN.format(name="a").replace("st.global", "st.nowhere")
    says = r"ptxas for h200: got exit status \d+, need 0\.(?s:.*)nowhere"
    with pytest.raises(CompileError, match=says):
        resources.resources(compiled(text), "h200")


def test_what_has_no_ptx_is_refused():
    with pytest.raises(ValueError, match=r"got a program without PTX(?s:.*)Fix: Job\(ptx=True\)"):
        resources.resources(compiled(""), "h200")
    with pytest.raises(ValueError, match="aot: resources: got v6e, need PTX of a GPU"):
        resources.resources(compiled(HEAD.format(arch="sm_90a")), "v6e")


def test_a_missing_ptxas_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "PLUGINS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"aot: ptxas: got no .*Fix: make setup-aot"):
        resources.ptxas()


TO = "threads: [128, 1, 1]  shared_memory:"  # as XLA writes it
THUNKS = f"""
001: kCustomKernel [source       | next=002 (1)] kern grid: [16, 1, 1] {TO} 7168 bytes
002: kCopy         [prev=001 (1) | next=003 (1)] kCopy
    003: kCustomKernel [prev=002 (1) | sink        ] loop_fusion grid: [8, 1, 1] {TO} 0 bytes
    004: kCustomKernel [source | sink] kern grid: [4, 1, 1] {TO} 1024 bytes
"""
CALLS = ("@mosaic_gpu_launch_kernel(ptr", "@mosaic_gpu_build_kernel_spec(ptr")
GRID = "i32 %7, i32 1, i32 1, i32 2, i32 0, i32 0, i32 128, i32 1, i32 1"
HOST = """
declare void {call}, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, ptr, ptr)
  call void {call} %0, {grid}, i32 102420, i32 0, i32 6, ptr %1, ptr %231)
"""


@pytest.mark.parametrize("call", CALLS)
def test_launches_are_read_from_both_dumps(tmp_path, call):
    xla, mosaic = tmp_path / "xla", tmp_path / "mosaic"
    xla.mkdir()
    mosaic.mkdir()
    assert launches.shared_memory(xla, mosaic) == {}
    (xla / "module_0001.jit_f.thunk_sequence.txt").write_text(THUNKS)
    (mosaic / "kernel_0.ll").write_text(HOST.format(call=call, grid=GRID))
    (mosaic / "kernel_0.ptx").write_text(".visible .entry mosaic_kern(\n")
    want = {"kern": 7168, "loop_fusion": 0, "mosaic_kern": 102420}
    assert launches.shared_memory(xla, mosaic) == want
