"""The device that kernels are traced for: the default one, or one that is only described.

Kernels check at trace time that the device can run what was asked for. Ahead-of-time compilation
has no device, so it names one: `with device.described("cuda", (10, 0)): jax.jit(f).lower(...)`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A platform, and for GPUs the compute capability."""

    platform: str  # "cpu" | "cuda" | "tpu" | ...
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.capability is None:
            return self.platform
        return f"{self.platform} of compute capability {self.capability[0]}.{self.capability[1]}"


_DESCRIBED = jax.make_user_context(default_value=None)  # programs are traced anew where it changes


@contextlib.contextmanager
def described(platform: str, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Within it, kernels are traced for this device."""
    with _DESCRIBED(Device(platform, capability)):
        yield


def current() -> Device:
    """The described device, or JAX's default one."""
    found = _DESCRIBED.value
    if isinstance(found, Device):
        return found
    chosen = jax.devices()[0]
    if chosen.platform != "gpu":
        return Device(chosen.platform)
    kind = chosen.client.platform_version.split()[0].lower()  # "cuda 13000" or "rocm ..."
    version = getattr(chosen, "compute_capability", None)
    if kind != "cuda" or version is None:
        return Device(kind)
    major, minor = str(version).split(".")
    return Device("cuda", (int(major), int(minor)))
