"""Oracles: numpy's own bit packing, exhaustive BF16 magnitudes, and the paper's bytes per token."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.guidance import codec
from trace_jax.guidance.codec import SiteCount
from trace_jax.guidance.record import Coding

# Compiled as a whole: op by op, each shape would be compiled a dozen times.
encode = jax.jit(codec.encode, static_argnames=("format", "coding"))
decode = jax.jit(codec.decode, static_argnames=("format", "coding"))
KINDS = ["codes", "mantissa"]
NVFP4, ONE = formats.get("nvfp4"), formats.get("nvfp4:global_rule=one")
E4M3 = ml_dtypes.float8_e4m3fn


@functools.partial(jax.jit, static_argnames="format")
def rounded(x, g, format):
    return (*format.quantize_rows(x, g), g)


def outcomes(*leading, width=48, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (*leading, width)).astype(np.uint8)
    codes[codes == 8] = 0
    scales = rng.integers(0, 127, (*leading, width // 16)).astype(np.uint8)
    global_ = rng.uniform(0.1, 2, (*leading, 1)).astype(np.float32)
    return codes, scales, global_


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_global", [True, False])
def test_what_is_encoded_comes_back(shape, kind, has_global):
    codes, scales, g = outcomes(*shape)
    static = {"format": NVFP4 if has_global else ONE, "coding": Coding(kind=kind)}
    out = decode(encode(codes, scales, g if has_global else None, **static), **static)
    np.testing.assert_array_equal(out.values, codes if kind == "codes" else codes & 1)
    np.testing.assert_array_equal(out.scales, scales)
    scale = scales.view(E4M3).astype(np.float32)
    np.testing.assert_array_equal(out.steps, scale * g if has_global else scale)
    assert out.failed.shape == shape and not out.failed.any()


def test_the_bytes_are_nibbles_low_first_or_bits_low_first():
    codes, scales, _ = outcomes(7)
    full = encode(codes, scales, None, format=ONE, coding=Coding())
    np.testing.assert_array_equal(full.bits, codes[:, 0::2] + 16 * codes[:, 1::2])
    compact = encode(codes, scales, None, format=ONE, coding=Coding(kind="mantissa"))
    want = np.packbits(codes % 2, axis=-1, bitorder="little")
    np.testing.assert_array_equal(compact.bits, want)
    np.testing.assert_array_equal(compact.scales, scales)
    assert full.bits.dtype == compact.bits.dtype == jnp.uint8


def bf16(*shape, seed=0):
    """Random BF16 rows with outliers, as float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
    return jnp.asarray(x.astype(ml_dtypes.bfloat16).astype(np.float32))


FORMATS = [*sorted(formats.registry.FORMATS), "4over6", "nvfp4:convention=te", "mxfp4:rule=even"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_comes_back_and_costs_what_site_bytes_says(name, kind):
    format = formats.get(name)
    x = bf16(3, 256)
    for scale_bits in (8, 3):
        if scale_bits < 8 and format.scale_bytes > 1:
            continue
        coding = Coding(kind=kind, scale_bits=scale_bits, global_bits=16)
        codes, scales, g = rounded(x, format.row_global(x), format)
        record = encode(codes, scales, g, format=format, coding=coding)
        out = decode(record, x, format=format, coding=coding)
        np.testing.assert_array_equal(out.values, codes if kind == "codes" else codes & 1)
        np.testing.assert_array_equal(out.scales, scales)
        np.testing.assert_array_equal(out.steps, format.steps(scales, g))
        assert not out.failed.any()
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(record))
        assert codec.site_bytes(3 * 256, format=format, coding=coding, rows=3) == nbytes


def test_low_bits_are_matched_under_the_recorded_global_scale_and_not_the_trainers():
    """One value 40 % larger moves every block scale that the trainer has under its own global."""
    coding, x = Coding(kind="mantissa", scale_bits=2), bf16(6, 256)
    largest = jnp.abs(x) == jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    own = jnp.where(largest, x * 1.4, x)
    codes, scales, g = rounded(x, NVFP4.row_global(x), NVFP4)
    _, own_scales, _ = rounded(own, NVFP4.row_global(own), NVFP4)
    assert (np.abs(own_scales.astype(int) - scales.astype(int)) > 2).mean() > 0.5
    record = encode(codes, scales, g, format=NVFP4, coding=coding)
    out = decode(record, own, format=NVFP4, coding=coding)
    moved = np.asarray(largest).reshape(6, 16, 16).any(-1)
    np.testing.assert_array_equal(np.asarray(out.scales)[~moved], np.asarray(scales)[~moved])


def test_low_bits_of_scales_decode_under_vmap_and_scan_as_row_by_row():
    coding, x = Coding(scale_bits=2, global_bits=16), bf16(4, 5, 128)

    def there_and_back(row):
        g = NVFP4.row_global(row)
        record = codec.encode(*NVFP4.quantize_rows(row, g), g, format=NVFP4, coding=coding)
        out = codec.decode(record, row, format=NVFP4, coding=coding)
        return out.values, out.scales, out.steps, out.failed

    want = jax.jit(there_and_back)(x)
    mapped = jax.jit(jax.vmap(jax.vmap(there_and_back)))(x)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, r: (c, there_and_back(r)), 0, x))(x)
    for other in (mapped, scanned):
        jax.tree.map(np.testing.assert_array_equal, other, want)


