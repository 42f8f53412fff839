"""What float arithmetic a GPU kernel does, from its PTX.

A code must not depend on how a GPU approximates, flushes or contracts. Of float instructions only
these are allowed in a quantiser; each gives the IEEE result, so the codes are those of the CPU:

    abs neg setp selp mov ld st   move, compare or change the sign: exact
    mul.rn add.rn sub.rn          rounded to nearest; the explicit .rn keeps ptxas from making an
                                  fma of a product and a sum
    cvt.rn to bf16 or f16         rounded to nearest: the value in the compute dtype
    cvt that widens; cvt.r?i      exact; a rounding to whole numbers that is named
    min max                       exact

`div.full` (at most 2 ulp off) and `rcp.approx` (1) are harmless where an algorithm corrects what
it computes from the quotient: NVFP4's block scale and MXFP8's codes start from a guess, which is
then compared with its neighbours.
"""

import collections
import re

_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+[%\[{]", re.MULTILINE)
_FLOAT = re.compile(r"\.(f64|f32|f16|bf16|f16x2|bf16x2|e4m3x2|e5m2x2|e2m1x2)(?=\.|$)")
_EXACT = frozenset({"abs", "neg", "setp", "selp", "set", "mov", "min", "max", "copysign", "slct"})
_ROUNDED = frozenset({"mul", "add", "sub", "cvt"})
_MOVES = re.compile(r"^(ld|st|shfl|mov|prmt)\b")

Instructions = collections.Counter[str]


def float_instructions(ptx: str) -> Instructions:
    """Kinds of instructions that compute with floats, such as "mul.rn.f32", and how many."""
    found: Instructions = collections.Counter()
    for name in _INSTRUCTION.findall(ptx):
        if _FLOAT.search(name) and not _MOVES.match(name):
            found[name] += 1
    return found


def inexact(kinds: Instructions) -> Instructions:
    """Those of `float_instructions` whose result is not the one IEEE float32 asks for.

    Returns: approximations (`div.full`, `div.approx`, `rcp`, `ex2`, ...), fused multiply-adds,
             products and sums that ptxas may still fuse, and whatever flushes subnormals (`.ftz`).
    """
    return collections.Counter({name: n for name, n in kinds.items() if not _is_ieee(name)})


def _is_ieee(name: str) -> bool:
    opcode, *modifiers = name.split(".")
    if "ftz" in modifiers or "approx" in modifiers or "sat" in modifiers:
        return False
    if opcode == "div" or opcode == "sqrt":
        return "rn" in modifiers
    if opcode == "cvt":
        whole = bool({"rni", "rzi", "rmi", "rpi"} & set(modifiers))
        return "rn" in modifiers or whole or _widens(modifiers)
    return opcode in _EXACT or (opcode in _ROUNDED and "rn" in modifiers)


def _widens(modifiers: list[str]) -> bool:
    """cvt.<to>.<from> of two float types without a rounding: PTX allows it only if exact."""
    return len(modifiers) == 2 and all(_FLOAT.search(f".{m}") for m in modifiers)
