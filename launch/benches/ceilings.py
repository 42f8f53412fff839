"""What this device really does at best: bytes copied a second, operations of a matrix product."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from launch.benches.device_time import seconds_per_call

# (bytes to copy, rows and columns of a product): large enough to be bound by nothing else
_SIZES = {"gpu": (2**31, 8192), "tpu": (2**30, 8192), "cpu": (2**26, 512)}
_FP4_BLOCK = 16


def measure() -> dict[str, Any]:
    """Bytes a second both ways, and operations a second by kind; a reason where there is none."""
    _, side = _SIZES[jax.devices()[0].platform]
    found: dict[str, Any] = {"copy": copy_bandwidth(), "compute": {}, "not_measured": {}}
    kinds = {"f32": _f32, "bf16": _bf16, "fp8": _fp8, "fp4": _fp4}
    for kind, make in kinds.items():
        try:
            f, arguments = make(side)
            took = seconds_per_call(jax.jit(f), [arguments])
        # a compiler without these units refuses in one of these ways; it is written down
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            said = str(error).splitlines() or [type(error).__name__]
            found["not_measured"][kind] = said[0][:200]
        else:
            found["compute"][kind] = 2 * side**3 / took
    return found


def copy_bandwidth() -> float:
    """Bytes a second, both ways: the faster of a memory copy and a kernel that does it."""
    size, _ = _SIZES[jax.devices()[0].platform]
    x = jnp.ones(size // 2, jnp.bfloat16)
    calls = jax.jit(jnp.copy), jax.jit(lambda x: x * jnp.bfloat16(1.5))
    return 2 * x.nbytes / min(seconds_per_call(call, [(x,)]) for call in calls)


def _normal(side: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (side, side), jnp.float32).astype(dtype) for key in keys)
    return a, b


def _f32(side: int) -> tuple[Any, tuple[jax.Array, ...]]:
    return functools.partial(jnp.matmul, precision="highest"), _normal(side, jnp.float32)


def _bf16(side: int) -> tuple[Any, tuple[jax.Array, ...]]:
    return jnp.matmul, _normal(side, jnp.bfloat16)


def _fp8(side: int) -> tuple[Any, tuple[jax.Array, ...]]:
    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return wide.astype(jnp.bfloat16)

    return dot, _normal(side, jnp.float8_e4m3fn)


def _fp4(side: int) -> tuple[Any, tuple[jax.Array, ...]]:
    """XLA's own block-scaled product, where there are units for it."""
    version = getattr(jax.devices()[0], "compute_capability", None)
    if version is None or int(str(version).split(".")[0]) != 10:
        raise NotImplementedError("no FP4 units")
    scale = jnp.ones((side, side // _FP4_BLOCK), jnp.float8_e4m3fn)

    def dot(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
        return jax.lax.scaled_dot(
            a,
            b,
            lhs_scale=a_scale,
            rhs_scale=b_scale,
            dimension_numbers=(((1,), (1,)), ((), ())),
            preferred_element_type=jnp.bfloat16,
        )

    return dot, (*_normal(side, jnp.float4_e2m1fn), scale, scale)
