"""The shared memory that kernels are launched with, from what XLA and Mosaic dump.

Triton and Mosaic kernels take theirs at launch ("dynamic"), so neither PTX nor ptxas knows it. XLA
lists its launches in `*.thunk_sequence.txt`, Triton's among them; Mosaic's are calls in the host
code that it dumps beside each kernel's PTX.
"""

import pathlib
import re

_THUNK = re.compile(r"(\S+) grid: .* shared_memory: (\d+) bytes")
# grid, cluster and block, three numbers each, stand before it; the second name is newer JAX's
_LAUNCH = re.compile(
    r"call void @mosaic_gpu_(?:launch_kernel|build_kernel_spec)"
    r"\(ptr [^,]+(?:, i32 [^,]+){9}, i32 (\d+),"
)
_ENTRY = re.compile(r"\.entry ([\w$.]+)\(")


def shared_memory(xla: pathlib.Path, mosaic: pathlib.Path) -> dict[str, int]:
    """Bytes of dynamic shared memory by kernel; the most, where several have one name."""
    found: dict[str, int] = {}
    for file in xla.glob("*thunk_sequence.txt"):
        for name, size in _THUNK.findall(file.read_text()):
            found[name] = max(found.get(name, 0), int(size))
    for file in mosaic.glob("*.ll"):
        launch = _LAUNCH.search(file.read_text())
        entry = _ENTRY.search(file.with_suffix(".ptx").read_text())
        if launch and entry:
            found[entry[1]] = max(found.get(entry[1], 0), int(launch[1]))
    return found
