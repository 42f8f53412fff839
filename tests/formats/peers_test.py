"""Bit for bit against other quantisers: `vectors/make_vectors.py` ran them, `peers.npz` has it.

Every difference is explained here, by a rule that says where it must be, and nowhere else. What all
have in common: they write minus zero (code 8), which we write as 0.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import formats

PEERS = np.load(pathlib.Path(__file__).parent / "vectors" / "peers.npz")
DATA = ["bf16", "heavy", "ties", "spread"]
TORCHAO_RULES = {"floor": "FLOOR", "ceil": "CEIL", "even": "EVEN", "round_up": "RCEIL"}
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
E4M3 = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)


@functools.cache
def ours(text, data):
    """(codes, scale bytes, steps, global scale) as numpy."""
    form = formats.get(text)

    def parts(x):
        q = formats.quantize(x, form)
        scales = jax.lax.bitcast_convert_type(q.scales, jnp.uint8)
        return q.codes, scales, form.steps(scales, q.global_scale), q.global_scale

    return jax.tree.map(np.asarray, jax.jit(parts)(jnp.asarray(PEERS[f"{data}/x"])))


def theirs(name, data):
    """(codes without minus zero, scale bytes) as numpy."""
    codes = PEERS[f"{data}/{name}.codes"]
    if "mxfp8" not in name:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    zero = 128 if "mxfp8" in name else 8
    return np.where(codes == zero, 0, codes), PEERS[f"{data}/{name}.scales"].reshape(16, -1)


def spread(per_block):
    return np.repeat(per_block, 128 // per_block.shape[1], axis=1)


def near(value, points):
    """Within float32 rounding of one of the points: there another order of operations decides."""
    distance = np.min(np.abs(value[..., None] / points - 1), axis=-1)
    return distance < 2.0**-21


def near_tie(data, steps):
    with np.errstate(all="ignore"):
        return near(np.abs(PEERS[f"{data}/x"].astype(np.float64)) / spread(steps), MIDPOINTS)


def test_the_vectors_name_the_versions_that_made_them():
    versions = [str(v) for v in PEERS["versions"]]
    assert [v.partition("==")[0] for v in versions] == [
        "torch",
        "torchao",
        "compressed-tensors",
        "fouroversix",
        "nvidia-modelopt",
        "transformer-engine",
    ]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        *[
            (f"{mx}:rule={rule}", f"torchao.{mx}.{peer}")
            for mx in ("mxfp4", "mxfp8")
            for rule, peer in TORCHAO_RULES.items()
        ],
        ("mxfp4:rule=even", "compressed_tensors.mxfp4"),
        ("nvfp4:convention=modelopt", "modelopt.nvfp4"),
        ("nvfp4:convention=te,block_shape=16x16", "te.nvfp4.16x16"),
    ],
)
def test_these_are_the_same_in_every_bit(text, name, data):
    codes, scales, _, global_ = ours(text, data)
    their_codes, their_scales = theirs(name, data)
    np.testing.assert_array_equal(scales, their_scales)
    np.testing.assert_array_equal(codes, their_codes)
    if name == "modelopt.nvfp4":
        assert global_.item() == PEERS[f"{data}/{name}.global"].item()


@pytest.mark.parametrize("data", DATA)
def test_transformer_engine_differs_in_codes_that_a_scale_of_zero_makes_meaningless(data):
    codes, scales, _, _ = ours("nvfp4:convention=te", data)
    their_codes, their_scales = theirs("te.nvfp4.1x16", data)
    np.testing.assert_array_equal(scales, their_scales)
    alive = spread(scales) > 0  # where it is 0 they multiply by FLT_MAX: codes of +-6
    np.testing.assert_array_equal(codes[alive], their_codes[alive])
    assert np.isin(their_codes[~alive], [0, 7, 15]).all() and not codes[~alive].any()


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    ("text", "name"),
    [("nvfp4", "static_6"), ("nvfp4:scale_rule=static_4", "static_4")],
)
def test_fouroversix_without_choice_differs_at_ties_and_where_it_writes_8(text, name, data):
    """It multiplies by a reciprocal; above 7 steps (subnormal scales) it rounds to 8, code 0."""
    codes, scales, steps, _ = ours(text, data)
    their_codes, their_scales = theirs(f"fouroversix.{name}", data)
    np.testing.assert_array_equal(scales, their_scales)
    with np.errstate(all="ignore"):
        eight = np.abs(PEERS[f"{data}/x"].astype(np.float64)) > 7 * spread(steps)
    eight &= spread(scales) > 0
    explained = near_tie(data, steps) | eight
    np.testing.assert_array_equal(codes[~explained], their_codes[~explained])
    assert not their_codes[eight].any() and np.isin(codes[eight], [7, 15]).all()
    assert eight.any() <= (data == "spread")


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4over6", "mse"),
        ("nvfp4:scale_rule=mae", "mae"),
        ("nvfp4:scale_rule=abs_max", "abs_max"),
        ("4over6:block_shape=16x16", "mse.16x16"),
    ],
)
def test_fouroversix_makes_our_choice_unless_one_of_its_candidates_holds_an_8(text, name, data):
    """An 8 is no E2M1 value, but it enters its error: only with scales of at most 4 * 2^-9."""
    codes, scales, steps, global_ = ours(text, data)
    their_codes, their_scales = theirs(f"fouroversix.{name}", data)
    x = np.abs(PEERS[f"{data}/x"].astype(np.float64))
    peaks = x.reshape(16, 8, 16).max(-1)
    if "16x16" in name:
        peaks = np.broadcast_to(peaks.max(0, keepdims=True), peaks.shape)
    eight = np.zeros((16, 8), bool)
    for top in (6, 4):
        candidate = np.argmin(np.abs(peaks[..., None] / (top * global_.item()) - E4M3), axis=-1)
        eight |= (candidate > 0) & (peaks > 7 * E4M3[candidate] * global_.item())
    np.testing.assert_array_equal(scales[~eight], their_scales[~eight])
    explained = near_tie(data, steps) | spread(eight)
    np.testing.assert_array_equal(codes[~explained], their_codes[~explained])
    assert eight.any() == (data == "spread" and "16x16" not in name)
    assert scales[eight].max(initial=0) <= 4


@pytest.mark.parametrize("data", DATA)
def test_fouroversix_mxfp4_differs_in_zero_blocks_which_it_divides_by_zero(data):
    codes, scales, _, _ = ours("mxfp4:rule=round_up", data)
    their_codes, their_scales = theirs("fouroversix.mxfp4", data)
    np.testing.assert_array_equal(scales, their_scales)
    zero = spread(scales) == 0
    np.testing.assert_array_equal(codes[~zero], their_codes[~zero])
    assert zero.any() == (data == "spread") and not codes[zero].any()


@pytest.mark.parametrize("data", DATA)
def test_torchao_nvfp4_differs_at_ties_and_has_no_scale_below_2_to_the_minus_6(data):
    """So small blocks flatten to zero there eight times earlier than here."""
    codes, scales, steps, _ = ours("nvfp4", data)
    their_codes, their_scales = theirs("torchao.nvfp4", data)
    np.testing.assert_array_equal(np.maximum(scales, 8), their_scales)
    explained = near_tie(data, steps) | (spread(scales) < 8)
    np.testing.assert_array_equal(codes[~explained], their_codes[~explained])
    assert np.any(scales < 8) == (data == "spread")


@pytest.mark.parametrize("data", DATA)
def test_compressed_tensors_nvfp4_differs_at_ties_and_writes_an_eighth_for_a_scale_of_zero(data):
    """Its scale is amax / 6 * (2688 / max), of three roundings, so that it misses exact ties."""
    codes, scales, steps, global_ = ours("nvfp4", data)
    their_codes, their_scales = theirs("compressed_tensors.nvfp4", data)
    peaks = np.abs(PEERS[f"{data}/x"].astype(np.float64)).reshape(16, 8, 16).max(-1)
    tie = near(peaks / (6 * global_.item()), (E4M3[:-1] + E4M3[1:]) / 2)
    want = np.where(scales == 0, 32, scales)
    np.testing.assert_array_equal(their_scales[~tie], want[~tie])
    moved = their_scales != want
    assert np.all(np.abs(their_scales[moved].astype(int) - scales[moved]) == 1)
    assert moved.any() == (data == "ties")
    explained = near_tie(data, steps) | spread(moved)
    np.testing.assert_array_equal(codes[~explained], their_codes[~explained])


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("text", ["te", "modelopt", "vllm"])
def test_our_exact_convention_differs_from_the_others_at_ties_and_tiny_blocks_only(text, data):
    codes, scales, steps, global_ = ours("nvfp4", data)
    other_codes, other_scales, _, _ = ours(f"nvfp4:convention={text}", data)
    peaks = np.abs(PEERS[f"{data}/x"].astype(np.float64)).reshape(16, 8, 16).max(-1)
    tie = near(peaks / (6 * global_.item()), (E4M3[:-1] + E4M3[1:]) / 2)
    tiny = (scales == 0) if text == "modelopt" else np.zeros_like(tie)  # at least 2^-9; 1 for zeros
    np.testing.assert_array_equal(scales[~(tie | tiny)], other_scales[~(tie | tiny)])
    explained = near_tie(data, steps) | spread((scales != other_scales) | tiny)
    np.testing.assert_array_equal(codes[~explained], other_codes[~explained])
