"""What a GPU kernel takes of a multiprocessor: registers, memory in place of them, shared memory.

From `ptxas -v`, NVIDIA's assembler, which needs no device. It comes from PyPI's nvidia-cuda-nvcc
(`make setup-aot`), never from the machine, so that its version is the locked one.
"""

import dataclasses
import pathlib
import re
import subprocess
import tempfile

from trace_jax.aot import targets
from trace_jax.aot.compile import PLUGINS, Compiled, CompileError
from trace_jax.checks import message, require

MAX_REGISTERS = 255  # of a thread
MAX_SHARED = 227 * 1024  # bytes of a block on 9.0 and 10.0 (CUDA programming guide)

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_COUNTS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "static_shared": re.compile(r"(\d+) bytes smem"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """Of one kernel; bytes but for the registers of a thread."""

    kernel: str
    registers: int
    stack: int  # local memory of a thread: spilled registers and arrays indexed by variables
    spill_stores: int
    spill_loads: int
    static_shared: int
    shared: int | None  # all of it, as launched; None: the launch is not known

    @property
    def excess(self) -> list[str]:
        """What a kernel that is meant to be fast must not do; empty if there is nothing."""
        found = []
        if self.spill_stores or self.spill_loads or self.stack:
            found.append(
                f"{self.stack} bytes of local memory ({self.spill_stores} stored, "
                f"{self.spill_loads} loaded by spills)"
            )
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers, at most {MAX_REGISTERS}")
        if self.shared is None:
            found.append("a launch that is not known")
        elif self.shared > MAX_SHARED:
            found.append(f"{self.shared} bytes of shared memory, at most {MAX_SHARED}")
        return found


def resources(compiled: Compiled, target: str) -> list[Resources]:
    """Of every kernel of a program that was compiled with `Job(ptx=True)`.

    Raises: ValueError if it has no PTX or the target is no GPU; FileNotFoundError without ptxas;
            CompileError if ptxas refuses the PTX.
    """
    where, need = "aot: resources", "PTX of a GPU"
    require(targets.is_gpu(target), where, target, need)
    modules = [text for text in re.split(r"(?m)^(?=\.version\b)", compiled.ptx) if ".entry" in text]
    require(bool(modules), where, "a program without PTX", need, "Job(ptx=True)")
    return [found for text in modules for found in _assembled(text, target, compiled.shared)]


def ptxas() -> pathlib.Path:
    """The locked assembler. Raises: FileNotFoundError if `make setup-aot` has not brought it."""
    found = PLUGINS / "nvidia" / "cu13" / "bin" / "ptxas"
    fix = "make setup-aot (downloads about 400 MB into .aot/, nothing into .venv)"
    require(
        found.is_file(), "aot: ptxas", f"no {found}", "nvidia-cuda-nvcc", fix, FileNotFoundError
    )
    return found


def table(found: list[Resources]) -> str:
    """One line a kernel."""
    lines = [f"{'kernel':<40} registers  local  shared"]
    for one in found:
        shared = "?" if one.shared is None else str(one.shared)
        lines.append(f"{one.kernel:<40} {one.registers:>9}  {one.stack:>5}  {shared:>6}")
    return "\n".join(lines)


def _assembled(text: str, target: str, launched: dict[str, int]) -> list[Resources]:
    arch = re.search(r"(?m)^\.target (\w+)", text)
    assert arch is not None, text[:200]
    with tempfile.TemporaryDirectory(prefix="trace_jax_ptxas_") as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(text)
        command = [ptxas(), "-v", "--gpu-name", arch[1], source, "-o", source.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        got = f"exit status {done.returncode}"
        raise CompileError(f"{message(f'aot: ptxas for {target}', got, '0')} It says:\n{said}")
    parts = _ENTRY.split(said)[1:]
    return [
        _parsed(name, text, launched.get(name))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def _parsed(kernel: str, said: str, launched: int | None) -> Resources:
    counts = {name: pattern.search(said) for name, pattern in _COUNTS.items()}
    numbers = {name: int(found[1]) if found else 0 for name, found in counts.items()}
    assert numbers["registers"] > 0, said
    shared = None if launched is None else launched + numbers["static_shared"]
    return Resources(kernel=kernel, shared=shared, **numbers)
