"""A kernel that never ends."""

import time

from toy_kernels import benches


def kernel(x):
    time.sleep(600)


BENCHES = benches("hanging", kernel)
