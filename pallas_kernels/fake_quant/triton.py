"""Fake quantisation on Hopper and Blackwell GPUs: whole rows in registers, each byte read once."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fake_quant import following, types
from pallas_kernels.quantize import rounding
from pallas_kernels.quantize.triton import BLOCK, inside, load, store, tile
from trace_jax.formats import Format


def fake_quant(x_MK, recorded, valid_M, *, format: Format, kind, guided, scales: bool, interpret):
    """(value, counts (M, 1) by name, own scale bytes, own global scales); M, K > 0.

    Args: scales: whether the own scales are asked for; else they are None.
    """
    M, K = x_MK.shape
    padded = format.padded(K)
    rows, width, warps = tile(M, padded)
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
    options = {"rows": rows, "width": width, "format": format, "kind": kind, "guided": guided}
    found = pl.pallas_call(
        functools.partial(_kernel, **options),
        grid=(pl.cdiv(M, rows),),
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"fake_quant_{format.name}",
    )(inputs)
    counts = {name: found[name] for name in names}
    return found["value"], counts, found.get("own"), found.get("own_global")


def _kernel(given, out, *, rows, width, format, kind, guided):
    start = pl.program_id(0) * rows
    blocks = (rows, width // format.block, format.block)
    x = load(given["x"], start, rows, width).astype(jnp.float32)
    signed = jax.lax.bitcast_convert_type(x, jnp.int32).reshape(blocks)
    bits = signed & rounding.MAGNITUDE
    amax = BLOCK.largest(bits)
    g = rounding.row_global(jnp.max(amax, axis=1, keepdims=True), format)
    own = rounding.scale_bytes(bits, amax, g, format, BLOCK)
    valid = load(given["valid"], start, rows, 1).reshape(rows, 1, 1) > 0
    record = _record(given, start, blocks, format, kind) if "bits" in given else None
    value, flags = following.outcome(
        signed, own, g, record, valid, format=format, kind=kind, guided=guided
    )
    store(out["value"], start, value.reshape(rows, width).astype(out["value"].dtype))
    here = inside(given["x"], start, rows, width).reshape(blocks)
    for name, flag in flags.items():
        if name in types.OF_VALUES:
            counted = jnp.broadcast_to(flag, blocks) & here & valid
            each = jnp.sum(counted.astype(jnp.int32), axis=-1)
        else:
            held = inside(given["scales"], start, *blocks[:2])
            each = (flag & valid).reshape(blocks[:2]).astype(jnp.int32) * held.astype(jnp.int32)
        store(out[name], start, jnp.sum(each, axis=-1, keepdims=True))
    if "own" in out:
        store(out["own"], start, own.reshape(blocks[:2]).astype(jnp.uint8))
    if "own_global" in out:
        store(out["own_global"], start, g.reshape(rows, 1))


def _record(given, start, blocks, format: Format, kind: str) -> following.Record:
    rows, width = blocks[0], blocks[1] * blocks[2]
    per_byte = types.PER_BYTE[kind]
    packed = load(given["bits"], start, rows, width // per_byte).astype(jnp.int32)
    spread = jnp.broadcast_to(packed[:, :, None], (*packed.shape, per_byte))
    shift = jax.lax.broadcasted_iota(jnp.int32, spread.shape, 2) * (8 // per_byte)
    values = jax.lax.shift_right_logical(spread, shift) & (15 if kind == "codes" else 1)
    byte = load(given["scales"], start, *blocks[:2]).astype(jnp.int32)
    g = jnp.ones((1, 1, 1), jnp.float32)
    if format.has_global:
        g = load(given["global"], start, rows, 1, 1.0).reshape(rows, 1, 1)
    return following.Record(
        values=values.reshape(blocks), byte=byte.reshape(*blocks[:2], 1), g=g
    )
