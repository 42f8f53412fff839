"""Parameters filled from a checkpoint as it is read: no second copy of the model on the host.

Every leaf is allocated once, where it will live (each device holds its own part of it), and each
tensor is written into its place by an update that reuses the leaf's memory. Beside the leaves the
host holds what is being read: the rows of one layer of one leaf, or 64 MiB of an embedding.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.hf import files, names
from trace_jax.progress import progress
from trace_jax.types import Params

_CHUNK = 64 * 2**20  # bytes of an embedding read at once
_LONG = 2**30  # bytes of a checkpoint from which on progress is shown
_Slab = tuple[names.Path, int | None]
_Slabs = dict[_Slab, np.ndarray]


@runtime_checkable
class Source(Protocol):
    """Where tensors come from: files as they are, or files that are dequantised."""

    def dtype(self, name: str) -> np.dtype:
        """What `read` returns."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The whole tensor."""
        ...

    def read_into(self, name: str, out: np.ndarray) -> None:
        """The whole tensor, into a contiguous array of its dtype."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of its first axis."""
        ...


def fill(
    source: Source,
    table: Sequence[names.Tensor],
    shapes: Mapping[str, Any],
    sharding: Callable[[names.Path], jax.sharding.Sharding | None],
) -> Params:
    """Parameters of the shapes and dtypes given, filled from the tensors of a table.

    Args: shapes: nested dict of `jax.ShapeDtypeStruct`. sharding: of the leaf at a path; None: the
          default device.
    """
    leaves = {
        tuple(key.key for key in path): _Leaf(shape, sharding(tuple(key.key for key in path)))
        for path, shape in jax.tree_util.tree_leaves_with_path(shapes)
    }
    left = collections.Counter(place.slab for row in table for place in row.places)
    dtypes = _slab_dtypes(source, table)
    total = sum(_bytes(source, row) for row in table)
    slabs: _Slabs = {}
    show = progress(total >> 20, "reading MiB") if total >= _LONG else None
    done = 0
    for row in table:
        first, number = row.places[0].slab
        if number is None:  # a leaf that is no stack of layers: one tensor
            _fill_whole(source, row, leaves[first])
        else:
            _read(source, row, slabs, leaves, dtypes)
            for path, number in (place.slab for place in row.places):
                left[path, number] -= 1
                if not left[path, number]:
                    leaves[path].put(slabs.pop((path, number)), number or 0)
        before, done = done >> 20, done + _bytes(source, row)
        if show is not None and done >> 20 > before:
            show.update((done >> 20) - before)
    if show is not None:
        show.close()
    assert not slabs, sorted(slabs)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: leaves[tuple(key.key for key in path)].finish(), dict(shapes)
    )


def _bytes(source: Source, row: names.Tensor) -> int:
    return math.prod(row.shape) * source.dtype(row.name).itemsize


def _slab_dtypes(source: Source, table: Sequence[names.Tensor]) -> dict[_Slab, np.dtype]:
    """What each layer's part of a leaf is read as: float32 where its tensors differ."""
    found: dict[_Slab, set[np.dtype]] = {}
    for row in table:
        for place in row.places:
            found.setdefault(place.slab, set()).add(source.dtype(row.name))
    wide = np.dtype(np.float32)
    return {slab: next(iter(some)) if len(some) == 1 else wide for slab, some in found.items()}


def _read(
    source: Source,
    row: names.Tensor,
    slabs: _Slabs,
    leaves: Mapping[names.Path, "_Leaf"],
    dtypes: Mapping[_Slab, np.dtype],
) -> None:
    """Reads one tensor into its places; makes room for them where it is the first there."""
    views = []
    for place in row.places:
        if place.slab not in slabs:
            shape = (1, *leaves[place.path].shape[1:])
            slabs[place.slab] = files.empty(shape, dtypes[place.slab])
        views.append(slabs[place.slab][(0, *place.within)])
    kind = source.dtype(row.name)
    if row.plain and views[0].flags.c_contiguous and views[0].dtype == kind:
        source.read_into(row.name, views[0])
        return
    for view, part in zip(views, row.split(source.read(row.name)), strict=True):
        view[...] = part.astype(view.dtype, copy=False)


def _fill_whole(source: Source, row: names.Tensor, leaf: "_Leaf") -> None:
    count = row.shape[0]
    step = max(1, count * _CHUNK // max(_bytes(source, row), 1))
    for start in range(0, count, step):
        leaf.put(source.rows(row.name, start, min(start + step, count)), start)


class _Leaf:
    """One array being filled: a buffer for each device that holds a part of it."""

    def __init__(self, like: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None):
        self.shape, self.sharding = like.shape, sharding
        full = tuple(slice(0, n) for n in self.shape)
        places: dict[Any, Any] = {None: full}
        if sharding is not None:
            places = dict(sharding.addressable_devices_indices_map(self.shape))
        self._places = {
            device: tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, self.shape, strict=True))
            for device, index in places.items()
        }
        self._parts = {
            device: jnp.zeros([s.stop - s.start for s in index], like.dtype, device=device)
            for device, index in self._places.items()
        }

    def put(self, block: np.ndarray, start: int) -> None:
        """Writes rows [start, start + len(block)) of the first axis, on each device its part."""
        for device, (rows, *others) in self._places.items():
            low, high = max(start, rows.start), min(start + len(block), rows.stop)
            if low >= high:
                continue
            part = block[(slice(low - start, high - start), *others)]
            here = part if device is None else jax.device_put(part, device)
            self._parts[device] = _put(self._parts[device], here, np.int32(low - rows.start))
        # the block may be used in place until then, and no more than one is to be in memory
        jax.block_until_ready(list(self._parts.values()))

    def finish(self) -> jax.Array:
        if self.sharding is None:
            return self._parts[None]
        parts = list(self._parts.values())
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


@partial(jax.jit, donate_argnums=0)
def _put(leaf: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    at = (start,) + (np.int32(0),) * (leaf.ndim - 1)
    return jax.lax.dynamic_update_slice(leaf, block.astype(leaf.dtype), at)
