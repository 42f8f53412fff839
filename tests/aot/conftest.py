"""Runs what XLA:GPU's optimiser left of a program on this CPU.

The optimised HLO says which float32 operations the kernels do, and in which order; run elsewhere it
shows whether the optimiser changed results. How the GPU then does one operation (its approximate
`div.full.f32`, flushing of subnormals) is read off the PTX instead.
"""

import re

import jax
import jaxlib._jax as jaxlib_jax
import numpy as np
import pytest
from jax._src.lib import xla_client
from jax.extend.backend import get_backend
from jaxlib import _hlo

from trace_jax.aot.hlo import Graph


@pytest.fixture(scope="session")
def run_on_cpu():
    """The function below, for tests, which cannot import it."""
    return run


def run(hlo: str, *arguments):
    """The outputs of an optimised one-device program without library calls."""
    module = _hlo.hlo_module_from_text(_portable(hlo)).as_serialized_hlo_module_proto()
    program = jaxlib_jax.mlir.hlo_to_stablehlo(module)
    devices = xla_client.DeviceList(tuple(jax.devices("cpu")[:1]))
    compiled = get_backend("cpu").compile_and_load(program, devices, xla_client.CompileOptions())
    outputs = compiled.execute([jax.device_put(a, jax.devices("cpu")[0]) for a in arguments])
    return [np.asarray(output) for output in outputs]


def _portable(hlo: str) -> str:
    """The same without what only a GPU knows: calls for fusions, reshapes for bitcasts."""
    renamed = {}
    for computation in Graph(hlo).computations.values():
        for instruction in computation.values():
            for dims, layout in re.findall(r"\[([\d,]*)\]\{([\d,]*)\}", instruction.type):
                rank = len(dims.split(","))  # a bitcast of another layout is no reshape
                assert layout == ",".join(map(str, range(rank - 1, -1, -1))), instruction.type
            if instruction.opcode == "bitcast":
                source = computation[instruction.operands[0]]
                same = source.dtype == instruction.dtype
                renamed[instruction.name] = "reshape" if same else "bitcast-convert"
    lines = []
    for line in hlo.splitlines():
        head = re.match(r"\s*(?:ROOT )?%(\S+) = ", line)
        if head and head[1] in renamed:
            line = line.replace(" bitcast(", f" {renamed[head[1]]}(", 1)
        fusion = r" fusion\((.*?)\), kind=\w+, calls=(%[\w.\-]+).*"
        lines.append(re.sub(fusion, r" call(\1), to_apply=\2", line))
    return "\n".join(lines)
