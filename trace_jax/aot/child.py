"""The process that `compile.py` starts: builds one program, compiles it, writes what came out."""

import contextlib
import importlib
import json
import pathlib
import sys
import time
from typing import Any

import jax

from pallas_kernels.common import device
from trace_jax.aot import targets

_MEMORY = {
    "argument": "argument_size_in_bytes",
    "output": "output_size_in_bytes",
    "temp": "temp_size_in_bytes",
    "alias": "alias_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}


def main(folder: pathlib.Path) -> None:
    """Reads `job.json` in `folder` and writes `optimised.hlo`, `written.hlo` and `facts.json`."""
    job = json.loads((folder / "job.json").read_text())
    one = targets.device_for_kernels(job["target"])  # programs of many devices have meshes
    here = contextlib.nullcontext() if job["devices"] else one
    with device.described(*targets.platform(job["target"])), here:
        _compile(job, folder)


def _compile(job: dict[str, Any], folder: pathlib.Path) -> None:
    module, _, name = job["builder"].partition(":")
    build = getattr(importlib.import_module(module), name)
    shape = None if job["devices"] is None else tuple(job["devices"])
    function, arguments = build(targets.topology(job["target"], shape), **job["kwargs"])
    start = time.perf_counter()
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    lowered = jitted.lower(*arguments)
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    written, executable = lowered.compiler_ir("hlo"), compiled.runtime_executable()
    assert written is not None and executable is not None
    (folder / "written.hlo").write_text(module_text(written.get_hlo_module()))
    modules = executable.hlo_modules()
    (folder / "optimised.hlo").write_text("\n".join(module_text(module) for module in modules))
    memory = compiled.memory_analysis()
    facts = {
        "memory": {key: int(getattr(memory, name)) for key, name in _MEMORY.items()},
        "lower_s": lowered_at - start,
        "compile_s": end - lowered_at,
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def module_text(module: Any) -> str:
    """HLO text with every constant written out: tables are told apart by what is in them."""
    options = sys.modules[type(module).__module__].HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = True
    return module.to_string(options)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
