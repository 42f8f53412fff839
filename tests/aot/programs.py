"""Builders that the tests of `trace_jax.aot` compile in processes of their own."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax.aot import step
from trace_jax.qat import sites
from trace_jax.types import Mean


class _NoStats:
    """Every count of a site is empty."""

    def __getattr__(self, name):
        return Mean(total=jnp.float32(0), count=jnp.float32(0))


def _cast_and_back(x):
    """NVFP4 as one would write it at first: scale, cast to FP4, cast back, scale back."""
    exact = jax.lax.stop_gradient(x).astype(jnp.float32)
    blocks = exact.reshape(*x.shape[:-1], -1, 16)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) * jnp.float32(1 / 6)
    scale = scale.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    codes = (blocks / scale).astype(jnp.float4_e2m1fn)
    with jax.named_scope("value"):
        value = (codes.astype(jnp.float32) * scale).reshape(x.shape).astype(x.dtype)
    return sites.straight_through(x, jax.lax.stop_gradient(value))


def naive_train_step(topology, **kwargs):
    """The real training step, but with casts in the place of the library's rounding."""
    sites.quantize_site = lambda x, *_, **__: (_cast_and_back(x), _NoStats())
    sites.quantize_weight = lambda w, format, dtype: _cast_and_back(w.astype(dtype))
    return step.train_step(topology, **kwargs)


def segfault(topology):
    """What a bad kernel does to a compiler."""
    print("about to fall", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse(topology):
    """An exception of the builder's own."""
    raise ValueError("this program is not for you")


def hang(topology):
    """Never answers."""
    time.sleep(600)


def sum_over_devices(topology):
    """A mean over all devices of a topology; each holds a row."""
    count = len(topology.devices)
    mesh = Mesh(np.array(topology.devices), ("all",))
    row = NamedSharding(mesh, P("all"))
    x = jax.ShapeDtypeStruct((count, 1024), jnp.float32, sharding=row)
    return (lambda x: x - jnp.mean(x, axis=0, keepdims=True)), (x,)
