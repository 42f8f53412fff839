"""The least time that a kernel can take: bytes that must move, operations that must be done."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call must do at least: each input read once, each output written once."""

    read: int  # bytes
    written: int  # bytes
    operations: int  # 2 for a multiply-add
    kind: str = "bf16"  # which units do them: "f32" | "bf16" | "fp8" | "fp4"

    @property
    def bytes(self) -> int:
        """Both ways."""
        return self.read + self.written


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Peaks of one device: bytes a second from memory, dense operations a second by kind."""

    memory: float
    compute: dict[str, float]

    def bound(self, cost: Cost) -> tuple[float, str]:
        """Seconds, and what they are spent on: "memory" or "compute"."""
        moving = cost.bytes / self.memory
        computing = cost.operations / self.compute[cost.kind]
        return (moving, "memory") if moving >= computing else (computing, "compute")


# Peaks of the makers, dense (without sparsity). A kind that a device has no units for runs as the
# next wider one, after decoding. Sources: NVIDIA H200 and HGX B200 data sheets; Google Cloud TPU
# documentation, v6e and TPU7x. Vector float32 of TPUs is not published: 1/16 of BF16 is assumed.
CEILINGS = {
    "h200": Ceiling(4.8e12, {"f32": 67e12, "bf16": 989e12, "fp8": 1979e12, "fp4": 989e12}),
    "b200": Ceiling(7.7e12, {"f32": 75e12, "bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12}),
    "v6e": Ceiling(1.64e12, {"f32": 57e12, "bf16": 918e12, "fp8": 918e12, "fp4": 918e12}),
    "tpu7x": Ceiling(7.37e12, {"f32": 144e12, "bf16": 2307e12, "fp8": 4614e12, "fp4": 2307e12}),
}
