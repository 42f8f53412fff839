"""What changed in a tensor's bytes, in the smallest of four forms; numpy only, exact.

    whole     the new bytes
    bitmap    one bit for each byte, whether it changed (first byte in the lowest bit); new bytes
    gap8      for each changed byte how many unchanged ones precede it, in one byte; 255 stands for
              255 unchanged ones with more to come; then the new bytes
    place32   the place of each changed byte as uint32, little-endian; then the new bytes

FP4 codes change in halves of bytes, but one changed code costs two bytes as gap8, and two codes of
one byte cost the same.
"""

import dataclasses

import numpy as np

from trace_jax.checks import require

FORMS = ("whole", "bitmap", "gap8", "place32")
_MORE = 255  # a gap's byte that is followed by the rest of the gap
_EMPTY = np.empty(0, np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """The new bytes of a tensor, given its old ones."""

    form: str  # of FORMS
    index: np.ndarray  # uint8: where
    values: np.ndarray  # uint8: the new bytes there

    @property
    def bytes(self) -> int:
        """Of the index and the values."""
        return self.index.nbytes + self.values.nbytes


def whole(new: np.ndarray) -> Change:
    """All bytes (N,), whatever the old ones were."""
    return Change(form="whole", index=_EMPTY, values=new)


def encode(old: np.ndarray, new: np.ndarray) -> Change | None:
    """What turns `old` into `new`, both uint8 (N,); None where they are the same."""
    assert old.shape == new.shape and old.dtype == new.dtype == np.uint8
    differs = old != new
    count, size = int(np.count_nonzero(differs)), new.size
    if count == 0:
        return None
    bitmap = -(-size // 8) + count
    if bitmap >= size and 2 * count >= size:
        return whole(new)
    if 2 * count >= bitmap:  # gaps take a byte for each change, or more
        index = np.packbits(differs, bitorder="little")
        return Change(form="bitmap", index=index, values=new[differs])
    places = np.flatnonzero(differs)
    gaps = np.diff(places, prepend=-1) - 1
    more = gaps // _MORE if int(gaps.max()) >= _MORE else np.zeros(1, np.int64)
    sizes = {"bitmap": bitmap, "gap8": count * 2 + int(more.sum()), "whole": size}
    if size < 2**32:
        sizes["place32"] = count * 5
    form = min(sizes, key=lambda name: sizes[name])
    if form == "whole":
        return whole(new)
    if form == "bitmap":
        index = np.packbits(differs, bitorder="little")
    elif form == "gap8":
        index = _gap_bytes(gaps, more) if more.any() else gaps.astype(np.uint8)
    else:
        index = places.astype("<u4").view(np.uint8)
    return Change(form=form, index=index, values=new[places])


def _gap_bytes(gaps: np.ndarray, more: np.ndarray) -> np.ndarray:
    ends = np.cumsum(more + 1) - 1
    out = np.full(int(ends[-1]) + 1, _MORE, np.uint8)
    out[ends] = gaps - more * _MORE
    return out


def decode(change: Change, data: np.ndarray, where: str) -> None:
    """Puts the new bytes into `data`, the old ones: uint8 (N,).

    Raises: ValueError naming `where` if the change is not one of so many bytes.
    """
    fix = "the delta is damaged: send the whole directory"
    require(change.form in FORMS, where, f"form {change.form!r}", f"one of {FORMS}", fix)
    if change.form == "whole":
        got = (change.index.size, change.values.size)
        require(got == (0, data.size), where, f"{got} bytes", f"(0, {data.size}) bytes", fix)
        data[:] = change.values
        return
    places = _places(change, data.size, where, fix)
    got, need = f"{places.size} places", f"one for each of {change.values.size} bytes"
    require(places.size == change.values.size, where, got, need, fix)
    last = int(places.max(initial=-1))
    require(last < data.size, where, f"place {last}", f"less than {data.size}", fix)
    data[places] = change.values


def _places(change: Change, size: int, where: str, fix: str) -> np.ndarray:
    index = change.index
    if change.form == "bitmap":
        need = f"{-(-size // 8)}, a bit for each of {size} bytes"
        require(index.size == -(-size // 8), where, f"a bitmap of {index.size} bytes", need, fix)
        return np.flatnonzero(np.unpackbits(index, count=size, bitorder="little"))
    if change.form == "place32":
        require(index.size % 4 == 0, where, f"{index.size} bytes", "4 for each place", fix)
        return index.view("<u4").astype(np.int64)
    ends = index < _MORE
    whole_gaps = index.size == 0 or bool(ends[-1])
    require(whole_gaps, where, "an unfinished gap at the end", "a whole one", fix)
    return (np.cumsum(index, dtype=np.int64) + np.cumsum(ends, dtype=np.int64) - 1)[ends]
