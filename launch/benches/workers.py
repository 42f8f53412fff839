"""Processes that answer questions about one op each; one that dies or hangs is replaced."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import IO, Any

from launch.benches.kernel_check import MARK

_START = 120.0  # seconds more for the first answer: imports, and finding the device
_LAST_WORDS = 1500  # characters
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # all ops share the device's memory
    "PYTHONUNBUFFERED": "1",
}


class _Worker:
    """One process and the thread that reads what it answers."""

    def __init__(self, package: str) -> None:
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.benches.kernel_check", package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env=os.environ | _ENVIRONMENT,
        )
        self.asked = 0
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(line.removeprefix(MARK))
        self.answers.put(None)  # it is gone

    def ask(self, request: dict[str, Any], timeout_s: float) -> str | None:
        """A line of JSON; None if the process died. Raises: queue.Empty if it says nothing."""
        assert self.process.stdin is not None
        self.asked += 1
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it died since the last answer
            return None
        return self.answers.get(timeout=timeout_s)

    def close(self) -> str:
        """Ends the process; returns its last words."""
        self.process.kill()
        self.process.wait()
        self.stderr.seek(0)
        said = self.stderr.read().decode(errors="replace")
        self.stderr.close()
        return said[-_LAST_WORDS:]


class Workers:
    """A process for each name that is asked, kept until the end."""

    def __init__(self, package: str, timeout_s: float, deadline: float) -> None:
        self._package, self._timeout_s, self._deadline = package, timeout_s, deadline
        self._running: dict[str, _Worker] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._running.values():
            worker.close()

    def start(self, names: Iterable[str]) -> None:
        """Starts processes that will be asked later: each takes seconds to find the device."""
        for name in names:
            self._running[name] = _Worker(self._package)

    def ask(self, name: str, what: str, **details: Any) -> Any:
        """The answer; a dictionary with "failed" if there is none, and "out_of_time" if the
        deadline came first: then nothing is known."""
        if name not in self._running:
            self.start([name])
        worker = self._running[name]
        allowed = self._timeout_s + (0.0 if worker.asked else _START)
        left = max(1.0, self._deadline - time.monotonic())
        try:
            answer = worker.ask({"ask": what} | details, min(allowed, left))
        except queue.Empty:
            said = self._drop(name)
            if left < allowed:
                return {"failed": "the time was up", "out_of_time": True}
            return {"failed": f"no answer in {allowed:.0f} s. {said}"}
        if answer is None:
            process = worker.process
            process.wait()
            return {"failed": f"it died with status {process.returncode}. {self._drop(name)}"}
        found = json.loads(answer)
        if isinstance(found, dict) and found.pop("ends", False):
            self._drop(name)
        return found

    def _drop(self, name: str) -> str:
        said = self._running.pop(name).close()
        return f"Its last words:\n{said}" if said else "It said nothing."
