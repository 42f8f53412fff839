"""What a block format is: an element (a codebook), scales, and how values become codes.

Everything works on *rows*: the quantised axis is the last one and a whole number of blocks long
(`pad` adds zeros). A format object is frozen and hashable, so it is static under jit; its fields
are its options. Three facts make guidance work for every format alike:

* value = element value(code) * step, one float32 product; `steps` gives the step of each `span`
  neighbouring values from the scale bytes (and the global scale);
* codes in the order of their values are consecutive integers (`Element.index`), so the two codes
  around a value are its `bracket`;
* the lowest bit of the code alternates in that order, so one bit picks a member of a bracket.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from trace_jax.checks import require
from trace_jax.formats import e2m1


class Element(Protocol):
    """A codebook of values; `trace_jax.formats.e2m1` is one (modules implement this protocol).

    Codes are sign-magnitude: the top bit is the sign, magnitudes grow with the code; the code of
    minus zero is never produced.
    """

    BITS: int  # of a code: 4 or 8
    MAX: float  # largest magnitude

    def round_nearest(self, x: Array, step: Array) -> Array:
        """The code nearest to x / step, saturating; uint8. Ties go to the even code (not S1P2)."""
        ...

    def bracket(self, x: Array, step: Array) -> tuple[Array, Array]:
        """Indices of the two codes around x / step, saturating; equal if x is a codeword."""
        ...

    def index(self, codes: Array) -> Array:
        """Codes in the order of their values, int8; neighbours differ by one."""
        ...

    def from_index(self, i: Array) -> Array:
        """Inverse of `index`."""
        ...

    def decode(self, codes: Array) -> Array:
        """float32 values of codes, for a step of 1."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(abc.ABC):
    """A block format with its options. See the module text for what holds of every format."""

    name: ClassVar[str]
    element: ClassVar[Any]  # an `Element`
    block: ClassVar[int]  # neighbouring values of a row that share scale bytes
    span: ClassVar[int]  # neighbouring values of a row that share one step; divides `block`
    scale_bytes: ClassVar[int]  # bytes of scale a block
    scale_dtype: ClassVar[Any]  # the one-byte dtype in which users see the scale bytes

    @property
    def per_row(self) -> bool:
        """Whether a row is quantised from itself alone, as a token must be; not so in 2-D tiles."""
        return True

    @property
    def has_global(self) -> bool:
        """Whether these options give a tensor or row a global scale."""
        return self.global_scale(jnp.ones(())) is not None

    @abc.abstractmethod
    def global_scale(self, amax: Float[Array, "*A"]) -> Float[Array, "*A"] | None:
        """The float32 global scale for a maximum magnitude; None: this format has none."""

    @abc.abstractmethod
    def quantize_rows(
        self, x: Float[Array, "*A K"], global_: Float[Array, "*#A 1"] | None
    ) -> tuple[UInt8[Array, "*A K"], UInt8[Array, "*A S"]]:
        """Codes and scale bytes of float32 rows; S = K / block * scale_bytes."""

    @abc.abstractmethod
    def steps(
        self, scales: UInt8[Array, "*A S"], global_: Float[Array, "*#A 1"] | None
    ) -> Float[Array, "*A N"]:
        """The float32 step of each span of values, N = K / span; NaN where the scale is NaN."""

    def row_global(self, x: Float[Array, "*A K"]) -> Float[Array, "*A 1"] | None:
        """The global scale that each row has for itself."""
        return self.global_scale(largest(x, axis=-1, keepdims=True))

    def spread(self, per_span: Float[Array, "*A N"]) -> Float[Array, "*A K"]:
        """Repeats one number per span to its values."""
        return jnp.repeat(per_span, self.span, axis=-1)

    def round_rows(
        self,
        x: Float[Array, "*A K"],
        scales: UInt8[Array, "*A S"],
        global_: Float[Array, "*#A 1"] | None,
    ) -> UInt8[Array, "*A K"]:
        """The codes that this format gives float32 rows under given scale bytes.

        The second half of `quantize_rows`, which is to be used wherever rows are rounded on
        recorded scales: some formats and conventions do not round x / step to the nearest.
        """
        return self.element.round_nearest(x, self.spread(self.steps(scales, global_)))

    def decode_scale(self, global_: Float[Array, "*A"]) -> Float[Array, "*A"]:
        """The factor that values carry for a global scale; not it itself where that one encodes."""
        return global_

    def dequantize_rows(
        self,
        codes: UInt8[Array, "*A K"],
        scales: UInt8[Array, "*A S"],
        global_: Float[Array, "*#A 1"] | None,
    ) -> Float[Array, "*A K"]:
        """float32 values fl(element(code) * step)."""
        return self.element.decode(codes) * self.spread(self.steps(scales, global_))

    def block_amax(self, x: Float[Array, "*A K"]) -> Float[Array, "*A N"]:
        """max|x| of each block; NaN if the block holds one."""
        require(
            x.shape[-1] % self.block == 0,
            f"{self.name}: last axis of x",
            x.shape[-1],
            f"a multiple of {self.block}",
            "pad the axis with zeros: `Format.pad`, or `quantize`, which does",
        )
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // self.block, self.block)
        return largest(blocks, axis=-1)

    def pack_codes(self, codes: UInt8[Array, "*A K"]) -> UInt8[Array, "*A P"]:
        """Two 4-bit codes a byte, low nibble = even index (odd widths get a 0); 8-bit as is."""
        if self.element.BITS == 8:
            return codes
        odd = codes.shape[-1] % 2
        return e2m1.pack(jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)]) if odd else codes)

    def unpack_codes(self, packed: UInt8[Array, "*A P"]) -> UInt8[Array, "*A K"]:
        """Inverse of `pack_codes`, an even width."""
        return packed if self.element.BITS == 8 else e2m1.unpack(packed)

    def padded(self, length: int) -> int:
        """The next whole number of blocks."""
        return -(-length // self.block) * self.block

    def pad(self, rows: Array) -> Array:
        """Rows with zeros added up to whole blocks; zeros change no scale and get code 0."""
        extra = self.padded(rows.shape[-1]) - rows.shape[-1]
        return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, extra)]) if extra else rows


