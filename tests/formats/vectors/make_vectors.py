"""Writes `peers.npz`: what other quantisers make of seeded inputs, for `peers_test.py`.

The packages need torch and are no dependency of this project; only their numbers are kept, with
the versions that made them. To run again (CPU, Python 3.11, about 2 GB):

    python3.11 -m venv /tmp/oracles && cd /tmp/oracles && . bin/activate
    pip install torch==2.13.0 numpy setuptools wheel torchao==0.18.0 compressed-tensors==0.20.0
    SKIP_CUDA_BUILD=1 pip install --no-build-isolation --no-deps fouroversix==1.0.5
    pip install --no-deps nvidia-modelopt==0.47.0 transformer-engine==2.20.2
    pip install requests omegaconf pulp scipy tqdm rich safetensors
    python <checkout>/tests/formats/vectors/make_vectors.py

TransformerEngine cannot be imported without its CUDA libraries, so its reference module is loaded
alone, with empty classes in place of what it imports.
"""

import importlib.metadata
import importlib.util
import pathlib
import sys
import types
import warnings

import numpy as np
import torch

warnings.filterwarnings("ignore")
HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = (
    "torch",
    "torchao",
    "compressed-tensors",
    "fouroversix",
    "nvidia-modelopt",
    "transformer-engine",
)
ROWS, WIDTH = 16, 128


