"""Costs, inputs and baseline of the named cases: plain fake quantisation by XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import packed
from pallas_kernels.common.bench import Arrays, Bench
from pallas_kernels.common.cost import Cost
from pallas_kernels.fake_quant import op, ref
from pallas_kernels.fake_quant.cases import CASES, Case
from pallas_kernels.fake_quant.types import PER_BYTE, Counts, Recorded, of_interest
from pallas_kernels.quantize.bench import rows
from trace_jax import formats
from trace_jax.formats import e2m1

# Assumed operations a value, not counted: the PTX for Hopper has about 140 instructions a value
# where a record is followed and 56 where there is none, so the bound is optimistic.
_OPERATIONS = 60


def make(case: Case, seed: int) -> Arrays:
    """(x, record or None, valid): the record is of values that differ from x by a tenth."""
    x = rows(case.M, case.K, case.dtype, seed)
    k_other, k_valid = jax.random.split(jax.random.key(seed + 1))
    other = x * (1 + jax.random.normal(k_other, x.shape, x.dtype) * 0.1)
    valid = jax.random.uniform(k_valid, (case.M,)) < 0.9
    return x, None if case.kind is None else record(other, case.format, case.kind), valid


def record(x: jax.Array, format: str, kind: str) -> Recorded:
    """What a rollout that quantises `x` plainly records of it."""
    q = packed.pack(x.astype(jnp.float32), format)
    bits = q.codes
    if kind == "mantissa":
        bits = e2m1.pack_bits(q.format.unpack_codes(q.codes) & 1)
    return Recorded(bits=bits, scales=q.scales, global_scale=q.factor)


def cost(case: Case) -> Cost:
    """x and the record read once; the value and the counts written."""
    format = formats.get(case.format)
    padded, x = format.padded(case.K), case.K * jnp.dtype(case.dtype).itemsize
    read = x + 1
    if case.kind is not None:
        read += padded // PER_BYTE[case.kind] + padded // format.block + 4 * format.has_global
    written = x + 4 * len(of_interest(case.kind is not None))
    return Cost(case.M * read, case.M * written, case.M * padded * _OPERATIONS, "f32")


def _options(case: Case) -> dict[str, Any]:
    return {"kind": case.kind or "codes", "guided": case.guided}


def _run(case: Case, impl: str) -> Any:
    options = _options(case) | {"format": case.format, "ste": case.ste}
    return functools.partial(op.fake_quant, impl=impl, **options)


def _reference(case: Case) -> Any:
    def run(x: jax.Array, recorded: Recorded | None, valid: jax.Array) -> Any:
        format = formats.get(case.format)
        found = ref.fake_quant(x, recorded, valid, format=format, **_options(case))
        counts = {name: count[:, 0] for name, count in found[1].items()}
        if recorded is not None:
            counts["undecoded"] = jnp.zeros(valid.shape, jnp.int32)  # global scales are numbers
        return found[0], Counts(**counts)

    return run


def _baseline(case: Case) -> Any:
    def plain(x: jax.Array, recorded: Recorded | None, valid: jax.Array) -> jax.Array:
        del recorded
        format = formats.get(case.format)
        return ref.fake_quant(x, None, valid, format=format, kind="codes", guided=False)[0]

    return plain


def _bench(case: Case) -> Bench:
    return Bench(
        op="fake_quant",
        case=case.name,
        impls=("xla", "triton", "mosaic_tpu"),
        cost=cost(case),
        make=functools.partial(make, case),
        run=functools.partial(_run, case),
        reference=_reference(case),
        tolerance=0.0,
        baseline=None if case.small else _baseline(case),
        baseline_name="" if case.small else "plain fake quantisation, XLA",
        small=case.small,
    )


BENCHES: tuple[Bench, ...] = tuple(_bench(case) for case in CASES)
assert len({bench.case for bench in BENCHES}) == len(BENCHES)
