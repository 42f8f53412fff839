"""Pallas-Triton kernels for Hopper and Blackwell; BF16 operands, float32 sums.

forward         a program has a tile of tokens and a split of the vocabulary; it walks the split's
                tiles with running sums, so logits live in registers only. XLA merges the splits.
logit_gradient  the backward pass goes over chunks as in xla.py, and its matmuls are XLA's. This
                kernel computes a chunk's logits again and turns them into their gradient before
                anything is written, in BF16: half the bytes, and both products that follow run at
                the speed of BF16. The gradient of one [token, column] is so rounded to 8 bits; its
                sums over tokens and columns stay float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.common import device, impls
from pallas_kernels.token_logprob import partial
from pallas_kernels.token_logprob.partial import Stats

ROWS, DEPTH = 128, 64  # tokens, contraction of one tile
COLUMNS = {9: 256}  # vocabulary of one tile, by major compute capability
# A wide tile reads less from L2 for each product. On Blackwell 256 columns do not fit into the
# registers of the forward kernel without spills, on Hopper they just do.
_OTHER_COLUMNS = 128
_WARPS, _STAGES = 8, 4
_PROGRAMS = 1024  # several for each multiprocessor, so that the last wave is a small part
_PARAMS = plt.CompilerParams(num_warps=_WARPS, num_stages=_STAGES)


def columns() -> int:
    """Of one tile, on the device that the kernel is traced for."""
    return COLUMNS.get((device.current().capability or (0, 0))[0], _OTHER_COLUMNS)


def forward(
    hidden_MD: BFloat16[Array, "M D"],
    head_VD: BFloat16[Array, "V D"],
    tokens_M: Int[Array, " M"],
    *,
    temperature: float,
    impl: str,
) -> Stats:
    """Sums over the whole vocabulary."""
    tokens, vocabulary = hidden_MD.shape[0], head_VD.shape[0]
    row_tiles, column_tiles = pl.cdiv(tokens, ROWS), pl.cdiv(vocabulary, columns())
    tiles = max(1, row_tiles * column_tiles // _PROGRAMS)  # of one program
    splits = pl.cdiv(column_tiles, tiles)
    kernel = functools.partial(
        _forward_kernel, width=columns(), tiles=tiles, temperature=temperature
    )
    part = jax.ShapeDtypeStruct((splits, tokens), jnp.float32)
    parts = pl.pallas_call(
        kernel,
        # programs that run at once share a split: its rows of the head are read from L2
        grid=(row_tiles, splits),
        out_shape=(part,) * 4,
        compiler_params=_PARAMS,
        interpret=impls.interpreted(impl),
        name="token_logprob_forward",
    )(hidden_MD, head_VD, tokens_M.astype(jnp.int32))
    return partial.finish_splits(*parts)


def logit_gradient(
    hidden_MD: BFloat16[Array, "M D"],
    rows_ND: Float[Array, "N D"],
    local_M: Int[Array, " M"],
    stats: Stats,
    d_logprob_M: Float[Array, " M"] | None,
    d_entropy_M: Float[Array, " M"] | None,
    *,
    temperature: float,
    impl: str,
) -> BFloat16[Array, "M N"]:
    """Gradient to one chunk of logits, before the temperature."""
    tokens, chunk = hidden_MD.shape[0], rows_ND.shape[0]
    nothing_M = jnp.zeros(tokens, jnp.float32)
    kernel = functools.partial(
        _gradient_kernel, width=columns(), temperature=temperature, entropic=d_entropy_M is not None
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tokens, ROWS), pl.cdiv(chunk, columns())),
        out_shape=jax.ShapeDtypeStruct((tokens, chunk), jnp.bfloat16),
        compiler_params=_PARAMS,
        interpret=impls.interpreted(impl),
        name="token_logprob_gradient",
    )(
        hidden_MD,
        rows_ND.astype(hidden_MD.dtype),
        local_M.astype(jnp.int32),
        stats.largest_M,
        stats.log_mass_M,
        stats.entropy_M,
        nothing_M if d_logprob_M is None else d_logprob_M,
        nothing_M if d_entropy_M is None else d_entropy_M,
    )


def _forward_kernel(
    hidden_ref, head_ref, tokens_ref, *out_refs, width: int, tiles: int, temperature: float
):
    (tokens, _), vocabulary = hidden_ref.shape, head_ref.shape[0]
    row, split = pl.program_id(0) * ROWS, pl.program_id(1)
    inside = row + jnp.arange(ROWS) < tokens
    given = plt.load(tokens_ref.at[pl.ds(row, ROWS)], mask=inside, other=-1)

    def tile(i, so_far):
        column = (split * tiles + i) * width
        z = _logits(hidden_ref, head_ref, row, column, width, temperature)
        at = column + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        return partial.absorb(so_far, z, at < vocabulary, at == given[:, None])

    left = pl.cdiv(vocabulary, width) - split * tiles
    sums = jax.lax.fori_loop(0, jnp.minimum(tiles, left), tile, partial.start(ROWS))
    for ref, value in zip(out_refs, sums, strict=True):
        plt.store(ref.at[split, pl.ds(row, ROWS)], value.reshape(ROWS), mask=inside)


def _gradient_kernel(
    hidden_ref,
    rows_ref,
    local_ref,
    largest_ref,
    log_mass_ref,
    entropy_ref,
    d_logprob_ref,
    d_entropy_ref,
    out_ref,
    *,
    width: int,
    temperature: float,
    entropic: bool,
):
    (tokens, _), chunk = hidden_ref.shape, rows_ref.shape[0]
    row, column = pl.program_id(0) * ROWS, pl.program_id(1) * width
    inside = row + jnp.arange(ROWS) < tokens

    def load(ref):
        return plt.load(ref.at[pl.ds(row, ROWS)], mask=inside, other=0)[:, None]

    z = _logits(hidden_ref, rows_ref, row, column, width, temperature)
    logp = (z - load(largest_ref)) - load(log_mass_ref)
    d_logprob = load(d_logprob_ref)
    weight = d_logprob
    if entropic:
        weight = weight + load(d_entropy_ref) * (logp + load(entropy_ref))
    at = column + jax.lax.broadcasted_iota(jnp.int32, logp.shape, 1)
    dz = jnp.where(at == load(local_ref), d_logprob, 0.0) - jnp.exp(logp) * weight
    dz = (dz * (1.0 / temperature)).astype(jnp.bfloat16)
    block = out_ref.at[pl.ds(row, ROWS), pl.ds(column, width)]
    plt.store(block, dz, mask=inside[:, None] & (at < chunk))


def _logits(hidden_ref, head_ref, row, column, columns: int, temperature: float):
    """One tile, float32; what lies beyond the tokens or the vocabulary is zero."""
    width = hidden_ref.shape[1]

    def step(i, z):
        a = _tile(hidden_ref, row, ROWS, i * DEPTH)
        b = _tile(head_ref, column, columns, i * DEPTH)
        return z + jnp.dot(a, b.T, preferred_element_type=jnp.float32)

    zero = jnp.zeros((ROWS, columns), jnp.float32)
    z = jax.lax.fori_loop(0, pl.cdiv(width, DEPTH), step, zero)
    return z if temperature == 1.0 else z * (1.0 / temperature)


def _tile(ref, row, rows: int, k):
    """rows x DEPTH of an operand, zero beyond its ends; unmasked where no end can be near."""
    size, width = ref.shape
    block = ref.at[pl.ds(row, rows), pl.ds(k, DEPTH)]
    mask = None
    if size % rows:
        mask = jnp.broadcast_to((row + jnp.arange(rows) < size)[:, None], (rows, DEPTH))
    if width % DEPTH:
        in_width = jnp.broadcast_to((k + jnp.arange(DEPTH) < width)[None, :], (rows, DEPTH))
        mask = in_width if mask is None else mask & in_width
    return plt.load(block, mask=mask, other=None if mask is None else 0)
