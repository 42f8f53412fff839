"""The name table: every tensor on disk and every element of every parameter, exactly once."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.hf import checkpoints
from trace_jax.hf import config_json, names
from trace_jax.models import transformer

KINDS = tuple(checkpoints.CONFIGS)


@pytest.fixture(params=KINDS, scope="module")
def checkpoint(request, tmp_path_factory):
    return request.param, checkpoints.write(request.param, tmp_path_factory.mktemp("checkpoint"))


def model_at(path):
    return config_json.model_of(config_json.read(path))


def shapes_of(tensors):
    return {name: tuple(value.shape) for name, value in tensors.items()}


def variants(kind, found):
    """What is on disk in each layout."""
    yield "each", "model.", found
    if kind in checkpoints.EXPERTS:
        for transposed in (False, True):
            fused = checkpoints.fuse(transposed)(found)
            yield "fused_transposed" if transposed else "fused", "model.", fused


def test_table_names_every_tensor_on_disk_once_with_its_shape(checkpoint):
    kind, path = checkpoint
    model = model_at(path)
    for experts, prefix, found in variants(kind, checkpoints.tensors(path)):
        layout = names.layout_of(model, shapes_of(found))
        assert layout == names.Layout(experts=experts, prefix=prefix)
        rows = names.table(model, layout)
        assert len({row.name for row in rows}) == len(rows)
        assert {row.name: row.shape for row in rows} == shapes_of(found)


def test_table_finds_the_text_model_of_a_multimodal_checkpoint(tmp_path):
    path = checkpoints.write("qwen3_5_moe", tmp_path)
    alone = model_at(path)
    checkpoints.multimodal(path)
    found = shapes_of(checkpoints.tensors(path))
    assert model_at(path) == alone
    layout = names.layout_of(alone, found)
    assert layout == names.Layout(prefix="model.language_model.")
    wanted = {row.name for row in names.table(alone, layout)}
    rest = {name: names.left_out(name) for name in found if name not in wanted}
    assert wanted <= set(found)
    assert rest == {
        "model.visual.blocks.0.attn.qkv.weight": "vision tower",
        "mtp.fc.weight": "multi-token prediction",
    }


@pytest.mark.parametrize("experts", names.EXPERTS)
def test_places_fill_every_element_of_every_parameter_once(checkpoint, experts):
    _, path = checkpoint
    model = model_at(path)
    shapes = jax.eval_shape(lambda key: transformer.init(model, 1, key), jax.random.key(0))
    counts = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.int32), shapes)
    for row in names.table(model, names.Layout(experts=experts)):
        parts = row.split(np.ones(row.shape, np.int32))
        assert len(parts) == len(row.places)
        for place, part in zip(row.places, parts, strict=True):
            leaf = counts
            for key in place.path:
                leaf = leaf[key]
            assert leaf[place.index].shape == part.shape, row.name
            leaf[place.index] += part
    for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(counts):
        assert (leaf == 1).all(), leaf_path


def test_join_is_the_inverse_of_split(checkpoint):
    _, path = checkpoint
    for row in names.table(model_at(path)):
        x = np.arange(np.prod(row.shape)).reshape(row.shape)
        np.testing.assert_array_equal(row.join(*row.split(x)), x)
        if row.plain:  # elements keep their order
            np.testing.assert_array_equal(row.split(x)[0].reshape(-1), x.reshape(-1))


def test_layout_is_told_by_the_matrix_that_is_not_square(tmp_path):
    # 2 F == D: gate_up is square in both layouts, down is not
    model = model_at(checkpoints.write("qwen3_moe", tmp_path))
    for ffn in (model.width // 2, model.width):
        square = dataclasses.replace(model, expert_ffn=ffn)
        for experts in names.EXPERTS:
            layout = names.Layout(experts=experts)
            shapes = {row.name: row.shape for row in names.table(square, layout)}
            assert names.layout_of(square, shapes) == layout


def test_shapes_of_neither_layout_are_told_of_the_usual_one(tmp_path):
    """An error then lists shapes as transformers writes them; each vote counts once."""
    model = model_at(checkpoints.write("qwen3_moe", tmp_path))
    at = "model.layers.0.mlp.experts"
    other = {f"{at}.gate_up_proj": (1, 2, 3), f"{at}.down_proj": (3, 2, 1)}
    assert names.layout_of(model, other) == names.Layout(experts="fused")
    E, F, D = model.experts, model.expert_ffn, model.width
    one_of_each = {f"{at}.gate_up_proj": (E, D, 2 * F), f"{at}.down_proj": (E, D, F)}
    assert names.layout_of(model, one_of_each) == names.Layout(experts="fused")
