"""The front door's `logits` refuses what a gather would clamp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from trace_jax import overrides
from trace_jax.models import transformer

MODEL = overrides.load("tiny_cpu").model


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([[0, 99]], None),
        ([[0, 100]], r"logits: tokens_BT: got ids 0\.\.100, need 0\.\.99"),
        ([[-1, 3]], r"logits: tokens_BT: got ids -1\.\.3, need"),
    ],
)
def test_ids_without_an_embedding_are_refused(tokens, says):
    params = jax.eval_shape(lambda: transformer.init(MODEL, 100, jax.random.key(0)))
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), params)
    for kind in (jnp.asarray, np.asarray):
        array = kind(np.asarray(tokens, np.int32))
        if says is None:
            assert trace_jax.logits(MODEL, params, array).shape == (1, 2, 100)
        else:
            with pytest.raises(ValueError, match=says):
                trace_jax.logits(MODEL, params, array)


def test_under_a_transformation_nothing_is_checked():
    params = jax.eval_shape(lambda: transformer.init(MODEL, 100, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    shape = jax.eval_shape(lambda p, t: trace_jax.logits(MODEL, p, t), params, tokens).shape
    assert shape == (1, 3, 100)
