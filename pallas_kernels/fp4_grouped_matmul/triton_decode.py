"""E2M1 bytes to BF16 in the registers of a GPU, for `triton`.

Decoded value by value (`common.tiles`) each takes some twenty instructions, and a Hopper GPU then
computes longer than its memory takes. `ptx` decodes four bytes at once by byte permutations, whose
operands serve as tables of the high and the low bytes of the eight magnitudes: four instructions a
value. Interpreted kernels take the same values from `common.tiles`; a test runs the text,
instruction by instruction, on all bytes.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_kernels.common import tiles
from trace_jax.formats import Format


def ptx(plane: int) -> str:
    """$0 $1 = BF16 of the low (0) or high (1) nibbles of four bytes $2, times their scales $3 $4.

    A selector of `prmt` is a nibble of which the fourth bit must be 0: `pick` has the magnitudes of
    two bytes, low before high nibble. Their signs come from the bytes themselves.
    """
    text = ".reg .b32 pick, high, low, value, sign;\nand.b32 pick, $2, 0x7777;\n"
    for pair, place in enumerate(("0x1404", "0x3424")):  # two bytes at bits 8 and 24
        if pair:
            text += "shr.u32 pick, $2, 16;\nand.b32 pick, pick, 0x7777;\n"
        text += "prmt.b32 high, 0x3F3F3F00, 0x40404040, pick;\n"
        text += "prmt.b32 low, 0xC0800000, 0xC0804000, pick;\n"
        text += f"prmt.b32 value, low, high, {('0x6240', '0x7351')[plane]};\n"
        text += f"prmt.b32 sign, $2, 0, {place};\n"
        text += "" if plane else "shl.b32 sign, sign, 4;\n"
        text += "lop3.b32 value, sign, 0x80008000, value, 0xEA;\n"  # (sign & mask) | value
        text += f"mul.rn.bf16x2 ${pair}, value, ${3 + pair};\n"
    return "{\n" + text + "}"


# four E4M3 bytes $2 as float16, which holds them all; BF16 from E4M3 exists on later GPUs only
E4M3_PTX = """{
.reg .b16 first, second;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}"""


def scales(byte, format: Format, *, interpret: bool):
    """BF16 of a format's scale bytes; NaN as `common.tiles` has it."""
    if interpret or format.name != "nvfp4":
        return tiles.scale_value(byte.astype(jnp.int32), format).astype(jnp.bfloat16)
    [half] = plt.elementwise_inline_asm(
        E4M3_PTX,
        args=[byte],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(byte.shape, jnp.float16)],
    )
    return half.astype(jnp.float32).astype(jnp.bfloat16)


def planes(codes, scales, *, interpret: bool):
    """Values of the low and of the high nibbles; `scales` is BF16, one for each byte."""
    if interpret:
        wide, scales = codes.astype(jnp.int32), scales.astype(jnp.float32)
        values = (tiles.e2m1_value(nibble) * scales for nibble in (wide & 15, wide >> 4))
        return [value.astype(jnp.bfloat16) for value in values]
    how = {
        "args": [codes, scales],
        "constraints": "=r,=r,r,r,r",
        "pack": 4,
        "result_shape_dtypes": [jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    }
    return [plt.elementwise_inline_asm(ptx(plane), **how)[0] for plane in range(2)]
