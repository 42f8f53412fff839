"""The block-scaled FP4 kernel of Blackwell GPUs; `blackwell.py` has everything around it.

Each CTA, or pair of CTAs, takes one tile after the other. Three parts of it run side by side:
    a warp that loads     codes and scales, global to shared memory by TMA, in a ring of stages
    a warp that issues    scales from shared to tensor memory, and the MMAs, in order
    a warpgroup           accumulator from tensor memory, times factors, to shared, to global memory
and meet at barriers: `full` and `empty` of each stage, `done` and `freed` of each accumulator.

Scales in tensor memory have a place for each stage: they are written only after `full`, which is
after `empty`, so no MMA that is still running can read them.
Limits of jax 0.10.2 (`tcgen05_mma`) that shape this: block-scaled tokens come in multiples of 32,
their scales in whole 128 rows; no slices of scales of more than 128 rows, so that each stage has
tensor memory of its own and the ring's position is told apart by branches.
"""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import blackwell
from pallas_kernels.common.blackwell import CHUNK, DEPTH, SIDE, Operands, Problem, Tiling

_LOADER, _ISSUER = 0, 1  # warps of the first warpgroup; the second one stores
_MULTIPROCESSORS = 148  # of a B200
# jax 0.10 wants an index beside the reference, 0.12 takes none
_WHOLE: dict[str, Any] = {"idx": ()} if "idx" in inspect.signature(plgpu.load).parameters else {}


