"""H-Scale against a brute-force search in float64, and what must hold of every choice."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import formats, weight_sync
from trace_jax.ptq import hscale, quantise

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

pack = jax.jit(weight_sync.pack_weight, static_argnames=("format",))


def weights(seed: int, *shape: int) -> np.ndarray:
    """BF16 values with rows of unlike sizes, heavy tails and some zeros."""
    rng = np.random.default_rng(seed)
    w = rng.standard_t(4, shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))
    w[..., rng.random(shape[-1]) < 0.05] = 0
    return w.astype(ml_dtypes.bfloat16).astype(np.float32)


def channel_weights(seed: int, *shape: int) -> np.ndarray:
    """Squared activations: a few channels are a thousand times the others."""
    rng = np.random.default_rng(seed)
    return np.exp(2.5 * rng.normal(size=shape)).astype(np.float32)


def rounded(block: np.ndarray, code: int, g: np.float32) -> np.ndarray:
    """The block under one scale code: nearest E2M1, ties to the even code; float32 like ours."""
    step = np.float32(E4M3[code] * g)
    out = np.zeros_like(block)
    for j, x in enumerate(block):
        if step > 0:
            distance = np.abs(E2M1.astype(np.float64) * float(step) - abs(float(x)))
            near = np.flatnonzero(distance == distance.min())
            chosen = next(c for c in near if c % 2 == 0) if len(near) > 1 else near[0]
            out[j] = np.copysign(np.float32(E2M1[chosen] * step), x)
    return out


def errors_by_code(block: np.ndarray, h: np.ndarray, initial: int, g: np.float32) -> dict:
    """Weighted error of each candidate, the initial code first."""
    tried = [initial, *range(initial - 9, initial), *range(initial + 1, initial + 7)]
    return {
        code: float(
            np.sum(h.astype(np.float64) * (rounded(block, code, g) - block.astype(float)) ** 2)
        )
        for code in tried
        if code == initial or 1 <= code <= 126
    }


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4:scale_rule=mse", "nvfp4:global_rule=pow2"])
def test_choices_are_those_of_a_search_in_float64(text):
    w, h, format = weights(0, 6, 64), channel_weights(1, 64), formats.get(text)
    packed = pack(jnp.asarray(w), format)
    ours = hscale.refine(jnp.asarray(w), jnp.asarray(h), packed, format)
    g = np.float32(packed["global"][0, 0])
    initial, chosen = np.asarray(packed["scales"]), np.asarray(ours["scales"])
    assert 0.2 < np.mean(initial != chosen) < 0.95  # neither everything nor nothing moves
    assert np.any(chosen > initial) and np.any(chosen < initial)
    values = np.asarray(quantise.values(ours, format, 64))
    for o in range(6):
        for s in range(4):
            at = np.s_[o, 16 * s : 16 * s + 16]
            errors = errors_by_code(w[at], h[16 * s : 16 * s + 16], int(initial[o, s]), g)
            best = min(errors, key=errors.__getitem__)
            rivals = [e for c, e in errors.items() if c != best]
            if min(rivals) > errors[best] * (1 + 1e-5):  # else float32 may choose either
                assert chosen[o, s] == best
            assert errors[int(chosen[o, s])] <= errors[best] * (1 + 1e-5)
            np.testing.assert_array_equal(values[at], rounded(w[at], int(chosen[o, s]), g))


def test_ties_keep_the_initial_code_then_take_the_smaller():
    format = formats.get("nvfp4:global_rule=one")
    w = jnp.zeros((2, 32), jnp.float32).at[0].set(6.0).at[1, :16].set(1.0)
    packed = pack(w, format)
    same = hscale.refine(w, jnp.zeros(32, jnp.float32), packed, format)  # all errors are 0
    np.testing.assert_array_equal(same["scales"], packed["scales"])
    one = int(np.float32(1).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    moved = packed | {"scales": jnp.full((2, 2), one + 1, jnp.uint8)}  # 1.125: 1.0 is not exact
    found = hscale.refine(w, jnp.ones(32, jnp.float32), moved, format)["scales"]
    assert found[1, 0] == one - 8  # 1.0 is exact under 1 and 1/2, an octave of 8 codes lower
    assert found[1, 1] == one + 1  # a block of zeros has error 0 already


def test_codes_stay_in_range_at_both_ends():
    format = formats.get("nvfp4:global_rule=one")
    w = jnp.concatenate([jnp.full((1, 16), 6 * 2.0**-9), jnp.full((1, 16), 2600.0)], axis=1)
    w = w.astype(jnp.bfloat16).astype(jnp.float32)
    packed = pack(w, format)
    assert packed["scales"][0, 0] == 1 and packed["scales"][0, 1] >= 120
    found = hscale.refine(w, jnp.ones(32, jnp.float32), packed, format)
    assert 1 <= found["scales"][0, 0] <= 7
    assert 111 <= found["scales"][0, 1] <= 126
    assert jnp.all(jnp.isfinite(quantise.values(found, format, 32)))


def weighted_error(w, h, packed, format) -> np.ndarray:
    error = np.asarray(quantise.values(packed, format, w.shape[-1]), np.float64) - w
    return np.sum(np.asarray(h, np.float64)[..., None, :] * error**2, axis=-1)


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4:scale_rule=mse", "nvfp4:convention=te"])
@pytest.mark.parametrize("width", [48, 40])
def test_no_row_of_any_expert_errs_more_than_before(text, width):
    w, h, format = weights(2, 3, 20, width), channel_weights(3, 3, width), formats.get(text)
    before = pack(jnp.asarray(w), format)
    after = hscale.pack_weight(jnp.asarray(w), jnp.asarray(h), format)
    old, new = (weighted_error(w, h, packed, format) for packed in (before, after))
    assert np.all(new <= old * (1 + 1e-5))
    assert new.sum() < 0.9 * old.sum()
    for name in before:
        assert before[name].shape == after[name].shape and before[name].dtype == after[name].dtype
    np.testing.assert_array_equal(before["global"], after["global"])


def test_each_matrix_is_searched_with_its_own_h():
    format = formats.get("nvfp4")
    w, h = weights(4, 3, 8, 32), channel_weights(5, 3, 32)
    together = hscale.pack_weight(jnp.asarray(w), jnp.asarray(h), format)
    for e in range(3):
        alone = hscale.pack_weight(jnp.asarray(w[e]), jnp.asarray(h[e]), format)
        jax.tree.map(lambda a, b, e=e: np.testing.assert_array_equal(a[e], b), together, alone)
    mixed = hscale.pack_weight(jnp.asarray(w), jnp.asarray(h[::-1].copy()), format)
    assert np.any(np.asarray(mixed["scales"])[0] != np.asarray(together["scales"])[0])


def test_the_size_of_h_does_not_matter():
    format, w, h = formats.get("nvfp4"), weights(6, 8, 32), channel_weights(7, 32)
    choose = [
        hscale.pack_weight(jnp.asarray(w), jnp.asarray(h * np.float32(factor)), format)["scales"]
        for factor in (1, 2.0**60, 2.0**-60)
    ]
    np.testing.assert_array_equal(choose[0], choose[1])
    np.testing.assert_array_equal(choose[0], choose[2])


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4:global_rule=pow2"])
def test_masters_in_float32_are_rounded_to_bfloat16_first(text):
    """As the sampler's own packing does: codes of the float32 values would be others."""
    format, h = formats.get(text), jnp.asarray(channel_weights(11, 64))
    rounded_w = weights(10, 64, 64)
    rng = np.random.default_rng(12)
    masters = rounded_w * (1 + np.float32(2**-9) * rng.uniform(-0.9, 0.9, rounded_w.shape))
    masters = masters.astype(np.float32)
    both = masters.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.any(masters != both)
    found = hscale.pack_weight(jnp.asarray(masters), h, format)
    wanted = hscale.pack_weight(jnp.asarray(both), h, format)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    # the scales that `pack_weight` starts from are the same either way: the search itself too
    packed = pack(jnp.asarray(both), format)
    alone = hscale.refine(jnp.asarray(masters), h, packed, format)
    jax.tree.map(np.testing.assert_array_equal, alone, wanted)


def test_a_block_with_nan_stays_nan_and_hurts_no_other():
    format = formats.get("nvfp4:global_rule=one")
    w = weights(8, 4, 32)
    spoiled = w.copy()
    spoiled[1, 3] = np.nan
    h = jnp.asarray(channel_weights(9, 32))
    good = hscale.pack_weight(jnp.asarray(w), h, format)["scales"]
    found = hscale.pack_weight(jnp.asarray(spoiled), h, format)["scales"]
    assert found[1, 0] == 0x7F
    np.testing.assert_array_equal(found.at[1, 0].set(0), good.at[1, 0].set(0))


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4:block_shape=16x16"])
def test_other_formats_are_refused(text):
    format, w = formats.get(text), jnp.ones((16, 32))
    with pytest.raises(ValueError, match="H-Scale of format"):
        hscale.pack_weight(w, jnp.ones(32), format)
