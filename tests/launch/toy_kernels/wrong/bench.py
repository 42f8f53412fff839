"""A kernel that is a little off."""

from toy_kernels import benches

BENCHES = benches("wrong", lambda x: x * 2.01)
