"""The run directory: where a run keeps everything, who may write to it, and whether it may go on.

<workdir>/config.json    the configuration (of the newest start)
          env.json       machine, versions and command of every start
          metrics.jsonl  one line a step          tensorboard/  the same for TensorBoard
          checkpoints/   see checkpoint.py        guidance/     guidance spilled to disk
          samples/       decoded answers          plots/ report.html
          audit.txt      every parameter and site: what the trainer quantises, or why not
          .lock          held while a process writes; contains its pid
"""

import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

from trace_jax.checks import message, require

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "ml-dtypes", "numpy")
FOLDERS = ("checkpoints", "samples", "plots", "tensorboard", "guidance")
_ABSENT = "(absent)"


class RunDirError(RuntimeError):
    """The folder cannot be used: not writable, in use, or of another run."""


@dataclasses.dataclass(kw_only=True)
class RunDir:
    """Paths of a run; while open it holds the lock. A context manager."""

    root: pathlib.Path
    resumed: bool = False  # the folder already held this run
    config_changes: list[str] = dataclasses.field(default_factory=list)  # allowed ones, on resume
    _lock: Any = None

    @property
    def metrics(self) -> pathlib.Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> pathlib.Path:
        return self.root / "report.html"

    def folder(self, name: str) -> pathlib.Path:
        """One of FOLDERS."""
        require(name in FOLDERS, "RunDir.folder", name, f"one of {FOLDERS}")
        return self.root / name

    def config(self) -> dict[str, Any]:
        """The configuration as plain JSON values."""
        return _read_json(self.root / "config.json")

    def write_samples(self, step: int, samples: list[dict[str, Any]], stage: str = "rl") -> None:
        """Writes decoded answers of a step: dicts with at least `prompt` and `response`."""
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        write_atomic(self.folder("samples") / f"{stage}_{step:06d}.jsonl", lines)

    def close(self) -> None:
        """Gives the folder free."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_run(workdir: str | os.PathLike[str], config: dict[str, Any]) -> RunDir:
    """Creates the run directory or opens it again to resume; holds its lock until closed.

    Args:    workdir: a folder; created if missing. config: `dataclasses.asdict` of the Config.
    Raises:  RunDirError if the folder cannot be written, another process writes to it, or it holds
             a run of another configuration. `steps`, `kernels.debug` and `run.*` (but not
             `run.init_from`) may change: such changes are recorded in env.json.
    """
    root = pathlib.Path(workdir).expanduser().absolute()
    run = RunDir(root=root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        run._lock = _take_lock(root)
        for name in FOLDERS:
            (root / name).mkdir(exist_ok=True)
        _check_and_record(run, json.loads(json.dumps(config)))
    except OSError as error:
        run.close()
        got = f"{root} ({error.strerror or error})"
        fix = "name a new or writable folder."
        raise RunDirError(message("--workdir", got, "a folder to write to", fix)) from error
    except RunDirError:
        run.close()
        raise
    return run


def read_run(workdir: str | os.PathLike[str]) -> RunDir:
    """The paths of an existing run, to read it: without the lock."""
    root = pathlib.Path(workdir).expanduser().absolute()
    need, fix = "a run directory with config.json", "give the --workdir of a training run."
    require((root / "config.json").is_file(), "run directory", root, need, fix, RunDirError)
    return RunDir(root=root, resumed=True)


def config_differences(old: Any, new: Any, where: str = "") -> dict[str, str]:
    """Fields that differ: {"section.field": "old -> new"}."""
    if isinstance(old, dict) and isinstance(new, dict):
        out: dict[str, str] = {}
        for key in dict.fromkeys((*old, *new)):
            path = f"{where}.{key}" if where else str(key)
            out |= config_differences(old.get(key, _ABSENT), new.get(key, _ABSENT), path)
        return out
    same = old == new and type(old) is type(new)
    return {} if same else {where: f"{_text(old)} -> {_text(new)}"}


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step: a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def environment() -> dict[str, Any]:
    """What a run depends on beside its configuration."""
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": devices[0].platform,
        "devices": [str(device) for device in devices],
        "processes": jax.process_count(),
        "git_commit": _git_commit(),
    }


def _may_change(field: str) -> bool:
    free = field in ("steps", "kernels.debug")  # neither changes what a step computes
    return free or (field.startswith("run.") and field != "run.init_from")


def _check_and_record(run: RunDir, config: dict[str, Any]) -> None:
    path = run.root / "config.json"
    starts: list[dict[str, Any]] = []
    if path.exists():
        different = config_differences(run.config(), config)
        refused = [
            f"{field}: {change}" for field, change in different.items() if not _may_change(field)
        ]
        require(
            not refused,
            str(run.root),
            "; ".join(refused),
            "the configuration this run was started with",
            "give a new --workdir, or the same configuration to resume this run.",
            RunDirError,
        )
        run.resumed = True
        run.config_changes = [f"{field}: {change}" for field, change in different.items()]
        if (run.root / "env.json").exists():
            starts = _read_json(run.root / "env.json")["starts"]
    starts.append({**environment(), "config_changes": run.config_changes})
    # env.json first: a kill in between must not lose the record of a change.
    write_atomic(run.root / "env.json", json.dumps({"starts": starts}, indent=1))
    write_atomic(path, json.dumps(config, indent=1))


def _take_lock(root: pathlib.Path) -> Any:
    lock = (root / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        got = f"in use by process {lock.read().strip() or '(unknown)'}"
        lock.close()
        fix = "wait for it or stop it, or give a new --workdir."
        raise RunDirError(message(str(root), got, "a folder of its own", fix)) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = "put the original file back, or give a new --workdir."
        raise RunDirError(message(str(path), f"bad JSON ({error})", "JSON", fix)) from error


def _text(value: Any) -> str:
    return value if value is _ABSENT else json.dumps(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the source tree, with "+" if files differ; None outside git."""
    here = pathlib.Path(__file__).parent
    try:
        args = ("git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+")
        done = subprocess.run(args, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git, or a slow network file system
        return None
    return done.stdout.strip() or None
