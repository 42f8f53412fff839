"""Every kernel, compiled for devices that are not here: instructions, spills, limits, exactness.

What is compiled is written out in TABLE: for each op and kernel a size of decoding and one of
prefill or training, on each device that has it. The rows without a target in `fast` take the time
of `make test-slow`.
"""

import dataclasses
import functools
import re

import pytest

from pallas_kernels import catalogue
from trace_jax.aot import compile as aot
from trace_jax.aot import ptx, resources, targets

WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"
TCGEN05 = r"tcgen05\.mma\.cta_group::\d\.kind::f16"
NVFP4 = r"tcgen05\.mma\.cta_group::\d\.kind::mxf4nvf4\.block_scale\.(?:scale_vec::4X|block16)"
# newer JAX takes the wider kind for MXFP4 too: what tells it from NVFP4 is a scale for each 32
MXFP4 = r"tcgen05\.mma\.cta_group::\d\.kind::mxf4(?:nvf4)?\.block_scale\.(?:scale_vec::2X|block32)"
BF16 = {"h200": WGMMA, "b200": TCGEN05}  # FP4 decoded to BF16, or BF16 as it is
NO_PRODUCT = {"h200": r"\.entry", "b200": r"\.entry"}
ON_TPU = {"v6e": "tpu_custom_call", "tpu7x": "tpu_custom_call"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One case of one kernel."""

    op: str
    impl: str
    size: str  # "decode" | "prefill" (or training)
    case: str
    needs: dict[str, str]  # target -> what its PTX (a TPU: its program) has to contain
    fast: tuple[str, ...] = ()  # targets that every test run compiles
    exact: bool = False  # no inexact float instruction

    def __str__(self) -> str:
        return f"{self.op}-{self.impl}-{self.case}"


def _rows(op, impl, needs, *, decode, prefill, fast=(), fast_prefill=(), exact=False):
    common = {"op": op, "impl": impl, "needs": needs, "exact": exact}
    return (
        Row(size="decode", case=decode, fast=fast, **common),
        Row(size="prefill", case=prefill, fast=fast_prefill, **common),
    )


TABLE = (
    *_rows(
        "quantize",
        "triton",
        NO_PRODUCT,
        decode="decode",
        prefill="tokens",
        fast_prefill=("h200",),
        exact=True,
    ),
    *_rows(
        "quantize", "triton", NO_PRODUCT, decode="tokens_mxfp4", prefill="tokens_4over6", exact=True
    ),
    *_rows("quantize", "mosaic_tpu", ON_TPU, decode="decode", prefill="tokens", fast=("v6e",)),
    *_rows(  # of the trainer alone: what is smaller is the rounding without a record
        "fake_quant",
        "triton",
        NO_PRODUCT,
        decode="tokens_plain",
        prefill="tokens",
        fast_prefill=("b200",),
        exact=True,
    ),
    *_rows(
        "fake_quant",
        "triton",
        NO_PRODUCT,
        decode="tokens_mxfp4",
        prefill="tokens_mantissa",
        exact=True,
    ),
    *_rows(
        "fake_quant",
        "mosaic_tpu",
        ON_TPU,
        decode="tokens_plain",
        prefill="tokens",
        fast_prefill=("tpu7x",),
    ),
    *_rows("fp4_matmul", "triton", BF16, decode="m16", prefill="m8192", fast=("h200",)),
    *_rows(
        "fp4_matmul",
        "mosaic_gpu",
        {"b200": NVFP4},
        decode="m16_w4a4",
        prefill="m8192_w4a4",
        fast_prefill=("b200",),
    ),
    *_rows(
        "fp4_grouped_matmul",
        "triton",
        BF16,
        decode="decode_t64_gate_up",
        prefill="prefill_gate_up",
        fast=("b200",),
    ),
    *_rows(
        "fp4_grouped_matmul",
        "triton",
        BF16,
        decode="decode_t256_down",
        prefill="training_down",
        fast_prefill=("h200",),
    ),
    *_rows(
        "fp4_grouped_matmul",
        "mosaic_gpu",
        {"b200": NVFP4},
        decode="w4a4_t64_gate_up",
        prefill="prefill_w4a4_gate_up",
    ),
    Row(
        op="fp4_grouped_matmul",
        impl="mosaic_gpu",
        size="prefill",
        case="prefill_mxfp4_gate_up",
        needs={"b200": MXFP4},
        fast=("b200",),
    ),
    *_rows(
        "fp4_kv_attention_decode",
        "triton",
        BF16,
        decode="b64_c4096",
        prefill="b4_c32768",
        fast=("h200",),
    ),
    *_rows(
        "fp4_kv_attention_decode",
        "triton",
        NO_PRODUCT,
        decode="write_b64",
        prefill="write_b64_mantissa",
        fast=("b200",),
        exact=True,
    ),
    *_rows(
        "token_logprob", "triton", BF16, decode="m256", prefill="m8192_gradient", fast=("b200",)
    ),
    *_rows(
        "token_logprob",
        "mosaic_tpu",
        ON_TPU,
        decode="m256",
        prefill="m8192_gradient",
        fast=("v6e",),
    ),
)

EACH = [
    pytest.param(
        row, target, id=f"{row}-{target}", marks=() if target in row.fast else pytest.mark.slow
    )
    for row in TABLE
    for target in row.needs
]


@functools.cache
def compiled(op, case, impl, target):
    return aot.compile_job(
        aot.Job(
            builder="trace_jax.aot.kernels:kernel",
            target=target,
            kwargs={"op": op, "case": case, "impl": impl},
            ptx=targets.is_gpu(target),
        )
    )


@pytest.mark.parametrize(("row", "target"), EACH)
def test_a_kernel_compiles_to_what_it_is_meant_to_be(row, target):
    done = compiled(row.op, row.case, row.impl, target)
    if not targets.is_gpu(target):
        assert re.search(row.needs[target], done.hlo)
        return
    assert re.search(row.needs[target], done.ptx)
    found = resources.resources(done, target)
    assert {kernel.kernel: kernel.excess for kernel in found if kernel.excess} == {}
    if row.exact:
        assert dict(ptx.inexact(ptx.float_instructions(done.ptx))) == {}


TARGETS = {"triton": {"h200", "b200"}, "mosaic_gpu": {"b200"}, "mosaic_tpu": {"v6e", "tpu7x"}}


@pytest.mark.parametrize("op", catalogue.OPS)
def test_the_table_has_both_sizes_of_every_kernel_on_every_device(op):
    benches = catalogue.benches(op)
    kernels = {impl for bench in benches for impl in bench.impls} & set(TARGETS)
    wanted = {
        (impl, size, target)
        for impl in kernels
        for size in ("decode", "prefill")
        for target in TARGETS[impl]
    }
    rows = [row for row in TABLE if row.op == op]
    assert {(row.impl, row.size, target) for row in rows for target in row.needs} == wanted
    real = {bench.case for bench in benches if not bench.small}
    assert {row.case for row in rows} <= real
    assert {row.impl for row in rows if row.fast} == kernels  # each has a row in every test run
