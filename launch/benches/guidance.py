"""Codec and store of guidance, each against a plain copy of the same bytes in the same process."""

import functools
import gc
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.benches.timing import Row, paired
from trace_jax import formats
from trace_jax.guidance import codec
from trace_jax.guidance.record import Coding, Guidance, GuidanceSpec, SiteRecord
from trace_jax.guidance.store import GuidanceStore
from trace_jax.qat import sites

ROWS, WIDTH = 4096, 2048  # tokens of one layer, and the hidden size of Qwen3.5-35B-A3B
LAYERS, TOKENS, SEQUENCES = 20, 1024, 8
FORMATS = ("nvfp4", "mxfp4")
CODINGS = {
    "codes": Coding(),
    "mantissa": Coding(kind="mantissa"),
    "mantissa, 3 bits of scales": Coding(kind="mantissa", scale_bits=3, global_bits=16),
    "mantissa, 2 bits of scales": Coding(kind="mantissa", scale_bits=2, global_bits=16),
}


def run(repeats: int) -> list[Row]:
    """Rows of the codec, then of the store. `bytes` are those of the values, or of the records."""
    rows = [row for text in FORMATS for row in _codec(text, repeats)]
    rows += _store(repeats)
    return [row | {"gb_s": row["bytes"] / row["seconds"] / 1e9} for row in rows]


def _codec(text: str, repeats: int) -> list[Row]:
    """Encode and decode one layer; the peer copies the BF16 values on the same device."""
    format = formats.get(text)
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH), jnp.float32).astype(jnp.bfloat16)
    noise = jax.random.normal(jax.random.key(1), x.shape, jnp.float32).astype(x.dtype)
    own = (x * (1 + jnp.bfloat16(0.01) * noise)).astype(jnp.float32)
    kept = jax.jit(functools.partial(sites.own_rounding, format=format))(x.astype(jnp.float32))
    copy, rows = jax.jit(jnp.copy), []
    for name, coding in CODINGS.items():
        encode = jax.jit(functools.partial(codec.encode, format=format, coding=coding))
        decode = jax.jit(functools.partial(codec.decode, format=format, coding=coding))
        record = encode(*kept)
        failed = int(jnp.sum(decode(record, own).failed))
        steps: dict[str, Callable[[], Any]] = {
            "encode": functools.partial(encode, *kept),
            "decode": functools.partial(decode, record, own),
        }
        for what, call in steps.items():
            row = paired(f"{what} {text} {name}", call, lambda: copy(x), repeats)
            extra = {"bytes": x.nbytes, "peer": "copy of the BF16 values"}
            record_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(record))
            rows.append(row | extra | {"record_bytes": record_bytes, "failed_rows": failed})
    return rows


def _store(repeats: int) -> list[Row]:
    """Put and get all sequences, in memory and on disk; the peer copies their arrays in memory."""
    made = [_record(seed) for seed in range(SEQUENCES)]
    leaves = [leaf for guidance in made for leaf in jax.tree.leaves(guidance)]
    size = sum(leaf.nbytes for leaf in leaves)
    tokens_T = np.arange(TOKENS + 1, dtype=np.int32)

    def copy() -> list[np.ndarray]:
        return [leaf.copy() for leaf in leaves]

    def put(store: GuidanceStore) -> list[Any]:
        held = [
            store.put(
                guidance,
                spec=guidance.spec,
                name=str(i),
                tokens_T=tokens_T,
                prompt_length=1,
                version=0,
            )
            for i, guidance in enumerate(made)
        ]
        store.wait()
        return held

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, budget in (("memory", None), ("disk", 0)):
            with GuidanceStore(pathlib.Path(folder), memory_bytes=budget) as store:
                held = put(store)
                steps: dict[str, Callable[[], Any]] = {
                    "put to": lambda s=store: len(put(s)),
                    "get from": lambda s=store, h=held: len([s.get(ticket) for ticket in h]),
                    "load from": lambda s=store, h=held: _load(s, h, tokens_T).spec.kind,
                }
                for what, call in steps.items():
                    row = paired(f"store: {what} {name}", call, copy, repeats)
                    rows.append(row | {"bytes": size, "peer": "copy of the arrays"})
                    gc.collect()
    return rows


def _load(store: GuidanceStore, held: list[Any], tokens_T: np.ndarray) -> Guidance:
    """What a micro-batch of all sequences needs: verified, and stacked with padding."""
    tokens_BT = np.broadcast_to(tokens_T, (len(held), len(tokens_T)))
    return store.load(held, held[0], tokens_BT, np.ones(tokens_BT.shape, bool))


def _record(seed: int) -> Guidance:
    """The paper's compact guidance of one sequence: half of the layers, one bit and scales."""
    rng = np.random.default_rng(seed)
    lead = (LAYERS, TOKENS)
    site = SiteRecord(
        bits=rng.integers(0, 256, (*lead, WIDTH // 8), np.uint8),
        scales=rng.integers(0, 127, (*lead, WIDTH // 16), np.uint8),
        global_scale=rng.random((*lead, 1), np.float32),
    )
    spec = GuidanceSpec(
        kind="mantissa", layers=(tuple(range(LAYERS)),), sites=("expert_in",), formats=("nvfp4",)
    )
    return Guidance(sites={"expert_in": site}, spec=spec)
