"""Choice of an implementation: by name, without a default and without a fallback.

xla                    plain XLA, everywhere; what CPUs use
triton                 Pallas through Triton: Hopper and Blackwell GPUs
mosaic_gpu             Pallas through Mosaic: Blackwell GPUs (block-scaled tensor cores)
mosaic_tpu             Pallas through Mosaic: TPUs
triton_interpret, mosaic_tpu_interpret
                       the same kernels, run step by step by XLA on any device: for tests
"""

from collections.abc import Mapping

from pallas_kernels.common import device
from trace_jax.checks import message, require

IMPLS = ("xla", "triton", "mosaic_gpu", "mosaic_tpu", "triton_interpret", "mosaic_tpu_interpret")
_HOPPER, _BLACKWELL = 9, 10


def choose(op: str, impl: str, has: Mapping[str, str | None]) -> str:
    """Checks that `op` can run as `impl` on the current device and returns `impl`.

    Args:   has: for each implementation but the interpreted ones None, or why this op (or this
            call of it) cannot be run so. One that is not named does not exist.
    Raises: ValueError for an unknown name; NotImplementedError, with the reason, for one that this
            op does not have or that the device cannot run.
    """
    require(impl in IMPLS, f"{op}: impl", repr(impl), f"one of {list(IMPLS)}")
    base = impl.removesuffix("_interpret")
    able = [name for name, why in has.items() if why is None]
    reason = has.get(base, "there is no such kernel of this op")
    if reason is not None:
        raise NotImplementedError(
            message(f"{op}: impl", f"{impl} ({reason})", f"one of {able}", "choose another impl")
        )
    if impl != base or base == "xla":
        return impl
    here = device.current()
    need = _unmet(base, here)
    if need is not None:
        fix = f"impl='xla' here, or impl='{base}_interpret' to test the kernel"
        if base == "mosaic_gpu":
            fix = "impl='triton' or impl='xla'"
        raise NotImplementedError(message(f"{op}: impl {impl}", str(here), need, fix))
    return impl


def interpreted(impl: str) -> bool:
    """Whether a kernel is to be run step by step."""
    return impl.endswith("_interpret")


def _unmet(impl: str, here: device.Device) -> str | None:
    major = here.capability[0] if here.capability else 0
    if impl == "triton":
        return None if major >= _HOPPER else "an NVIDIA GPU of compute capability 9.0 or higher"
    if impl == "mosaic_gpu":
        # its instructions exist on 10.0 and 10.3 alone; compiled for another they end the process
        return None if major == _BLACKWELL else "an NVIDIA GPU of compute capability 10.0 or 10.3"
    return None if here.platform == "tpu" else "a TPU"
