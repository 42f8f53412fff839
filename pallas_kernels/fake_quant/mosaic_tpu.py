"""Fake quantisation on TPUs: values keep their lanes, the record comes to them.

See `quantize.mosaic_tpu` for how lanes are handled. Here the matrix unit also spreads: a product
with a matrix of 0 and 1 brings the byte that holds a value's record, and its block's scale byte, to
the value's lane, exactly. What is one number a row travels in one array for all, since memory holds
whole registers of 128 lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fake_quant import following, types
from pallas_kernels.quantize import rounding
from pallas_kernels.quantize.mosaic_tpu import (
    CHUNK,
    LANES,
    ROWS,
    over_block,
    picking,
    row_block,
    select,
    spreading,
    whole,
)
from trace_jax.formats import Format


def fake_quant(x_MK, recorded, valid_M, *, format: Format, kind, guided, scales: bool, interpret):
    """(value, counts (M, 1) by name, own scale bytes, own global scales); M, K > 0.

    Args: scales: whether the own scales are asked for; else they are None.
    """
    M, K = x_MK.shape
    per_byte = types.PER_BYTE[kind]
    width = pl.cdiv(K, per_byte * LANES) * per_byte * LANES
    names = types.of_interest(recorded is not None)
    outputs = {"value": jax.ShapeDtypeStruct((M, width), x_MK.dtype)}
    outputs["counts"] = jax.ShapeDtypeStruct((M, len(names)), jnp.int32)
    if scales:
        outputs["own"] = jax.ShapeDtypeStruct((M, width // format.block), jnp.uint8)
        if format.has_global:
            outputs["own_global"] = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    inputs = {"x": _widen(x_MK, width)}
    of_rows = [valid_M.astype(jnp.float32)[:, None]]
    if recorded is not None:
        inputs["bits"] = _widen(recorded.bits, width // per_byte)
        inputs["scales"] = _widen(recorded.scales, width // format.block)
        of_rows += [recorded.global_scale] if format.has_global else []
    inputs["rows"] = jnp.concatenate(of_rows, axis=1)
    chunk = min(CHUNK, width)
    matrices = {"spread": spreading(chunk, format.block)}
    matrices |= {"expand": spreading(per_byte * LANES, per_byte)}
    matrices |= {"pick": picking(chunk, format.block)} if scales else {}
    options = {"K": K, "format": format, "kind": kind, "guided": guided}
    found = pl.pallas_call(
        functools.partial(_kernel, **options),
        grid=(pl.cdiv(M, ROWS),),
        in_specs=[jax.tree.map(row_block, inputs), jax.tree.map(whole, matrices)],
        out_specs=jax.tree.map(row_block, outputs),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=f"fake_quant_{format.name}",
    )(inputs, matrices)
    own = found["own"][:, : format.padded(K) // format.block] if scales else None
    counts = {name: found["counts"][:, i : i + 1] for i, name in enumerate(names)}
    return found["value"][:, :K], counts, own, found.get("own_global")


def _widen(array, width: int):
    extra = width - array.shape[1]
    return jnp.pad(array, [(0, 0), (0, extra)]) if extra else array


def _kernel(given, matrices, out, *, K, format, kind, guided):
    x_ref = given["x"]
    g = jnp.ones((x_ref.shape[0], 1), jnp.float32)
    if format.has_global:
        bits = rounding.magnitude_bits(x_ref[...].astype(jnp.float32))
        g = rounding.row_global(jnp.max(bits, axis=1, keepdims=True), format)
    if "own_global" in out:
        out["own_global"][...] = g
    valid = given["rows"][:, :1] > 0
    block = over_block(format.block)
    counts = {}
    for start in range(0, x_ref.shape[1], CHUNK):
        end = min(start + CHUNK, x_ref.shape[1])
        x = x_ref[:, start:end].astype(jnp.float32)
        signed = jax.lax.bitcast_convert_type(x, jnp.int32)
        bits = signed & rounding.MAGNITUDE
        own = rounding.scale_bytes(bits, block.largest(bits), g, format, block)
        record = _record(given, matrices, start, end, format, kind) if "bits" in given else None
        value, flags = following.outcome(
            signed, own, g, record, valid, format=format, kind=kind, guided=guided
        )
        out["value"][:, start:end] = value.astype(out["value"].dtype)
        column = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        held = (column < format.padded(K)) & (column % format.block == 0)
        for name, flag in flags.items():
            here = (column < K) if name in types.OF_VALUES else held
            each = jnp.sum((flag & here & valid).astype(jnp.int32), axis=1, keepdims=True)
            counts[name] = each + counts[name] if name in counts else each
        if "own" in out:
            first, blocks = start // format.block, (end - start) // format.block
            picked = select(own, matrices["pick"][: end - start, :blocks])
            out["own"][:, first : first + blocks] = picked.astype(jnp.uint8)
    names = types.of_interest("bits" in given)
    lane = jax.lax.broadcasted_iota(jnp.int32, out["counts"].shape, 1)
    out["counts"][...] = sum(jnp.where(lane == i, counts[n], 0) for i, n in enumerate(names))


def _record(given, matrices, start, end, format: Format, kind: str) -> following.Record:
    per_byte = types.PER_BYTE[kind]
    columns = per_byte * LANES  # whose record fills the lanes
    parts = [
        select(_bytes(given["bits"], column // per_byte, LANES), matrices["expand"][...])
        for column in range(start, end, columns)
    ]
    packed = jnp.concatenate(parts, axis=1)
    shift = jax.lax.broadcasted_iota(jnp.int32, packed.shape, 1) % per_byte * (8 // per_byte)
    values = jax.lax.shift_right_logical(packed, shift) & (15 if kind == "codes" else 1)
    blocks = (end - start) // format.block
    byte = select(
        _bytes(given["scales"], start // format.block, blocks),
        matrices["spread"][:blocks, : end - start],
    )
    g = given["rows"][:, 1:2] if format.has_global else None
    return following.Record(values=values, byte=byte, g=g)


def _bytes(ref, start: int, width: int):
    return ref[:, start : start + width].astype(jnp.int32)
