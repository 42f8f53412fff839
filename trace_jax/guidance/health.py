"""Counts of what can go wrong with block scales, from the rollout's own records."""

from collections.abc import Sequence

import jax
import numpy as np

from trace_jax.guidance.record import Guidance

_LARGEST, _NAN = 0x7E, 0x7F  # E4M3 bytes of 448 and NaN


def scale_health(records: Sequence[Guidance]) -> dict[str, float]:
    """Fractions of recorded blocks with a zero scale, a NaN scale, or a saturated one.

    A block is saturated if its scale is 448 although no global scale of its own row stretches the
    range: then larger values were clipped. Where each row has a global scale, 448 is normal.
    """
    blocks = zeros = nans = saturated = free = 0
    for record in records:
        for site in record.sites.values():
            scales = np.asarray(site.scales)
            blocks += scales.size
            zeros += int(np.count_nonzero((scales & 0x7F) == 0))
            nans += int(np.count_nonzero((scales & 0x7F) == _NAN))
            if site.global_scale is None:
                free += scales.size
                saturated += int(np.count_nonzero(scales == _LARGEST))
    return {
        "quant/zero_scales": zeros / max(blocks, 1),
        "quant/nan_scales": nans / max(blocks, 1),
        "quant/saturated_blocks": saturated / max(free, 1),
    }


def record_bytes(records: Sequence[Guidance]) -> int:
    """Bytes of the arrays of the records, as they travel."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(list(records)))