def run(
    operands: Operands, tiling: Tiling, *, outputs: int, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Does all tiles in use; rows of the result that no tile has are not written."""
    problem = Problem(
        tiling=tiling,
        block=operands.block,
        outputs=outputs,
        bytes=operands.w.shape[1],
        out_dtype=blackwell.stored(out_dtype),
    )
    kernel = _Kernel(problem)
    call = plgpu.kernel(
        kernel.body,
        # whole tiles: a copy of a single row is not cut at the end of the array
        out_type=jax.ShapeDtypeStruct((operands.x.shape[0], problem.padded), problem.out_dtype),
        grid=(_MULTIPROCESSORS // (2 if tiling.pair else 1),),
        grid_names=("sm",),
        num_threads=2,
        thread_name="wg",
        scratch_types=kernel.scratch(),
        cluster=(2,) if tiling.pair else (),
        cluster_names=("pair",) if tiling.pair else (),
        kernel_name="block_scaled_matmul",
        # `_codes` relies on how this way of lowering lays out a union
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    of = operands
    weights = (of.w, kernel.scales(of.w_scales), of.w_factor)
    tokens = (of.x, kernel.scales(of.x_scales), of.x_factor)
    return call(of.schedule, of.used, *weights, *tokens)[:, :outputs].astype(out_dtype)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    of: Problem

    @property
    def axis(self):
        return "pair" if self.of.tiling.pair else None

    @property
    def scale_dtype(self):
        return jnp.float8_e4m3fn if self.of.block == 16 else jnp.float8_e8m0fnu

    def scales(self, swizzled: jax.Array) -> jax.Array:
        """The same bytes as what they are: no copy."""
        return jax.lax.bitcast_convert_type(swizzled, self.scale_dtype)

    def scratch(self) -> dict[str, Any]:
        """Buffers, barriers and tensor memory of a CTA."""
        of, t = self.of, self.of.tiling
        own = t.tokens // (2 if t.pair else 1)
        tmem = {"acc": plgpu.TMEM((SIDE, t.tokens * t.slots), jnp.float32, collective=t.pair)}
        for stage in range(t.stages):
            for name, tiles in (("w", 1), ("x", of.x_tiles)):
                tmem[f"{name}_scales_{stage}"] = plgpu.TMEM(
                    (tiles * SIDE, DEPTH // of.block),
                    self.scale_dtype,
                    layout=plgpu.TMEMLayout.SCALES_LAYOUT,
                    collective=t.pair,
                )
        barrier = functools.partial(plgpu.Barrier, num_arrivals=1, orders_tensor_core=True)
        freed = barrier
        if t.pair:  # the first CTA waits until both have read their half
            freed = functools.partial(
                plgpu.ClusterBarrier,
                collective_axes=("pair",),
                num_arrivals=1,
                orders_tensor_core=True,
            )
        return {
            "w_smem": _codes(t.stages, SIDE),
            "x_smem": _codes(t.stages, own),
            "ws_smem": plgpu.SMEM((t.stages, 1, of.groups, 32, 16), self.scale_dtype),
            "xs_smem": plgpu.SMEM((t.stages, of.x_tiles, of.groups, 32, 16), self.scale_dtype),
            "out_smem": plgpu.SMEM((2, CHUNK, SIDE), of.out_dtype),
            "full": plgpu.Barrier(num_arrivals=4, num_barriers=t.stages),
            "empty": barrier(num_barriers=t.stages),
            "done": barrier(num_barriers=t.slots),
            "freed": freed(num_barriers=t.slots),
            **tmem,
        }

    def body(self, schedule, used, w, ws, fw, x, xs, fx, out, **scratch):
        thread = jax.lax.axis_index("wg")

        @plgpu.nd_loop((used[0] * self.of.o_tiles,), collective_axes="sm")
        def _(info):
            tile, o_tile = blackwell.work_item(info.index[0], used[0], self.of.o_tiles)
            expert, row, rows = (schedule[i, tile] for i in range(3))
            member = jax.lax.axis_index("pair") if self.of.tiling.pair else 0
            nth = info.local_index

            @pl.when(thread == 0)
            def _():
                @plgpu.warp_map
                def _(warp):
                    @pl.when(warp == _LOADER)
                    def _():
                        self.load(nth, (tile, o_tile, expert, row), w, ws, x, xs, scratch)

                    @pl.when(warp == _ISSUER)
                    def _():
                        self.multiply(nth, member, scratch)

            @pl.when(thread == 1)
            def _():
                place = (tile, o_tile, expert, row, rows, member)
                self.store(nth, place, fw, fx, out, scratch)

        @pl.when(thread == 1)
        def _():
            plgpu.wait_smem_to_gmem(0)  # shared memory is read until then

    def load(self, nth, place, w, ws, x, xs, scratch):
        """Brings codes and scales of each step into the ring."""
        of, t = self.of, self.of.tiling
        tile, o_tile, expert, row = place
        w_row, w_tile = of.weights(expert, o_tile)
        halves = plgpu.CopyPartition.PARTITIONED(0) if t.pair else None
        both = plgpu.CopyPartition.REPLICATED if t.pair else None

        def step(k, _):
            at = nth * of.steps + k
            stage = jax.lax.rem(at, t.stages)

            @pl.when(at >= t.stages)
            def _():
                plgpu.barrier_wait(scratch["empty"].at[stage])

            def copy(source, to, how):
                plgpu.copy_gmem_to_smem(
                    source,
                    to.at[stage],
                    scratch["full"].at[stage],
                    collective_axes=self.axis,
                    leader_tracked=how,
                )

            byte, group = of.depth(k)
            codes, scales = pl.ds(byte, DEPTH // 2), pl.ds(group, of.groups)
            (w_smem, _), (x_smem, _) = scratch["w_smem"], scratch["x_smem"]
            copy(w.at[pl.ds(w_row, t.side), codes], w_smem, halves)
            copy(x.at[pl.ds(row, t.tokens), codes], x_smem, halves)
            x_scales = xs.at[pl.ds(tile * of.x_tiles, of.x_tiles), scales]
            copy(ws.at[pl.ds(w_tile, t.side // SIDE), scales], scratch["ws_smem"], halves)
            copy(x_scales, scratch["xs_smem"], both)

        jax.lax.fori_loop(0, of.steps, step, None)

    def multiply(self, nth, member, scratch):
        """Issues scale copies and MMAs of each step; of a pair, the first CTA does it for both."""
        of, t = self.of, self.of.tiling
        slot = jax.lax.rem(nth, t.slots)

        @pl.when(nth >= t.slots)
        def _():
            plgpu.barrier_wait(scratch["freed"].at[slot])

        def issue(k, stage: int):
            plgpu.barrier_wait(scratch["full"].at[stage])
            w_scales, x_scales = (scratch[f"{name}_scales_{stage}"] for name in "wx")
            (_, w_smem), (_, x_smem) = scratch["w_smem"], scratch["x_smem"]
            to_tmem = functools.partial(plgpu.async_copy_scales_to_tmem, collective_axis=self.axis)
            to_tmem(scratch["ws_smem"].at[stage], w_scales)
            to_tmem(scratch["xs_smem"].at[stage], x_scales)
            plgpu.tcgen05_mma(
                scratch["acc"].at[:, pl.ds(slot * t.tokens, t.tokens)],
                w_smem.at[stage],
                x_smem.at[stage].transpose((1, 0)),
                scratch["empty"].at[stage],
                a_scale=w_scales,
                b_scale=x_scales,
                accumulate=k > 0,
                collective_axis=self.axis,
            )

        def step(k, _):
            at = jax.lax.rem(nth * of.steps + k, t.stages)
            for stage in range(t.stages):
                pl.when(at == stage)(functools.partial(issue, k, stage))

        @pl.when(member == 0)
        def _():
            jax.lax.fori_loop(0, of.steps, step, None)
            plgpu.tcgen05_commit_arrive(scratch["done"].at[slot], collective_axis=self.axis)

    def store(self, nth, place, fw, fx, out, scratch):
        """Multiplies by the factors, rounds, and stores the rows that are the tile's."""
        of, t = self.of, self.of.tiling
        tile, o_tile, expert, row, rows, member = place
        slot = jax.lax.rem(nth, t.slots)
        layout = plgpu.Layout.TCGEN05_TMEM_NATIVE(1)  # a lane has an output
        factors = fw.at[pl.ds(of.w_factor(expert, o_tile, member), SIDE)]
        w_factor = _load(factors, layout.reduce(1))
        plgpu.barrier_wait(scratch["done"].at[slot])
        for nth_chunk, first in enumerate(range(0, t.tokens, CHUNK)):
            columns = pl.ds(slot * t.tokens + first, CHUNK)
            total = plgpu.async_load_tmem(scratch["acc"].at[:, columns], layout=layout)
            factors = fx.at[pl.ds(of.x_factor(tile, first), CHUNK)]
            x_factor = _load(factors, layout.reduce(0))
            if first + CHUNK == t.tokens:
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(scratch["freed"].at[slot])
            spread = functools.partial(_spread, shape=total.shape, layout=layout)
            y = blackwell.epilogue(total, spread(w_factor, 0), spread(x_factor, 1), of.out_dtype)
            whole = t.tokens > CHUNK
            smem = scratch["out_smem"].at[nth_chunk % 2 if whole else jax.lax.rem(nth, 2)]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            smem.transpose((1, 0))[...] = y
            plgpu.commit_smem()

            def copy(start, size, smem=smem, first=first):
                rows_out = pl.ds(row + first + start, size)
                columns_out = pl.ds(of.output(o_tile, member), SIDE)
                plgpu.copy_smem_to_gmem(
                    smem.at[pl.ds(start, size)], out.at[rows_out, columns_out], commit_group=False
                )

            blackwell.pieces(rows - first, pl.when, copy)
            plgpu.commit_smem_to_gmem_group()


def _codes(stages: int, rows: int) -> Any:
    """Shared memory of codes, seen in two ways: as TMA fills it, and as the MMA reads it.

    For TMA rows of bytes, from any row of the operand on. (As 4-bit elements, jax 0.10.2 scales the
    sizes of a copy to bytes but not where it starts, and in tiles of 8 rows it starts at multiples
    of 8 only.) For the MMA, tiles of 8 rows of elements. A stage is as wide as one swizzle atom, so
    the tiles lie one below the other, which makes both the same bytes in the same order.
    """
    swizzle, tiles = plgpu.SwizzleTransform(128), plgpu.TilingTransform((8, DEPTH))
    return plgpu.RefUnion(
        plgpu.SMEM((stages, rows, DEPTH // 2), jnp.uint8, transforms=(swizzle,)),
        plgpu.SMEM((stages, rows, DEPTH), jnp.float4_e2m1fn, transforms=(tiles, swizzle)),
    )


def _load(ref, layout):
    """Numbers from global memory."""
    return plgpu.load(ref, **_WHOLE, layout=layout, optimized=False)


def _spread(factor, axis, *, shape, layout):
    """One number for each row (axis 0) or column (axis 1) of a tile."""
    wide = jax.lax.broadcast_in_dim(factor, shape, (axis,))
    return plgpu.layout_cast(wide, layout)
