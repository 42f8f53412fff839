"""Ctrl-C and SIGTERM end a run between two steps, when everything can be saved."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class StopFlag:
    """Set once a stop was asked for; the loop looks at it after each step."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def graceful_stop() -> Iterator[StopFlag]:
    """Turns the first SIGINT or SIGTERM into a flag; a second one interrupts at once.

    A step donates its buffers, so state in the middle of one cannot be saved. Outside the main
    thread signals cannot be handled, and the flag is never set.
    """
    flag = StopFlag()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if flag:
            raise KeyboardInterrupt
        flag.signal = number
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield flag
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
