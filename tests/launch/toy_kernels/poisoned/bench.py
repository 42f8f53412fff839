"""A kernel after whose error nothing works in its process, as after an error of a GPU."""

import jax

from toy_kernels import benches


def kernel(x):
    def never(*_, **__):
        raise jax.errors.JaxRuntimeError("the context is dead")

    jax.block_until_ready = never
    return x + 1


BENCHES = benches("poisoned", kernel)
