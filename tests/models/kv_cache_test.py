import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.guidance.record import Coding
from trace_jax.models import kv_cache
from trace_jax.qat import sites

NVFP4 = formats.get("nvfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def vectors(*shape: int) -> jax.Array:
    """Head vectors of very different size, one of them zero."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))
    x[(0,) * (len(shape) - 1)] = 0
    return jnp.asarray(x, jnp.float32)


def values_by_hand(site) -> np.ndarray:
    """code * fl(scale * global), from the bytes."""
    low, high = np.asarray(site.bits) & 15, np.asarray(site.bits) >> 4
    codes = np.stack([low, high], axis=-1).reshape(*low.shape[:-1], -1)
    step = np.asarray(site.scales).view(jnp.float8_e4m3fn).astype(np.float32)
    if site.global_scale is not None:
        step = step * np.asarray(site.global_scale)
    return E2M1[codes] * np.repeat(step, 16, axis=-1)


@pytest.mark.parametrize("rule", ["one", "amax", "pow2"])
def test_the_cache_holds_what_the_trainer_fake_quantises(rule):
    x = vectors(2, 3, 2, 32)
    format = formats.get("nvfp4", global_rule=rule)

    @jax.jit
    def both(x):
        stored = kv_cache.encode(x, format)
        valid = jnp.ones(x.shape[:-1], bool)
        trained, _ = sites.quantize_site(x, None, valid, sites.Site(format=format), guided=False)
        return stored, kv_cache.decode(stored, format, x.shape[-1], jnp.float32), trained

    stored, decoded, trained = both(x)
    np.testing.assert_array_equal(decoded, trained)
    np.testing.assert_array_equal(decoded, values_by_hand(stored))
    assert (stored.global_scale is None) == (rule == "one")
    assert stored.bits.shape == (2, 3, 2, 16) and stored.bits.dtype == jnp.uint8
    # nearest of a grid whose widest gap is 2 steps of max/6, and a scale off by 2**-4 at most
    bound = np.abs(x).reshape(2, 3, 2, 2, 16).max(axis=-1) * (1 / 6) * (1 + 2**-4) + 1e-9
    assert np.all(np.abs(decoded - x) <= np.repeat(bound, 16, axis=-1) + 2**-11)


def test_a_cache_that_is_not_quantised_keeps_the_values():
    x = vectors(1, 2, 1, 16)
    assert kv_cache.encode(x, None) is x
    np.testing.assert_array_equal(
        kv_cache.decode(x, None, 16, jnp.bfloat16), x.astype(jnp.bfloat16)
    )


def test_mantissa_guidance_is_the_lowest_bit_of_each_code():
    site = jax.jit(kv_cache.encode, static_argnums=1)(vectors(3, 2, 1, 32), NVFP4)
    cache = {"k": site}
    assert kv_cache.record(cache, NVFP4, Coding()) is cache
    kept = jax.jit(kv_cache.record, static_argnums=(1, 2))(cache, NVFP4, Coding(kind="mantissa"))[
        "k"
    ]
    bytes_ = np.asarray(site.bits)
    bits = np.stack([bytes_ & 1, (bytes_ >> 4) & 1], axis=-1).reshape(3, 2, 1, 32)
    np.testing.assert_array_equal(kept.bits, np.packbits(bits, axis=-1, bitorder="little"))
    assert kept.bits.nbytes * 4 == site.bits.nbytes
    np.testing.assert_array_equal(kept.scales, site.scales)
    np.testing.assert_array_equal(kept.global_scale, site.global_scale)


def test_a_token_is_written_to_its_own_rows_slot_and_nowhere_else():
    prompt = {"k": jnp.arange(1.0, 13.0).reshape(2, 2, 3, 1, 1)}  # 2 layers, 2 prompts, 3 tokens
    cache = kv_cache.extend(prompt, 5, 2)
    assert cache["k"].shape == (2, 4, 5, 1, 1)
    want = np.zeros((2, 4, 5))
    want[:, 0, :3] = want[:, 1, :3] = [[1, 2, 3], [7, 8, 9]]
    want[:, 2, :3] = want[:, 3, :3] = [[4, 5, 6], [10, 11, 12]]
    np.testing.assert_array_equal(cache["k"][..., 0, 0], want)
    new = {"k": jnp.arange(20.0, 24.0).reshape(4, 1, 1, 1)}
    written = kv_cache.write(cache, jnp.int32(1), jnp.array([3, 4, 0, 2]), new)
    for row, slot in enumerate([3, 4, 0, 2]):
        want[1, row, slot] = 20 + row
    np.testing.assert_array_equal(written["k"][..., 0, 0], want)
    np.testing.assert_array_equal(kv_cache.read(written, jnp.int32(1))["k"][..., 0, 0], want[1])
