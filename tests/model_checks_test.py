"""A quant section against a model: every format has a layer to be used in."""

import pytest

from trace_jax import config as cfg
from trace_jax import model_checks

LINEAR = {"linear_key_heads": 1, "linear_value_heads": 1}
LINEAR |= {"linear_key_dim": 8, "linear_value_dim": 8}
DENSE = cfg.Model(experts=0, dense_ffn=32)
HYBRID = cfg.Model(layers=8, full_attention_every=4, **LINEAR)


@pytest.mark.parametrize(
    ("model", "quant", "error"),
    [
        (DENSE, {}, r"config\.quant\.weights: got nvfp4 for moe .*Fix: quant\.mlps=all"),
        (DENSE, {"weights": None}, r"config\.quant\.acts: got nvfp4 for moe .*quant\.acts=none"),
        (HYBRID, {"keep_last": 5}, r"config\.quant\.kv: .*attention in layers 0\.\.2"),
        (HYBRID, {"guide_layers": "kv=2"}, r"guide_layers: .*layers \[2\] without kv"),
        (HYBRID, {"guide_layers": "mlp_in=2"}, r"guide_layers: got site mlp_in"),
        (
            cfg.Model(dense_layers=(0, 1, 2), dense_ffn=8),
            {"keep_last": 1},
            r"config\.quant\.weights: .*moe in layers 0\.\.2",
        ),
    ],
)
def test_a_format_without_a_layer_to_use_it_in_is_refused(model, quant, error):
    with pytest.raises(ValueError, match=error):
        cfg.Config(name="x", model=model, quant=cfg.Quant(**quant))


@pytest.mark.parametrize(
    ("model", "quant"),
    [
        (DENSE, {"mlps": "all"}),
        (DENSE, {"weights": None, "acts": None}),
        (DENSE, {"rollout": "bf16", "trainer": "bf16"}),
        (HYBRID, {"guide_layers": "expert_in=2 kv=3,7"}),
        (HYBRID, {"keep_last": 4, "guide_layers": "last:1"}),
        (cfg.Model(dense_layers=(0,), dense_ffn=8), {"mlps": "all", "keep_first": 1}),
    ],
)
def test_what_is_used_somewhere_is_accepted(model, quant):
    cfg.Config(name="x", model=model, quant=cfg.Quant(**quant))


def test_sites_that_can_be_guided_are_those_of_quantised_layers():
    quant = cfg.Quant(keep_first=1, keep_last=1, guide_hidden=True)
    ids = (1, 2, 3, 4, 5, 6)
    assert model_checks.guidable_sites(quant, HYBRID) == {
        "expert_in": ids,
        "expert_hidden": ids,
        "k": (3,),
        "v": (3,),
    }
    only = cfg.Quant(weights=None, acts=None)
    assert model_checks.guidable_sites(only, DENSE) == dict.fromkeys("kv", (0, 1, 2, 3))
