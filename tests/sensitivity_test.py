"""The probe on a tiny run: what it measures, chooses and prints fits together."""

import dataclasses
import pathlib

import pytest

from trace_jax import layer_choice, loop, overrides, sensitivity
from trace_jax.qat import plan as qat_plan

ROOT = pathlib.Path(__file__).parent.parent
TINY = overrides.load(ROOT / "configs/tiny_cpu.py")
MANTISSA = overrides.override(
    TINY, ["quant.guide=mantissa", "quant.guide_scale_bits=2", "quant.guide_global_bits=16"]
)
UNITS = [("expert_in", 0), ("expert_in", 1), ("kv", 0), ("kv", 1)]


def test_units_are_spelt_as_the_configuration_reads_them():
    text = sensitivity.spell([("kv", 1), ("expert_in", 2), ("expert_in", 0)])
    assert text == "expert_in=0,2 kv=1"
    sites = dict.fromkeys(("expert_in", "k", "v"), (0, 1, 2))
    want = {"expert_in": (0, 2), "k": (1,), "v": (1,)}
    assert layer_choice.choose(text, sites, 0, 3) == want


def test_the_cost_of_all_units_is_that_of_the_whole_record():
    spec = qat_plan.guidance_spec(MANTISSA.quant, MANTISSA.model)
    cost = sensitivity.costs(MANTISSA.model, MANTISSA.quant, spec)
    assert list(cost) == UNITS
    # 64 values: 8 bytes of bits, 4 blocks in whole bytes or 1 + a check, 2 of the global scale
    assert cost["expert_in", 0] == 8 + 2 + 2
    assert cost["kv", 0] == 2 * (4 + 2)  # two blocks: their bytes stay whole
    assert sum(cost.values()) == qat_plan.bytes_per_token(spec, MANTISSA.model)


@pytest.mark.slow
def test_the_probe_chooses_within_the_budget_and_says_how_to_train_with_it(tmp_path):
    loop.run(dataclasses.replace(TINY, steps=0, warm_start=None), tmp_path / "start", show=False)
    report = sensitivity.measure(MANTISSA, str(tmp_path / "start"), budget=36, tries=2)
    found = report.sensitivity
    assert list(found.benefit) == UNITS and report.undecoded == 0
    assert 0 < found.gap_all < found.gap_none
    assert report.choice.bytes == sum(report.cost[unit] for unit in report.choice.units) <= 36
    compact, half, everything, chosen = report.rows  # compact: 8 + 4 + 4, and K and V 2 (4 + 2)
    assert (compact.bytes, half.bytes) == (28, 24) and compact.gap == half.gap
    assert everything.gap == found.gap_all and chosen.gap == report.choice.gap
    text = sensitivity.describe(report, 36)
    assert f'--set "{report.setting}"' in text
    overrides.override(MANTISSA, [report.setting])  # is accepted


def test_a_start_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="a run directory with checkpoints"):
        sensitivity.measure(MANTISSA, str(tmp_path / "nothing"), budget=10)
