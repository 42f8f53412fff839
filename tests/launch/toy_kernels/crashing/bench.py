"""A kernel that takes its process with it."""

import os
import signal
import sys

from toy_kernels import benches


def kernel(x):
    print("about to fall", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


BENCHES = benches("crashing", kernel)
