"""What one named case of an op offers to benchmarks, device checks and compile checks."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels.common.cost import Cost

Arrays = tuple[Any, ...]  # pytrees of arrays, the arguments of a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """One op on one named shape. All callables are pure and may be jitted."""

    op: str  # the folder's name
    case: str  # unique within the op
    impls: tuple[str, ...]  # that can run this case, "xla" first
    cost: Cost
    make: Callable[[int], Arrays]  # seed -> arguments
    run: Callable[[str], Callable[..., Any]]  # impl -> function of the arguments
    reference: Callable[..., Any]  # the specification (ref.py), function of the arguments
    # largest |difference| / (rms of the reference), leaf by leaf; 0: equal bit for bit
    tolerance: float
    baseline: Callable[..., Any] | None = None  # the same job in BF16 through XLA, or None
    baseline_make: Callable[[int], Arrays] | None = None  # its arguments; None: the same
    baseline_name: str = ""
    small: bool = False  # runs in a second on a CPU: for tests, and the dry run of gpu_check
