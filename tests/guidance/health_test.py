"""Oracle: blocks counted by hand."""

import numpy as np
import pytest

from trace_jax.guidance import health
from trace_jax.guidance.record import Guidance, GuidanceSpec, SiteRecord

SPEC = GuidanceSpec(kind="codes", layers=(0,), sites=("k", "expert_in"))


def guidance(k_scales, expert_scales, expert_global):
    def site(scales, global_scale):
        scales = np.array(scales, np.uint8).reshape(1, -1, 2)
        bits = np.zeros((1, scales.shape[1], 16), np.uint8)
        return SiteRecord(bits=bits, scales=scales, global_scale=global_scale)

    rows = np.ones((1, len(expert_scales) // 2, 1), np.float32) if expert_global else None
    sites = {"k": site(k_scales, None), "expert_in": site(expert_scales, rows)}
    return Guidance(sites=sites, spec=SPEC)


def test_scale_health_counts_zero_nan_and_saturated_blocks():
    one = guidance([0, 1, 0x7E, 0x7F], [0, 0, 0x7E, 0x7E], expert_global=True)
    two = guidance([5, 6], [7, 0x7F], expert_global=True)
    assert health.scale_health([one, two]) == {
        "quant/zero_scales": pytest.approx(3 / 12),
        "quant/nan_scales": pytest.approx(2 / 12),
        # 448 is what a row's own global scale leads to: only K's blocks can be called saturated
        "quant/saturated_blocks": pytest.approx(1 / 6),
    }


def test_a_site_without_global_scale_can_saturate():
    record = guidance([1, 2], [0x7E, 3], expert_global=False)
    assert health.scale_health([record])["quant/saturated_blocks"] == pytest.approx(1 / 4)


def test_no_records_are_healthy():
    assert set(health.scale_health([]).values()) == {0.0}
    assert health.record_bytes([]) == 0


def test_record_bytes_sum_every_array():
    record = guidance([1, 2, 3, 4], [5, 6], expert_global=True)
    k, expert_in = (32 + 4), (16 + 2 + 4)
    assert health.record_bytes([record, record]) == 2 * (k + expert_in)
