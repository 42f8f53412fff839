"""Which ops there are, and their cases. Looked up by name, so that one broken op breaks alone."""

import importlib

from pallas_kernels.common.bench import Bench
from trace_jax.checks import require

OPS = (
    "quantize",
    "fake_quant",
    "fp4_matmul",
    "fp4_grouped_matmul",
    "fp4_kv_attention_decode",
    "token_logprob",
)


def benches(op: str, package: str = "pallas_kernels") -> tuple[Bench, ...]:
    """The cases of an op.

    Args:   package: another one, with the same form, in which to look: for tests.
    Raises: ValueError for an op that there is none of.
    """
    if package == "pallas_kernels":
        require(op in OPS, "kernels: op", op, f"one of {list(OPS)}")
    return importlib.import_module(f"{package}.{op}.bench").BENCHES


def bench(op: str, case: str, package: str = "pallas_kernels") -> Bench:
    """One case of an op by name. Raises: ValueError for an unknown one."""
    found = {bench.case: bench for bench in benches(op, package)}
    require(case in found, f"kernels: case of {op}", case, f"one of {list(found)}")
    return found[case]
