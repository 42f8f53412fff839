"""Fake quantisation on Hopper and Blackwell GPUs: whole rows in registers, each byte read once."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fake_quant import following, types
from pallas_kernels.quantize import rounding
from pallas_kernels.quantize.triton import BLOCK, load, store, tile
from trace_jax.formats import Format


def fake_quant(x_MK, recorded, valid_M, *, format: Format, kind, guided, scales: bool, interpret):
    """(value, counts (M, 1) by name, own scale bytes, own global scales); M, K > 0.

    Args: scales: whether the own scales are asked for; else they are None.
    """
    M, K = x_MK.shape
    padded = format.padded(K)
    width, warps = tile(padded)
    names = types.of_interest(recorded is not None)
    outputs = {"value": jax.ShapeDtypeStruct((M, K), x_MK.dtype)}
    outputs |= {name: jax.ShapeDtypeStruct((M, 1), jnp.int32) for name in names}
    if scales:
        outputs["own"] = jax.ShapeDtypeStruct((M, padded // format.block), jnp.uint8)
        if format.has_global:
            outputs["own_global"] = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    inputs = {"x": x_MK, "valid": valid_M.astype(jnp.int32)[:, None]}
    if recorded is not None:
        inputs |= {"bits": recorded.bits, "scales": recorded.scales}
        if format.has_global:
            inputs["global"] = recorded.global_scale
    options = {"width": width, "format": format, "kind": kind, "guided": guided}
    found = pl.pallas_call(
        functools.partial(_kernel, **options),
        grid=(M,),
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"fake_quant_{format.name}",
    )(inputs)
    counts = {name: found[name] for name in names}
    return found["value"], counts, found.get("own"), found.get("own_global")


def _kernel(given, out, *, width, format, kind, guided):
    row = pl.program_id(0)
    blocks = (width // format.block, format.block)
    x = load(given["x"], row, width).astype(jnp.float32)
    values = jax.lax.bitcast_convert_type(x, jnp.int32)
    g = rounding.row_global(jnp.max(values & rounding.MAGNITUDE), format)
    signed = values.reshape(blocks)
    bits = signed & rounding.MAGNITUDE
    own = rounding.scale_bytes(bits, BLOCK.largest(bits), g, format, BLOCK)
    valid = given["valid"][row, 0] > 0
    record = _record(given, row, blocks, format, kind) if "bits" in given else None
    value, flags = following.outcome(
        signed, own, g, record, valid, format=format, kind=kind, guided=guided
    )
    store(out["value"], row, value.reshape(width).astype(out["value"].dtype))
    _count(given, out, flags, valid, row, blocks)
    if "own" in out:
        store(out["own"], row, own.reshape(blocks[0]).astype(jnp.uint8))
    if "own_global" in out:
        out["own_global"][row, 0] = g


def _count(given, out, flags, valid, row, blocks) -> None:
    """Stores the flags' sums over a row, two in one: each stays below 2^15 (`too_wide`).

    Flags of blocks are counted at the block's first value: sums over whole tiles keep the layout in
    which values were loaded, sums over one number a block would leave most threads idle.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, blocks, 1)
    column = jax.lax.broadcasted_iota(jnp.int32, blocks, 0) * blocks[1] + place
    here = column < given["x"].shape[1]
    first = here & (place == 0)
    names = list(flags)
    for low, *high in (names[i : i + 2] for i in range(0, len(names), 2)):
        both = jnp.zeros(blocks, jnp.int32)
        for shift, name in zip((0, 16), (low, *high), strict=False):
            where = here if name in types.OF_VALUES else first
            both = both | jnp.where(flags[name] & where, 1 << shift, 0)
        total = jnp.sum(both.reshape(blocks[0] * blocks[1]))
        total = jnp.where(valid, total, 0)
        out[low][row, 0] = total & 0xFFFF
        for name in high:
            out[name][row, 0] = total >> 16


def _record(given, row, blocks, format: Format, kind: str) -> following.Record:
    width, per_byte = blocks[0] * blocks[1], types.PER_BYTE[kind]
    packed = load(given["bits"], row, width // per_byte).astype(jnp.int32)
    spread = jnp.broadcast_to(packed[:, None], (packed.shape[0], per_byte))
    shift = jax.lax.broadcasted_iota(jnp.int32, spread.shape, 1) * (8 // per_byte)
    values = jax.lax.shift_right_logical(spread, shift) & (15 if kind == "codes" else 1)
    byte = load(given["scales"], row, blocks[0]).astype(jnp.int32)
    g = given["global"][row, 0] if format.has_global else None
    return following.Record(values=values.reshape(blocks), byte=byte.reshape(blocks[0], 1), g=g)
