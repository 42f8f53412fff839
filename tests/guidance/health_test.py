"""Oracle: blocks counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import formats
from trace_jax.guidance import health
from trace_jax.guidance.record import Guidance, GuidanceSpec, SiteRecord

ONE = "nvfp4:global_rule=one"
WELL = {
    "quant/coded/k": 0.9,
    "quant/nan_scales": 0.0,
    "quant/zero_scales": 1.0,
    "quant/nonfinite_blocks/k": 0.0,
    "quant/saturated_blocks": 0.001,
    "quant/code_flip_rate/k": 0.5,
    "guide/agreement": 0.9999,
    "guide/agreement/k": 0.91,
    "guide/undecoded/k": 1e-4,
    "update/grad_norm": 0.1,
    "update/skipped": 0.0,
    "reward/mean": 0.0,
}


def guidance(k_scales, expert_scales, expert_global, **spec):
    def site(scales, global_scale):
        scales = np.array(scales, np.uint8).reshape(1, -1, 2)
        bits = np.zeros((1, scales.shape[1], 16), np.uint8)
        return SiteRecord(bits=bits, scales=scales, global_scale=global_scale)

    rows = np.ones((1, len(expert_scales) // 2, 1), np.float32) if expert_global else None
    sites = {"k": site(k_scales, None), "expert_in": site(expert_scales, rows)}
    texts = (ONE, "nvfp4" if expert_global else ONE)
    made = {"kind": "codes", "layers": ((0,), (0,)), "sites": ("k", "expert_in"), "formats": texts}
    return Guidance(sites=sites, spec=GuidanceSpec(**made | spec))


@pytest.mark.parametrize(
    ("name", "scales", "want"),
    [
        (ONE, [[0, 0x7E], [0x7F, 3], [0, 0]], (1, 1, 1, 4)),
        ("nvfp4", [[0, 0x7E], [0x7F, 3], [0, 0]], (1, 1, 0, 0)),
        ("mxfp4", [[0, 0xFE], [0xFF, 0x7F], [0, 0]], (1, 1, 1, 4)),
        ("hif4", [[0xFE, 0, 0xFF, 0], [0xFF, 1, 2, 3], [9, 9, 9, 9]], (0, 1, 1, 2)),
    ],
)
def test_scale_counts_count_the_valid_rows_of_each_format(name, scales, want):
    """(zero, NaN, saturated, blocks that can saturate); the third row is padding."""
    valid = jnp.array([True, True, False])
    count = jax.jit(health.scale_counts, static_argnums=2)
    got = count(jnp.asarray(scales, jnp.uint8), valid, formats.get(name))
    names = ("zero_scales", "nan_scales", "saturated_blocks")
    assert tuple(float(got[name].total) for name in names) == want[:3]
    assert float(got["saturated_blocks"].count) == want[3]
    assert float(got["nan_scales"].count) == (2 if name == "hif4" else 4)


def test_no_records_have_no_bytes():
    assert health.record_bytes([]) == 0


def test_record_bytes_sum_every_array():
    record = guidance([1, 2, 3, 4], [5, 6], expert_global=True)
    k, expert_in = (32 + 4), (16 + 2 + 4)
    assert health.record_bytes([record, record]) == 2 * (k + expert_in)


def test_no_alarm_in_a_run_that_is_well():
    assert health.alarms(WELL) == [] and health.alarms({}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant/coded/expert_in", 0.0),
        ("quant/coded/layers/3/moe/expert_in", 0.0),
        ("quant/nan_scales", 1e-9),
        ("quant/nonfinite_blocks/v", 1e-9),
        ("quant/saturated_blocks", 0.02),
        ("guide/agreement", 0.8),
        ("guide/agreement/v", 0.5),
        ("guide/bit_agreement", float("nan")),
        ("guide/undecoded/expert_in", 0.01),
        ("update/grad_norm", 0.0),
        ("update/skipped", 1.0),
    ],
)
def test_each_fault_raises_its_own_alarm(key, value):
    (alarm,) = health.alarms(WELL | {key: value})
    assert alarm.startswith(f"{key}: got ") and ", need " in alarm and "Fix: " in alarm


def test_a_gradient_of_zero_is_right_if_no_group_has_anything_to_learn_from():
    metrics = WELL | {"update/grad_norm": 0.0, "reward/zero_variance_groups": 5.0}
    metrics["reward/small_groups"] = 3.0
    assert health.alarms(metrics | {"reward/groups": 8.0}) == []
    assert len(health.alarms(metrics | {"reward/groups": 9.0})) == 1
