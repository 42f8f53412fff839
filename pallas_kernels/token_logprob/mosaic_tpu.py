"""Pallas kernel for TPUs: the forward pass. BF16 operands, float32 sums; backward is xla.py's.

Grid: (tiles of tokens, tiles of the vocabulary), the second one in order, with the running sums of
a tile of tokens in VMEM. Every tile of tokens reads the whole head once, so it is as tall as fits:
at 1024 tokens there are 1024 operations for each byte of the head, past the balance of a v6e (560)
and of a TPU7x (310). The whole width stands in VMEM, which saves a loop.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.common import impls
from pallas_kernels.token_logprob import partial
from pallas_kernels.token_logprob.partial import Stats

_ROWS, _COLUMNS = 1024, 512
_BLOCK_BYTES = 4 * 2**20  # of hidden states; of the head at most half of it
_VMEM_BYTES = 48 * 2**20  # both blocks twice, logits and what is computed from them
_SUBLANES, _LANES = 16, 128  # of a BF16 tile


def forward(
    hidden_MD: BFloat16[Array, "M D"],
    head_VD: BFloat16[Array, "V D"],
    tokens_M: Int[Array, " M"],
    *,
    temperature: float,
    impl: str,
) -> Stats:
    """Sums over the whole vocabulary."""
    (tokens, width), vocabulary = hidden_MD.shape, head_VD.shape[0]
    if width % _LANES:  # small models: the contraction is of whole lanes
        wide = ((0, 0), (0, -width % _LANES))
        hidden_MD, head_VD = jnp.pad(hidden_MD, wide), jnp.pad(head_VD, wide)
        width = hidden_MD.shape[1]
    rows = _tile(tokens, _ROWS, _BLOCK_BYTES // (2 * width), _SUBLANES)
    columns = _tile(vocabulary, _COLUMNS, _BLOCK_BYTES // (4 * width), _LANES)
    kernel = functools.partial(_kernel, vocabulary=vocabulary, temperature=temperature)
    of_rows = pl.BlockSpec((rows, 1), lambda m, v: (m, 0))
    result = jax.ShapeDtypeStruct((tokens, 1), jnp.float32)
    sums = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tokens, rows), pl.cdiv(vocabulary, columns)),
        in_specs=[
            pl.BlockSpec((rows, width), lambda m, v: (m, 0)),
            pl.BlockSpec((columns, width), lambda m, v: (v, 0)),
            of_rows,
        ],
        out_specs=(of_rows,) * 4,
        out_shape=(result,) * 4,
        scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32)] * 4,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=impls.interpreted(impl),
        name="token_logprob_forward",
    )(hidden_MD, head_VD, tokens_M.astype(jnp.int32)[:, None])
    largest, mass, slope, chosen = (value[:, 0] for value in sums)
    return partial.finish(
        partial.Partial(largest_M=largest, mass_M=mass, slope_M=slope, chosen_M=chosen)
    )


def _kernel(hidden_ref, head_ref, tokens_ref, *refs, vocabulary: int, temperature: float):
    outs, scratch = refs[:4], refs[4:]
    tile, tiles = pl.program_id(1), pl.num_programs(1)
    rows, columns = hidden_ref.shape[0], head_ref.shape[0]

    @pl.when(tile == 0)
    def _():
        for ref, value in zip(scratch, partial.start(rows), strict=True):
            ref[...] = value

    contracted = (((1,), (1,)), ((), ()))
    z = jax.lax.dot_general(
        hidden_ref[...], head_ref[...], contracted, preferred_element_type=jnp.float32
    )
    if temperature != 1.0:
        z = z * (1.0 / temperature)
    # the last tile reaches beyond the head, where there may be anything
    at = tile * columns + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    so_far = (scratch[0][...], scratch[1][...], scratch[2][...], scratch[3][...])
    sums = partial.absorb(so_far, z, at < vocabulary, at == tokens_ref[...])
    for ref, value in zip(scratch, sums, strict=True):
        ref[...] = value

    @pl.when(tile == tiles - 1)
    def _():
        for out, ref in zip(outs, scratch, strict=True):
            out[...] = ref[...]


def _tile(size: int, most: int, fits: int, multiple: int) -> int:
    """Length of a tile: a multiple, not much longer than the axis, that fits in VMEM."""
    whole = -(-size // multiple) * multiple
    return min(whole, most, max(multiple, fits // multiple * multiple))
