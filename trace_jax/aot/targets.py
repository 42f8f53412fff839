"""The accelerators that programs are compiled for on a host that has none of them.

A GPU is described to XLA by a target configuration, a TPU by the name of its topology. Only a
process that `aot/compile.py` started may call `topology`: the plug-ins must be on its path and
JAX_PLATFORMS must be "cpu" before JAX is imported.
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax

from trace_jax.checks import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA:GPU asks of a device when it compiles without one.

    Source: the values are those of OpenXLA's own descriptions, xla/backends/gpu/target_config/specs
    (h200.txtpb at 4336d12, b200.txtpb at 300ec95): read off devices by their driver. Limits a block
    and a multiprocessor are also in the CUDA programming guide, table "technical specifications per
    compute capability", 9.0 and 10.0.
    """

    device: str
    capability: tuple[int, int]
    multiprocessors: int
    bandwidth: int  # bytes per second
    l2_cache: int  # bytes
    clock_ghz: float
    memory: int  # bytes

    @property
    def config(self) -> str:
        """The text form of stream_executor.GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {self.multiprocessors} fpus_per_core: 128 clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.device}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A TPU generation by libtpu's name for it; it counts its devices along two or three axes."""

    generation: str
    default: tuple[int, ...]  # the smallest topology that libtpu describes


TARGETS: dict[str, Gpu | Tpu] = {
    "h200": Gpu(
        device="NVIDIA H200",
        capability=(9, 0),
        multiprocessors=132,
        bandwidth=4_800_000_000_000,
        l2_cache=52_428_800,
        clock_ghz=1.98,
        memory=151_397_597_184,
    ),
    "b200": Gpu(
        device="NVIDIA B200",
        capability=(10, 0),
        multiprocessors=148,
        bandwidth=7_672_320_000_000,
        l2_cache=132_644_864,
        clock_ghz=1.965,
        memory=191_514_411_008,
    ),
    "v6e": Tpu(generation="v6e", default=(2, 2)),
    "tpu7x": Tpu(generation="tpu7x", default=(2, 2, 1)),
}


def spec(name: str) -> Gpu | Tpu:
    """The description of a target by name. Raises: ValueError for an unknown one."""
    require(name in TARGETS, "aot: target", name, f"one of {list(TARGETS)}")
    return TARGETS[name]


def is_gpu(name: str) -> bool:
    """Whether a target is compiled by XLA:GPU."""
    return isinstance(spec(name), Gpu)


def platform(name: str) -> tuple[str, tuple[int, int] | None]:
    """What `pallas_kernels.common.device.described` takes: the platform, and a GPU's capability."""
    target = spec(name)
    return ("cuda", target.capability) if isinstance(target, Gpu) else ("tpu", None)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Described devices, none of which exists: good for shardings, not for arrays."""

    name: str
    shape: tuple[int, ...]  # as asked for: (partitions, hosts, devices a host), or a TPU's grid
    devices: tuple[Any, ...]

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Everything on the first device: for programs of one device."""
        return jax.sharding.SingleDeviceSharding(self.devices[0])


def device_for_kernels(name: str) -> contextlib.AbstractContextManager[None]:
    """Within it, JAX 0.11 and newer lower Pallas kernels for a GPU that is not there."""
    target = spec(name)
    if not isinstance(target, Gpu):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(
        device_kind=target.device, num_cores=target.multiprocessors, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def topology(name: str, devices: tuple[int, ...] | None = None) -> Topology:
    """Describes `devices` of a target to its compiler.

    Args:    name: one of `TARGETS`. devices: for GPUs (slices, hosts, GPUs a host), default one
             GPU; for TPUs the grid, such as (2, 2) for "v6e", default the smallest.
    Returns: a `Topology`; GPUs are in the order of hosts, then of devices in a host.
    Raises:  ValueError for an unknown target or a shape of the wrong rank; whatever the plug-in
             raises if it does not know the topology.
    """
    from jax.experimental import topologies  # reaches for the plug-ins when imported

    target = spec(name)
    shape = devices or ((1, 1, 1) if isinstance(target, Gpu) else target.default)
    rank = 3 if isinstance(target, Gpu) else len(target.default)
    need = f"{rank} positive numbers"
    require(len(shape) == rank and min(shape) >= 1, f"aot: devices of {name}", shape, need)
    text = "x".join(map(str, shape))
    if isinstance(target, Gpu):
        described = topologies.get_topology_desc(
            text, platform="cuda", target_config=target.config, topology=text
        )
    else:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.generation}:{text}"
        )
    found = tuple(described.devices)
    # a chip of some TPU generations is two devices
    assert len(found) % math.prod(shape) == 0, (name, shape, len(found))
    return Topology(name=name, shape=shape, devices=found)
