import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import config as cfg
from trace_jax import weight_sync
from trace_jax.models import transformer

MODEL = cfg.Model(width=32, layers=3, heads=2, kv_heads=1, head_dim=16, experts=4, expert_ffn=48)
KEPT = cfg.Quant(keep_first=1)  # the first layer stays in high precision
VOCAB = 16


def random_params(model, seed):
    """Of the shapes that `init` gives, without compiling it."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init(model, VOCAB, jax.random.key(0)))
    draw = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)  # noqa: E731
    return jax.tree.map(draw, shapes)


@pytest.fixture(scope="module")
def params():
    return random_params(MODEL, 0)


@pytest.fixture(scope="module")
def sync():
    return weight_sync.make_sync(MODEL, KEPT)


def test_experts_are_packed_two_codes_a_byte_and_the_rest_is_cast(params, sync):
    weights = sync(params, 7)
    plain, packed = weights.params["segments"]
    E, D, F = MODEL.experts, MODEL.width, MODEL.expert_ffn
    assert plain["moe"]["gate_up"].shape == (1, E, 2 * F, D)
    assert plain["moe"]["gate_up"].dtype == jnp.bfloat16
    gate_up, down = packed["moe"]["gate_up"], packed["moe"]["down"]
    for weight, rows, columns in ((gate_up, 2 * F, D), (down, D, F)):
        shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in weight.items()}
        assert shapes == {
            "codes": ((2, E, rows, columns // 2), jnp.uint8),
            "scales": ((2, E, rows, columns // 16), jnp.uint8),
            "global": ((2, E, 1, 1), jnp.float32),
        }
    assert packed["attention"]["q"].dtype == weights.params["embed"].dtype == jnp.bfloat16
    for leaf in (packed["moe"]["router"], packed["ffn_norm"], weights.params["final_norm"]):
        assert leaf.dtype == jnp.float32
    np.testing.assert_array_equal(packed["moe"]["router"], params["layers"]["moe"]["router"][1:])
    cast = params["layers"]["attention"]["q"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(plain["attention"]["q"], cast[:1])
    np.testing.assert_array_equal(packed["attention"]["q"], cast[1:])


def test_bytes_and_version_are_those_of_what_was_sent(params, sync):
    weights = sync(params, 7)
    assert weights.version == 7
    assert weights.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights.params))
    packed = weights.params["segments"][1]["moe"]
    experts = sum(leaf.nbytes for n in ("gate_up", "down") for leaf in packed[n].values())
    values = 2 * MODEL.experts * 3 * MODEL.width * MODEL.expert_ffn
    assert experts == values // 2 + values // 16 + 2 * 2 * MODEL.experts * 4


@pytest.mark.parametrize("quant", [cfg.Quant(rollout="bf16", trainer="bf16"), KEPT])
def test_the_sampler_shares_no_buffer_with_the_trainer(quant):
    """The trainer donates its buffers; float32 everywhere, where a cast would change nothing."""
    model = cfg.Model(**{**vars(MODEL), "compute_dtype": "float32"})
    params = random_params(model, 1)
    weights = weight_sync.make_sync(model, quant)(params, 0)
    before = jax.tree.map(np.array, weights.params)
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    ours = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weights.params)}
    assert not ours & theirs
    jax.tree.map(lambda leaf: leaf.delete(), params)
    jax.tree.map(np.testing.assert_array_equal, weights.params, before)


def test_a_second_sync_leaves_the_first_version_as_it_was(params, sync):
    first = sync(params, 0)
    before = jax.tree.map(np.array, first.params)
    second = sync(jax.tree.map(lambda a: a + 1, params), 1)
    jax.tree.map(np.testing.assert_array_equal, first.params, before)
    assert second.version == 1
    embed = second.params["embed"]
    np.testing.assert_array_equal(embed, (params["embed"] + 1).astype(jnp.bfloat16))
