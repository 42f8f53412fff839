"""Live progress of long work: a bar on a terminal, a plain line now and then in a log file."""

import sys
import time
from typing import Any

LINE_EVERY_S = 5.0


class Progress:
    """Counts up to `total`. A context manager, so that Ctrl-C leaves a clean terminal line."""

    def __init__(self, total: int, desc: str, initial: int = 0, stream: Any = None):
        self.total, self.desc, self.n = total, desc, initial
        self._initial = initial
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._last_line: float | None = None
        self._postfix = ""
        self._shown = -1
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm  # not needed for log files

            self._bar = tqdm(
                total=total, desc=desc, initial=initial, file=self._stream, dynamic_ncols=True
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def update(self, n: int = 1, **postfix: float | int | str) -> None:
        """Adds `n` and shows values beside the count; numbers get four significant digits."""
        self.n += n
        self._postfix = ", ".join(f"{name}={_short(value)}" for name, value in postfix.items())
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix, refresh=False)
            self._bar.update(n)
            return
        now = time.monotonic()
        if self._last_line is None or now - self._last_line >= LINE_EVERY_S or self.n >= self.total:
            self._last_line = now
            self._line()

    def close(self) -> None:
        """Ends the line of the bar, or writes the last count if it is not in the log yet."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self.n != self._shown and self.n != self._initial:
            self._line()

    def _line(self) -> None:
        self._shown = self.n
        seconds = time.monotonic() - self._started
        done = self.n - self._initial
        left = f", about {seconds / done * (self.total - self.n):.0f} s left" if done > 0 else ""
        tail = f": {self._postfix}" if self._postfix else ""
        print(
            f"{self.desc} {self.n}/{self.total} ({seconds:.0f} s{left}){tail}",
            file=self._stream,
            flush=True,
        )


def progress(total: int, desc: str, initial: int = 0) -> Progress:
    """`with progress(60, "GRPO", initial=step) as bar: ... bar.update(1, reward=0.4)`."""
    return Progress(total, desc, initial)


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