def largest(
    x: Float[Array, "..."], axis: int | Sequence[int] | None = None, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """max|x|, NaN if there is one: use it wherever a maximum magnitude sets a scale.

    XLA:CPU's float maximum over an axis drops NaN for some shapes. The bits of magnitudes are
    ordered as integers, NaN above Inf above all, and that maximum is the same on every backend.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    top = jnp.max(bits, axis=axis, keepdims=keepdims, initial=0)  # of nothing: 0
    return jax.lax.bitcast_convert_type(top, jnp.float32)


def product(a: Array, b: Array) -> Array:
    """fl(a b), kept as it is: XLA reassociates products that hold a constant.

    w * (x * c) becomes x * (w * c) where w has fewer elements, which rounds differently. To be used
    where a product is a factor of another one.
    """
    return jax.lax.optimization_barrier(a * b)


def parity(codes: UInt8[Array, "*A"]) -> UInt8[Array, "*A"]:
    """The bit that alternates along the ordered codes: what compact guidance keeps."""
    return codes & 1


def in_dtype(value: Float[Array, "*A"], dtype: jax.typing.DTypeLike) -> Float[Array, "*A"]:
    """float32 values in `dtype`, rounded explicitly, since XLA:GPU may drop a cast.

    Whoever reads the result in float32 again (attention does) would get what was not rounded.
    """
    bits = jnp.finfo(dtype)
    if bits.bits == 16:
        value = jax.lax.reduce_precision(value, bits.nexp, bits.nmant)
    return value.astype(dtype)
