"""Oracle: the closed form. The forward is `value`; the gradient of sum(c * y) to x is c."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.guidance.record import SiteRecord
from trace_jax.qat import sites

SITE = sites.Site(format=formats.get("nvfp4:global_rule=one"))

DTYPES = [jnp.float32, jnp.bfloat16]


def normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def same_bits(got, want):
    kind = {2: np.uint16, 4: np.uint32}[np.asarray(want).itemsize]
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got).view(kind), np.asarray(want).view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_forward_is_the_value_bit_for_bit(dtype):
    """Not x + (value - x), which rounds: shown by x far larger than the value."""
    x, value = normal(0, (64,), dtype) * 1000, normal(1, (64,), dtype)
    assert bool(jnp.any(x + (value - x) != value))
    same_bits(sites.straight_through(x, value), value)
    same_bits(jax.jit(sites.straight_through)(x, value), value)
    special = jnp.array([-0.0, jnp.nan, jnp.inf, 0.0], dtype)
    same_bits(sites.straight_through(x[:4], special), special)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cotangent_passes_to_x_unchanged_and_none_to_the_value(dtype):
    x, value, cotangent = (normal(i, (64,), dtype) for i in range(3))
    _, pull = jax.vjp(sites.straight_through, x, value)
    to_x, to_value = pull(cotangent)
    same_bits(to_x, cotangent)
    same_bits(to_value, jnp.zeros((64,), dtype))


def site_inputs(dtype):
    """Values that saturate, that are zero, in a zero-scale block, padding, and one NaN block."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 2, 32)).astype(np.float32)
    x[0, 0, :16], x[1, 1, 20], x[2, 0, 3] = 0, 1e4, np.nan
    record = SiteRecord(
        bits=jnp.asarray(rng.integers(0, 256, (4, 2, 16)), jnp.uint8),
        scales=jnp.asarray(rng.integers(0, 60, (4, 2, 2)), jnp.uint8).at[3].set(0),
        global_scale=None,
    )
    valid = jnp.ones((4, 2), bool).at[1, 0].set(False)
    cotangent = normal(4, x.shape, dtype)
    return jnp.asarray(x, dtype), record, valid, cotangent


def one(x, record, valid, guided=True):
    return sites.quantize_site(x, record, valid, SITE, guided=guided)[0]


def scanned(x, record, valid):
    return jax.lax.scan(lambda _, args: (None, one(*args)), None, (x, record, valid))[1]


WRAPPED = {
    "plain": one,
    "unguided": lambda *args: one(*args, guided=False),
    "no record": lambda x, record, valid: one(x, None, valid),
    "jit": jax.jit(one),
    "vmap": jax.vmap(one),
    "scan": scanned,
    "remat": jax.checkpoint(one),
    "remat in scan": lambda *args: jax.lax.scan(
        jax.checkpoint(lambda _, a: (None, one(*a))), None, args
    )[1],
}


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_site_is_the_cotangent_itself(how, dtype):
    x, record, valid, cotangent = site_inputs(dtype)
    forward = jax.jit(lambda x: WRAPPED[how](x, record, valid))
    value, pull = jax.vjp(forward, x)
    same_bits(pull(cotangent)[0], cotangent)
    if how in ("jit", "vmap", "scan", "remat", "remat in scan"):
        want = jax.jit(one)(x, record, valid)
        np.testing.assert_array_equal(value.astype(jnp.float32), want.astype(jnp.float32))


def test_grad_through_two_sites_and_a_product_has_the_closed_form():
    """d/dx sum(w * q(q(x) * w)) = w * w, with no trace of the rounding."""
    x, record, valid, w = site_inputs(jnp.float32)
    x = jnp.where(jnp.isfinite(x), x, 0)

    def loss(x):
        return jnp.sum(w * one(one(x, record, valid) * w, record, valid))

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), w * w)