def inputs() -> dict[str, np.ndarray]:
    """Four matrices: BF16 and float32 draws, many ties, and blocks of very different sizes."""
    rng = np.random.default_rng(20261201)
    normal = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    bf16 = torch.from_numpy(normal).bfloat16().float().numpy()
    heavy = rng.standard_t(2, size=(ROWS, WIDTH)).astype(np.float32)
    ties = (rng.integers(-28, 29, (ROWS, WIDTH)) / 4).astype(np.float32)
    ties[:, ::16] = np.float32(6)  # block scales of a round number: the ties are met
    sizes = np.float32(2.0) ** np.repeat(rng.integers(-24, 1, (ROWS, WIDTH // 32)), 32, axis=1)
    spread = (rng.normal(size=(ROWS, WIDTH)) * sizes).astype(np.float32)
    spread[0] = 0
    spread[1, :32] = 0
    spread[2, 32:64] *= np.float32(1e-6)
    spread[3, 5] = np.float32(40)
    return {"bf16": bf16, "heavy": heavy, "ties": ties, "spread": spread}


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy()


def torchao(x: torch.Tensor) -> dict[str, np.ndarray]:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    out = {}
    for name, dtype in (("mxfp4", torch.float4_e2m1fn_x2), ("mxfp8", torch.float8_e4m3fn)):
        for mode in ("FLOOR", "CEIL", "EVEN", "RCEIL"):
            scales, data = to_mx(x, dtype, 32, ScaleCalculationMode[mode])
            out[f"torchao.{name}.{mode}.scales"] = bits(scales)
            out[f"torchao.{name}.{mode}.codes"] = bits(data)
    scales, data = nvfp4_quantize(x, 16, x.abs().max() / 2688)
    return out | {"torchao.nvfp4.scales": bits(scales), "torchao.nvfp4.codes": bits(data)}


def compressed_tensors(x: torch.Tensor) -> dict[str, np.ndarray]:
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    out = {}
    for name, block, dtype in (("nvfp4", 16, torch.float8_e4m3fn), ("mxfp4", 32, torch.uint8)):
        args = QuantizationArgs(
            num_bits=4, type="float", strategy="group", group_size=block, scale_dtype=dtype
        )
        blocks = x.reshape(ROWS, -1, block)
        low, high = blocks.amin(-1), blocks.amax(-1)
        whole = generate_gparam(low.min(), high.max()) if name == "nvfp4" else None
        scales, _ = calculate_qparams(low, high, args, global_scale=whole)
        packed = quantize_and_pack_fp4(x, scales, global_scale=whole, group_size=block)
        if name == "nvfp4":
            out["compressed_tensors.nvfp4.global"] = whole.numpy()
            out["compressed_tensors.nvfp4.scales"] = bits(scales.to(dtype))
        else:
            powers = torch.log2(scales.float()) + 127
            out["compressed_tensors.mxfp4.scales"] = powers.to(torch.uint8).numpy()
        out[f"compressed_tensors.{name}.codes"] = packed.numpy()
    return out


def fouroversix(x: torch.Tensor) -> dict[str, np.ndarray]:
    from fouroversix.quantize.pytorch import reference
    from fouroversix.utils import DataType, ScaleRule

    out = {}
    cases = [(rule, False) for rule in ("static_6", "static_4", "mse", "mae", "abs_max")]
    for rule, tile in [*cases, ("mse", True)]:
        codes, scales, _ = reference.quantize_to_fp4(
            x,
            scale_rule=ScaleRule(rule),
            block_scale_2d=tile,
            use_blackwell_scale_layout=False,
        )
        name = f"fouroversix.{rule}{'.16x16' if tile else ''}"
        out[f"{name}.scales"] = bits(scales).reshape(ROWS, -1)
        out[f"{name}.codes"] = codes.numpy()
    codes, scales, _ = reference.quantize_to_fp4(
        x,
        fp4_format=DataType.mxfp4,
        scale_rule=ScaleRule("static_6"),
        use_blackwell_scale_layout=False,
    )
    out["fouroversix.mxfp4.scales"] = bits(scales).reshape(ROWS, -1)
    out["fouroversix.mxfp4.codes"] = codes.numpy()
    return out


def modelopt(x: torch.Tensor) -> dict[str, np.ndarray]:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    data, scales, whole = NVFP4QTensor.quantize(x.clone(), 16)
    return {
        "modelopt.nvfp4.codes": data._quantized_data.numpy(),
        "modelopt.nvfp4.scales": bits(scales),
        "modelopt.nvfp4.global": whole.reshape(1).numpy(),
    }


def transformer_engine(x: torch.Tensor) -> dict[str, np.ndarray]:
    files = importlib.metadata.files("transformer-engine") or []
    file = next(f.locate() for f in files if f.name == "reference_nvfp4.py")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules.setdefault(name, types.ModuleType(name))
    recipes = types.ModuleType("transformer_engine.pytorch.custom_recipes")
    recipes.gemm = types.SimpleNamespace(
        MMParams=object, GEMMType=types.SimpleNamespace(FPROP=0, DGRAD=1, WGRAD=2)
    )
    recipes.reference_utils = types.SimpleNamespace(Fp4Formats=object)
    tensors = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    tensors.QuantizedTensorStorage = tensors.Quantizer = type("Empty", (), {})
    sys.modules[recipes.__name__], sys.modules[tensors.__name__] = recipes, tensors
    spec = importlib.util.spec_from_file_location("reference_nvfp4", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_nvfp4"] = module
    spec.loader.exec_module(module)
    out = {}
    for tile in (1, 16):
        codes, scales = module.NVFP4QuantizerRef._quantize_blockwise_reference(
            x, x.abs().max(), 16, tile, pow_2_scales=False, eps=0.0
        )
        out[f"te.nvfp4.{tile}x16.codes"] = codes.numpy()
        out[f"te.nvfp4.{tile}x16.scales"] = bits(scales)
    return out


def main() -> None:
    torch.set_num_threads(1)
    peers = (torchao, compressed_tensors, fouroversix, modelopt, transformer_engine)
    arrays = {"versions": np.array([f"{p}=={importlib.metadata.version(p)}" for p in PACKAGES])}
    for name, x in inputs().items():
        arrays[f"{name}/x"] = x
        for peer in peers:
            found = peer(torch.from_numpy(x.copy()))
            arrays |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez_compressed(HERE / "peers.npz", **arrays)
    print(f"{len(arrays)} arrays, {(HERE / 'peers.npz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