@pytest.mark.parametrize(
    "name", ["nvfp4", "4over6", "nvfp4:global_rule=pow2", "nvfp4:convention=te"]
)
def test_two_bytes_restore_the_global_scale_of_every_bf16_magnitude(name):
    amax = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    format = formats.get(name)

    @jax.jit
    def there_and_back(amax):
        g = format.global_scale(amax)
        short = codec._short_global(g, format)
        return g, short, codec._long_global(short, format)

    g, short, back = (np.asarray(a) for a in there_and_back(jnp.asarray(amax)[:, None]))
    assert short.dtype == (np.uint8 if "pow2" in name else np.uint16) and len(np.unique(short)) > 99
    np.testing.assert_array_equal(back.view(np.uint32), g.view(np.uint32))


def test_a_global_scale_that_two_bytes_cannot_hold_is_nan_and_so_is_every_step():
    x = jnp.full((1, 16), 1.0 + 2**-12)  # no BF16 number
    for rule, g in (("amax", NVFP4.row_global(x)), ("pow2", jnp.full((1, 1), 0.3))):
        format = formats.get("nvfp4", global_rule=rule)
        record = encode(*rounded(x, g, NVFP4), format=format, coding=Coding(global_bits=16))
        out = decode(record, format=format, coding=Coding(global_bits=16))
        assert np.isnan(out.global_scale).all() and np.isnan(out.steps).all()


def test_rows_with_few_blocks_keep_whole_scale_bytes():
    """Two blocks of low bits and a check are no smaller than two bytes."""
    few = {"format": ONE, "coding": Coding(scale_bits=2)}
    assert [codec.scale_bits(n, **few) for n in (16, 32, 48, 128)] == [8, 8, 2, 2]
    codes, scales, _ = outcomes(3, width=32)
    record = encode(codes, scales, None, **few)
    np.testing.assert_array_equal(record.scales, scales)
    assert decode(record, **few).scales.shape == (3, 2)


def test_what_cannot_be_coded_is_refused():
    with pytest.raises(ValueError, match=r"guidance kind: got sign, need one of \['codes', 'man"):
        Coding(kind="sign")
    with pytest.raises(ValueError, match=r"guidance scale_bits: got 5, need one of \[2, 3, 4, 8\]"):
        Coding(scale_bits=5)
    with pytest.raises(ValueError, match=r"guidance global_bits: got 8"):
        Coding(global_bits=8)
    with pytest.raises(ValueError, match=r"hif4 \(4 bytes of uint8 a block\), need one scale byte"):
        codec.site_bytes(64, format=formats.get("hif4"), coding=Coding(scale_bits=3))
    codes, scales, g = outcomes(2, width=128)
    static = {"format": NVFP4, "coding": Coding(scale_bits=3)}
    with pytest.raises(ValueError, match="decode: x: got None, need the trainer's own rows"):
        decode(encode(codes, scales, g, **static), **static)


# Qwen3.5-35B-A3B, from its config.json: hidden_size, num_hidden_layers (all MoE),
# full_attention_interval, num_key_value_heads, head_dim
WIDTH, LAYERS, INTERVAL, KV_HEADS, HEAD_DIM = 2048, 40, 4, 2, 256


def qwen(share, format=ONE):
    """The paper's sites in that share of the layers; global scales were not counted there."""
    attention = LAYERS // INTERVAL
    kv = SiteCount(layers=int(attention * share), rows=KV_HEADS, length=HEAD_DIM, format=format)
    expert = SiteCount(layers=int(LAYERS * share), rows=1, length=WIDTH, format=format)
    return {"expert_in": {"expert_in": expert}, "kv": {"k": kv, "v": kv}}


@pytest.mark.parametrize(
    ("share", "kind", "expert", "kv"), [(1, "codes", 46_080, 5_760), (0.5, "mantissa", 7_680, 960)]
)
def test_bytes_per_token_are_the_papers(share, kind, expert, kv):
    sites, coding = qwen(share), Coding(kind=kind)
    assert codec.token_bytes(sites["expert_in"], coding=coding) == expert
    assert codec.token_bytes(sites["kv"], coding=coding) == kv
    assert codec.token_bytes(sites["expert_in"] | sites["kv"], coding=coding) == expert + kv


@pytest.mark.parametrize(
    ("bits", "expert", "kv"), [(2, 5_800, 740), (3, 6_120, 780), (4, 6_440, 820)]
)
def test_low_bits_of_scales_cost_this_much_less(bits, expert, kv):
    """256 B of bits + 16 b B of scales + 2 check bytes a layer; 32 + 2 b + 1 a head of K or V."""
    sites, coding = qwen(0.5), Coding(kind="mantissa", scale_bits=bits)
    assert expert == 20 * (256 + 16 * bits + 2) and kv == 5 * 2 * 2 * (32 + 2 * bits + 1)
    assert codec.token_bytes(sites["expert_in"], coding=coding) == expert
    assert codec.token_bytes(sites["kv"], coding=coding) == kv


def test_a_global_scale_costs_four_two_or_one_byte_a_row():
    for rule, short in (("amax", 2), ("pow2", 1), ("one", 0)):
        format = formats.get("nvfp4", global_rule=rule)
        for bits, want in ((32, 0 if rule == "one" else 4), (16, short)):
            coding = Coding(global_bits=bits)
            got = codec.site_bytes(3 * 32, format=format, coding=coding, rows=3)
            assert got == 3 * (16 + 2 + want)
