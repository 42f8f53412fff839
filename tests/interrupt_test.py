"""Signals become a flag the loop can read, and the old handlers come back."""

import os
import signal
import threading

import pytest

from trace_jax.interrupt import graceful_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_flag_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    with graceful_stop() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_nothing_is_touched():
    seen = []

    def work():
        before = signal.getsignal(signal.SIGINT)
        with graceful_stop() as stop:
            seen.append((bool(stop), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
