"""A kernel that refuses."""

from toy_kernels import benches


def kernel(x):
    raise NotImplementedError("refusing: got a kernel, need none.")


BENCHES = benches("refusing", kernel)
