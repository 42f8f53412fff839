"""Public faults of FP4 training and serving stacks, and the tests that keep them out of this one.

Each line is a *kind* of fault, found in the issue trackers of ModelOpt, vLLM, SGLang, verl and
others. The table is checked: a test that is renamed or removed must be renamed here.
"""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import formats

TESTS = pathlib.Path(__file__).parent
FAULTS = {
    "F1 the scale of a zero block becomes NaN when it is cast": (
        "formats/nvfp4_conventions_test.py::"
        "test_a_zero_block_has_the_scale_that_the_library_gives_it_and_no_byte_is_nan",
        "formats/nvfp4_test.py::test_finite_input_never_gets_a_nan_or_negative_scale",
        "formats/properties_test.py::test_a_block_with_nan_or_inf_decodes_to_nan_and_hides_nothing",
    ),
    "F2 all-zero activations give an infinite scale": (
        "formats/nvfp4_test.py::test_zero_rows_have_a_scale_of_zero_and_a_global_scale_of_one",
    ),
    "F3 gate and up have different global scales, and one is used for both": (
        "qat/weights_test.py::test_gate_and_up_share_one_global_scale",
        "qat/transform_test.py::test_gate_and_up_share_one_global_scale_where_the_rule_says_so",
        "formats/qarray_test.py::test_gate_and_up_stored_apart_have_what_the_fused_matrix_has",
    ),
    "F4 weights that share a scale are found by names, and part when a name is not known": (
        "qat/recipe_test.py::test_what_does_not_fit_the_model_is_an_error",
    ),
    "F5 widths that are no whole number of blocks": (
        "formats/properties_test.py::test_odd_widths_are_padded_with_zeros_that_leave_no_trace",
        "qat/sites_test.py::"
        "test_rows_of_any_width_are_padded_inside_and_counted_without_the_padding",
        "qat/policy_recipe_test.py::test_trainer_and_sampler_quantise_the_same",
    ),
    "F6 the largest magnitude is taken per shard, so codes depend on the layout": (
        "formats/properties_test.py::"
        "test_a_2x2_mesh_gives_the_bits_of_one_device_even_where_shards_cut_blocks",
        "qat/transform_test.py::test_codes_do_not_depend_on_the_layout_over_devices",
    ),
    "F7 trainer and rollout quantise weights of two precisions": (
        "qat/weights_test.py::test_the_source_is_the_bf16_cast_of_the_master",
    ),
    "F8 Four Over Six picks another scale on near ties": (
        "formats/nvfp4_adaptive_test.py::"
        "test_an_equal_error_keeps_six_and_the_least_difference_decides",
        "formats/nvfp4_adaptive_test.py::"
        "test_the_choice_is_the_smaller_error_in_integers_and_in_real_numbers",
        "formats/properties_test.py::test_eager_jit_vmap_scan_and_grad_agree_to_the_bit",
    ),
    "F9 E8M0 thresholds are off or rounded twice": (
        "formats/e8m0_test.py::test_the_byte_is_the_one_of_the_rule_in_exact_arithmetic",
    ),
    "F10 a float64 source is rounded twice on its way to FP8": (
        "formats/properties_test.py::test_a_float64_source_is_rounded_to_float32_first",
    ),
    "F11 the order of nibbles": (
        "formats/e2m1_test.py::test_pack_puts_the_even_index_in_the_low_nibble",
    ),
    "F12 a small block underflows its scale and vanishes": (
        "formats/qarray_test.py::test_a_block_far_below_the_tensor_maximum_flattens_and_says_so",
        "guidance/health_test.py::test_scale_counts_count_the_valid_rows_of_each_format",
    ),
    "F13 a kernel gives garbage for some numbers of rows": (
        "faults_test.py::test_a_row_does_not_depend_on_how_many_rows_there_are",
    ),
    "F15 an exclusion also matches a longer name": (
        "qat/recipe_test.py::test_gate_is_excluded_and_gate_up_proj_is_not",
        "qat/policy_recipe_test.py::test_sides_that_differ_are_refused_by_name",
    ),
    "F16 QAT looks enabled and is not": (
        "qat/policy_recipe_test.py::test_a_site_without_codes_fails_the_check_by_name",
        "rollout/seam_test.py::test_sampler_and_trainer_agree_in_float32",
    ),
    "F17 gradients are all zero, and only a message says so": (
        "guidance/health_test.py::test_each_fault_raises_its_own_alarm",
    ),
    "F18 the two sides use different formats": (
        "qat/policy_recipe_test.py::test_sides_that_differ_are_refused_by_name",
        "policy_test.py::test_guidance_that_is_not_what_this_run_records_is_refused",
    ),
    "the compiler deletes the quantisation": (
        "aot/step_test.py::test_guided_training_step_keeps_all_of_its_quantisation",
        "aot/step_test.py::test_the_check_sees_xla_gpu_delete_naive_fake_quantisation",
    ),
}


def names_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_known_fault_has_tests_that_exist(fault):
    for node in FAULTS[fault]:
        file, _, name = node.partition("::")
        assert name in names_of(file), f"{node} is gone: what keeps {fault!r} out now?"


@pytest.mark.parametrize("name", ["nvfp4", "4over6", "mxfp4", "mxfp8", "hif4"])
def test_a_row_does_not_depend_on_how_many_rows_there_are(name):
    """F13: 1, 7, 17 and 129 rows, each alone with the same numbers as among all."""
    x = jax.random.normal(jax.random.key(0), (129, 96), jnp.float32)
    quantize = jax.jit(lambda x: formats.quantize(x, name, global_axes="row"))
    every = quantize(x)
    for count in (1, 7, 17):
        some = quantize(x[:count])
        np.testing.assert_array_equal(some.codes, every.codes[:count])
        scales = [np.asarray(q.scales).view(np.uint8) for q in (some, every)]
        np.testing.assert_array_equal(scales[0], scales[1][:count])
