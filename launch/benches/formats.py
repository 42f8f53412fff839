"""Quantisers against a memory copy of their input, and guided against plain fake quantisation."""

import functools

import jax
import jax.numpy as jnp

from launch.benches.timing import Row, paired
from trace_jax import formats
from trace_jax.qat import sites

FORMATS = (
    "nvfp4",
    "nvfp4:global_rule=one",
    "nvfp4:global_rule=pow2",
    "nvfp4:convention=te",
    "nvfp4:block_shape=16x16",
    "4over6",
    "mxfp4",
    "mxfp8",
    "hif4",
)
ROWS, WIDTH = 4096, 2048


def run(repeats: int) -> list[Row]:
    """One row per format (quantise codes and scales of BF16 rows), then the fake quantisers."""
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH), jnp.float32).astype(jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    rows = []
    for text in FORMATS:
        quantise = jax.jit(functools.partial(formats.quantize, format=text))
        row = paired(f"quantise {text}", lambda q=quantise: q(x), lambda: copy(x), repeats)
        rows.append(row | {"bytes": x.nbytes, "peer": "copy of the input"})
    for text in ("nvfp4", "mxfp4"):
        rows += _fake_quant(text, x, repeats)
    return [row | {"gb_s": row["bytes"] / row["seconds"] / 1e9} for row in rows]


def _fake_quant(text: str, x: jax.Array, repeats: int) -> list[Row]:
    """Plain and guided forward of one site; the record is of the same values, slightly moved."""
    rows, valid = [], jnp.ones(len(x), bool)
    noise = jax.random.normal(jax.random.key(1), x.shape, jnp.float32).astype(x.dtype)
    moved = x * (1 + jnp.bfloat16(0.01) * noise)

    def fake(x, record, site, guided):  # x is an argument: a constant would be folded
        return sites.quantize_site(x, record, valid, site, guided=guided)[0]

    for kind in ("codes", "mantissa"):
        site = sites.Site(format=formats.get(text), kind=kind)
        record = jax.jit(functools.partial(sites.record_site, site=site))(moved)
        plain = jax.jit(functools.partial(fake, record=None, site=site, guided=False))
        guided = jax.jit(functools.partial(fake, site=site, guided=True))
        row = paired(
            f"guided {text} {kind}",
            lambda g=guided, r=record: g(x, r),
            lambda p=plain: p(x),
            repeats,
        )
        rows.append(row | {"bytes": x.nbytes, "peer": "plain fake quantisation"})
    return rows
