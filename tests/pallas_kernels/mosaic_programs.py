"""What mosaic_gpu_aot_test compiles: the FP4 matmuls at any size."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.packed import Packed
from pallas_kernels.fp4_grouped_matmul import op as grouped_op
from pallas_kernels.fp4_matmul import op as dense_op
from trace_jax import formats


def dense(topology, *, rows, outputs, width, format, out_dtype="bfloat16"):
    """(M, K) x (O, K)."""
    put = _placer(topology)
    arguments = put(_packed(format, (rows, width))), put(_packed(format, (outputs, width)))

    def run(x, w):
        how = {"impl": "mosaic_gpu", "out_dtype": jnp.dtype(out_dtype)}
        return dense_op.fp4_matmul(x, w, **how)

    return run, arguments


def grouped(topology, *, rows, outputs, width, experts, format, out_dtype="bfloat16"):
    """(M, K) x (E, O, K)."""
    put = _placer(topology)
    arguments = (
        put(_packed(format, (rows, width))),
        put(_packed(format, (experts, outputs, width))),
        put(jax.ShapeDtypeStruct((experts,), jnp.int32)),
    )

    def run(x, w, sizes):
        how = {"impl": "mosaic_gpu", "out_dtype": jnp.dtype(out_dtype)}
        return grouped_op.fp4_grouped_matmul(x, w, sizes, **how)

    return run, arguments


def _packed(name, shape):
    format = formats.get(name)
    *lead, width = shape
    factor = (*lead[:-1], 1, 1) if len(lead) > 1 else (lead[0], 1)
    return Packed(
        codes=jax.ShapeDtypeStruct((*lead, width // 2), jnp.uint8),
        scales=jax.ShapeDtypeStruct((*lead, width // format.block), jnp.uint8),
        factor=jax.ShapeDtypeStruct(factor, jnp.float32) if name == "nvfp4" else None,
        format=format,
    )


def _placer(topology):
    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=topology.sharding)

    return lambda tree: jax.tree.map(place, tree)
