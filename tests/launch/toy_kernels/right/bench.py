"""A kernel that is right."""

from toy_kernels import benches

BENCHES = benches("right", lambda x: x + x)
