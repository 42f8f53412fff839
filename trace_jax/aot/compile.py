"""Compiles one program for a target in a process of its own: a compiler may crash, the caller not.

A job names a *builder*, "module:function". In the new process it is called with a
`targets.Topology` and the job's arguments, and returns (function, abstract arguments), as
`jax.jit(function).lower(*arguments)` takes them; `aot/step.py` has one.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any

from trace_jax.aot import launches, targets
from trace_jax.checks import message, require

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLUGINS = ROOT / ".aot"  # `make setup-aot` fills it
_TAIL = 2500  # characters of a failed compiler's last words


class CompileError(RuntimeError):
    """The target's compiler refused, crashed or ran out of time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to compile, for what."""

    builder: str  # "module:function"
    target: str
    devices: tuple[int, ...] | None = None  # see `targets.topology`
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # JSON
    ptx: bool = False  # GPUs: also keep the PTX of each kernel
    flags: str = ""  # more XLA_FLAGS
    path: tuple[str, ...] = ()  # more folders to import the builder from
    timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came out."""

    hlo: str  # optimised
    written: str  # the program as JAX hands it to XLA, in the same text form
    ptx: str  # of all kernels; "" if not asked for
    memory: dict[str, int]  # bytes on each device: argument, output, temp, alias, code
    lower_s: float  # tracing and lowering
    compile_s: float
    # bytes of shared memory that each kernel is launched with, by name; if PTX was asked for
    shared: dict[str, int] = dataclasses.field(default_factory=dict)


def compile_job(job: Job) -> Compiled:
    """Runs a job in a new process.

    Raises: ValueError for an unknown target; FileNotFoundError if `make setup-aot` has not been
            run; CompileError with the compiler's last words if it refuses, crashes or takes
            longer than `timeout_s`.
    """
    targets.spec(job.target)
    _require_plugins(job.target)
    with tempfile.TemporaryDirectory(prefix="trace_jax_aot_") as folder:
        out = pathlib.Path(folder)
        (out / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
        (out / "mosaic").mkdir()
        command = [sys.executable, "-m", "trace_jax.aot.child", folder]
        with (out / "stderr").open("w+") as stderr:
            try:
                code = subprocess.run(
                    command,
                    env=_environment(job, out),
                    stdout=stderr,
                    stderr=stderr,
                    timeout=job.timeout_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        _require_success(job, code, (out / "stderr").read_text(errors="replace"))
        facts = json.loads((out / "facts.json").read_text())
        kernels = [*sorted((out / "dump").glob("*.ptx")), *sorted((out / "mosaic").glob("*.ptx"))]
        return Compiled(
            hlo=(out / "optimised.hlo").read_text(),
            written=(out / "written.hlo").read_text(),
            ptx="\n".join(kernel.read_text() for kernel in kernels),
            shared=launches.shared_memory(out / "dump", out / "mosaic") if job.ptx else {},
            **facts,
        )


def _require_plugins(target: str) -> None:
    version = importlib.metadata.version("jax")
    gpu = targets.is_gpu(target)
    needed = PLUGINS / (f"jax_cuda13_plugin-{version}.dist-info" if gpu else "libtpu")
    require(
        needed.is_dir(),
        f"aot: compiler for {target}",
        f"no {needed}",
        f"the compilers that belong to jax {version}",
        "make setup-aot (downloads about 400 MB into .aot/, nothing into .venv)",
        FileNotFoundError,
    )


def _environment(job: Job, out: pathlib.Path) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", ""), job.flags]
    if job.ptx:
        flags.append(f"--xla_dump_to={out / 'dump'} --xla_dump_emitter_re=^ptx$")
    path = [*job.path, str(ROOT), str(PLUGINS), os.environ.get("PYTHONPATH", "")]
    # Mosaic GPU compiles its kernels itself and has a dump of its own, into a folder that exists
    mosaic = {
        "MOSAIC_GPU_DUMP_TO": str(out / "mosaic"),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_HOST_LLVM": "1",  # says how it is launched
    }
    return (
        os.environ
        | (mosaic if job.ptx else {})
        | {
            "JAX_PLATFORMS": "cpu",  # else the plug-in looks for a device and gives up
            "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the cloud where it is
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # there is no TPU to share
            "TPU_LOG_DIR": "disabled",
            "TPU_LIBRARY_PATH": str(PLUGINS / "libtpu" / "libtpu.so"),
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program has no dump
            "XLA_FLAGS": " ".join(filter(None, flags)),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
    )


def _require_success(job: Job, code: int | None, stderr: str) -> None:
    if code == 0:
        return
    if code is None:
        got = f"no answer in {job.timeout_s:g} s"
    elif code < 0:
        got = f"a crash ({signal.Signals(-code).name})"
    else:
        got = f"exit status {code}"
    where = f"aot: {job.builder} for {job.target}"
    tail = "\n".join(line for line in stderr.splitlines() if not _is_noise(line))[-_TAIL:]
    raise CompileError(f"{message(where, got, 'a compiled program')} Its last words:\n{tail}")


def _is_noise(line: str) -> bool:
    return line[:1] in "IW" and line[1:5].isdigit()  # glog: information and warnings
