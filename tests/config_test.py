"""What a configuration refuses, and that every refusal says where, what and how to fix it."""

import dataclasses
import importlib.util
import math
import re

import pytest

from trace_jax import config as cfg


def build(**sections: dict) -> cfg.Config:
    """A Config with the named fields of the named sections changed."""
    classes = {
        "model": cfg.Model,
        "quant": cfg.Quant,
        "data": cfg.Data,
        "warm_start": cfg.WarmStart,
        "rollout": cfg.Rollout,
        "loss": cfg.Loss,
        "optim": cfg.Optim,
        "run": cfg.Run,
    }
    built = {name: classes[name](**fields) for name, fields in sections.items()}
    return cfg.Config(name="test", **built)


def test_config_defaults_are_accepted():
    assert cfg.Config(name="x").quant.trainer == "trace"


# (sections, start of the message, a word of the need or of the fix)
REFUSED = {
    "guided without a quantised rollout": (
        {"quant": {"rollout": "bf16", "trainer": "trace"}},
        "config.quant.trainer: got trace with rollout bf16",
        "quant.trainer=bf16",
    ),
    "nothing to quantise": (
        {"quant": {"weights": None, "acts": None, "kv": None, "trainer": "qat"}},
        "config.quant: got no format",
        "quant.rollout=bf16",
    ),
    "guided hidden values of activations that stay in high precision": (
        {"quant": {"acts": None, "guide_hidden": True}},
        "config.quant.guide_hidden: got True",
        "quant.acts=nvfp4",
    ),
    "guided where only weights are quantised": (
        {"quant": {"acts": None, "kv": None}},
        "config.quant.trainer: got trace with acts and kv off",
        "quant.trainer=qat",
    ),
    "tiles of activations": (
        {"quant": {"acts": "nvfp4:block_shape=16x16,global_rule=one"}},
        "config.quant.acts: got nvfp4:block_shape=16x16",
        "block_shape=1x16",
    ),
    "tiles of the KV cache": (
        {"quant": {"kv": "nvfp4:block_shape=16x16"}},
        "config.quant.kv: got nvfp4:block_shape=16x16",
        "each token alone",
    ),
    "low bits of scales that are not magnitudes": (
        {"quant": {"kv": "hif4", "guide_scale_bits": 3}},
        "config.quant.guide_scale_bits: got 3 with kv=hif4",
        "guide_scale_bits=8",
    ),
    "short global scales of float32 activations": (
        {"model": {"compute_dtype": "float32"}, "quant": {"guide_global_bits": 16}},
        "config.quant.guide_global_bits: got 16 with compute_dtype float32",
        "guide_global_bits=32",
    ),
    "a format that is not there": (
        {"quant": {"acts": "fp5"}},
        "config.quant.acts: format: got 'fp5'",
        "nvfp4",
    ),
    "an option that a format does not have": (
        {"quant": {"kv": "nvfp4:globalrule=one"}},
        "config.quant.kv: format nvfp4: got 'globalrule=one'",
        "global_rule",
    ),
    "a value that an option does not take": (
        {"quant": {"weights": "nvfp4:global_rule=max"}},
        "config.quant.weights: nvfp4: global_rule: got max",
        "amax",
    ),
    "a group of one": (
        {"rollout": {"group_size": 1}},
        "config.rollout.group_size: got 1, need >= 2",
        "a group baseline needs two samples",
    ),
    "top_p": ({"rollout": {"top_p": 0.9}}, "config.rollout.top_p: got 0.9", "log-probs"),
    "top_k": ({"rollout": {"top_k": 5}}, "config.rollout.top_k: got 5", "rollout.top_k=none"),
    "more experts a token than experts": (
        {"model": {"experts_per_token": 9}},
        "config.model.experts_per_token: got 9",
        "<= experts (8)",
    ),
    "heads that kv_heads do not divide": (
        {"model": {"heads": 4, "kv_heads": 3}},
        "config.model.heads: got 4",
        "multiple of kv_heads (3)",
    ),
    "a dense model without a width": (
        {"model": {"experts": 0}},
        "config.model.dense_ffn: got 0",
        "the width of dense MLPs",
    ),
    "dense layers without a width": (
        {"model": {"dense_layers": (1,)}},
        "config.model.dense_ffn: got 0",
        "the width of dense MLPs",
    ),
    "dense layers of a dense model": (
        {"model": {"experts": 0, "dense_ffn": 8, "dense_layers": (1,)}},
        "config.model.dense_layers: got (1,)",
        "dense in every layer",
    ),
    "a shared expert of a dense model": (
        {"model": {"experts": 0, "dense_ffn": 8, "shared_ffn": 8}},
        "config.model.shared_ffn: got 8",
        "dense in every layer",
    ),
    "every layer dense": (
        {"model": {"dense_ffn": 8, "dense_layers": (0, 1, 2, 3)}},
        "config.model.dense_layers: got (0, 1, 2, 3)",
        "experts=0",
    ),
    "a dense layer that is not there": (
        {"model": {"dense_ffn": 8, "dense_layers": (4,)}},
        "config.model.dense_layers: got (4,)",
        "0..3",
    ),
    "dense layers out of order": (
        {"model": {"dense_ffn": 8, "dense_layers": (2, 1)}},
        "config.model.dense_layers: got (2, 1)",
        "in order",
    ),
    "a hybrid without linear heads": (
        {"model": {"full_attention_every": 2}},
        "config.model.linear_key_heads: got 0",
        "full_attention_every > 1",
    ),
    "value heads that key heads do not divide": (
        {
            "model": {
                "full_attention_every": 2,
                "linear_key_heads": 2,
                "linear_value_heads": 3,
                "linear_key_dim": 4,
                "linear_value_dim": 4,
            }
        },
        "config.model.linear_value_heads: got 3",
        "a multiple of linear_key_heads (2)",
    ),
    "no layer with full attention": (
        {
            "model": {
                "full_attention_every": 5,
                "linear_key_heads": 2,
                "linear_value_heads": 2,
                "linear_key_dim": 4,
                "linear_value_dim": 4,
            }
        },
        "config.model.full_attention_every: got 5",
        "some layer with full attention",
    ),
    "an odd part of a head that is rotated": (
        {"model": {"head_dim": 12, "rotary_fraction": 0.25}},
        "config.model.head_dim: got 12, of which 3 are rotated",
        "an even number",
    ),
    "odd head": ({"model": {"head_dim": 15}}, "config.model.head_dim: got 15", "even"),
    "every layer kept": (
        {"quant": {"keep_first": 2, "keep_last": 2}},
        "config.quant.keep_first + keep_last: got 2 + 2",
        "4 layers",
    ),
    "guided layer that is not there": (
        {"quant": {"guide_layers": "0,4"}},
        "config.quant.guide_layers: got 0,4",
        "0..3",
    ),
    "guided layer that is kept at the start": (
        {"quant": {"keep_first": 1, "guide_layers": "0,2"}},
        "config.quant.guide_layers: got 0,2",
        "1..3",
    ),
    "guided layer that is kept at the end": (
        {"quant": {"keep_last": 1, "guide_layers": "3"}},
        "config.quant.guide_layers: got 3",
        "0..2",
    ),
    "more last layers than there are": (
        {"quant": {"keep_first": 1, "guide_layers": "last:4"}},
        "config.quant.guide_layers: got last:4",
        "1..3",
    ),
    "no last layers": (
        {"quant": {"guide_layers": "last:0"}},
        "config.quant.guide_layers: got last:0",
        "1..4",
    ),
    "both sources": (
        {"data": {"path": "a.jsonl"}},
        "config.data: got task 'spell_backward' and path 'a.jsonl'",
        "data.task=none",
    ),
    "no source": ({"data": {"task": None}}, "config.data: got task None and path None", "one"),
    "task_args without a task": (
        {"data": {"task": None, "path": "a", "task_args": (("n", 1),)}},
        "config.data.task_args: got (('n', 1),)",
        "without a task",
    ),
    "the same task_arg twice": (
        {"data": {"task_args": (("n", 1), ("n", 2))}},
        "config.data.task_args: got ['n', 'n']",
        "once",
    ),
    "eval_path of a task": (
        {"data": {"eval_path": "b"}},
        "config.data.eval_path: got b",
        "data.path as well",
    ),
    "unknown reward": ({"data": {"reward": "f1"}}, "config.data.reward: got 'f1'", "exact"),
    "task reward without a task": (
        {"data": {"task": None, "path": "a", "reward": "task"}},
        "config.data.reward: got task",
        "data.reward=exact",
    ),
    "fewer prompts than a step takes": (
        {"data": {"train_size": 31}},
        "config.data.train_size: got 31",
        ">= prompts_per_step (32)",
    ),
    "micro-batch that does not divide": (
        {"optim": {"micro_batch": 48}},
        "config.optim.micro_batch: got 48",
        "(256). Fix: optim.micro_batch=32",
    ),
    "micro-batch that does not divide a minibatch": (
        {"optim": {"minibatches": 2, "micro_batch": 256}},
        "config.optim.micro_batch: got 256",
        "(128). Fix: optim.micro_batch=128",
    ),
    "minibatches that do not divide": (
        {"optim": {"minibatches": 3}},
        "config.optim.minibatches: got 3",
        "(256)",
    ),
    "two ways to start": (
        {"run": {"init_from": "runs/a"}},
        "config.run.init_from: got runs/a together with a warm start",
        "warm_start=none",
    ),
    "one checkpoint kept": (
        {"run": {"keep_checkpoints": 1}},
        "config.run.keep_checkpoints: got 1",
        ">= 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_refuses_contradictions(case):
    sections, start, hint = REFUSED[case]
    with pytest.raises(ValueError) as refused:
        build(**sections)
    text = str(refused.value)
    assert text.startswith(start)
    assert hint in text.partition(", need ")[2]


ACCEPTED = {
    "widths that are no whole number of blocks": {
        "model": {"width": 100, "head_dim": 24, "expert_ffn": 17}
    },
    "tiles of weights": {"quant": {"weights": "nvfp4:block_shape=16x16"}},
    "weights alone": {"quant": {"acts": None, "kv": None, "trainer": "qat"}},
    "any shape when nothing is quantised": {
        "model": {"width": 100, "head_dim": 10, "expert_ffn": 3},
        "quant": {"rollout": "bf16", "trainer": "bf16", "keep_first": 4},
    },
    "every layer by name": {"quant": {"guide_layers": "0,1,2,3"}},
    "the only quantised layer": {
        "quant": {"keep_first": 2, "keep_last": 1, "guide_layers": "2"},
    },
    "all quantised layers from the end": {"quant": {"keep_first": 1, "guide_layers": "last:3"}},
    "your own data and reward": {
        "data": {"task": None, "path": "a", "eval_path": "b", "reward": "my.pkg:score"},
    },
    "a plain trainer below a quantised rollout": {"quant": {"trainer": "bf16"}},
    "bounds that may be met": {
        "rollout": {"version_lag": 0, "group_size": 2},
        "loss": {"kl_coef": 0.0, "importance_cap": 1.0},
        "optim": {"learning_rate": 0.0, "warmup_steps": 61, "micro_batch": 1},
        "warm_start": {"stop_at_accuracy": 1.0},
    },
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_config_accepts_what_is_no_contradiction(case):
    build(**ACCEPTED[case])


def test_rollout_section_alone_serves_evaluation():
    assert cfg.Rollout(group_size=1, top_p=0.9, top_k=4).top_p == 0.9


CHOICES = [
    (cfg.Model, "compute_dtype", "float32"),
    (cfg.Quant, "rollout", "fp4"),
    (cfg.Quant, "trainer", "trace"),
    (cfg.Quant, "guide", "mantissa"),
    (cfg.Data, "overlong", "drop"),
    (cfg.Optim, "schedule", "cosine"),
]


@pytest.mark.parametrize(("section", "field", "choice"), CHOICES)
def test_sections_list_the_choices_of_an_unknown_word(section, field, choice):
    assert getattr(section(**{field: choice}), field) == choice
    with pytest.raises(ValueError, match=rf"\.{field}: got fp5, need one of .*'{choice}'"):
        section(**{field: "fp5"})


@pytest.mark.parametrize(
    "text", ["", "first", "last", "last:", "last:1,2", "0,", ",0", "0 1", "-1", "2,2", "all:1"]
)
def test_quant_refuses_guide_layers_that_do_not_parse(text):
    with pytest.raises(ValueError, match=r"config\.quant\.guide_layers: got .*last:N"):
        cfg.Quant(guide_layers=text)


# The smallest value that is refused, or the largest.
BOUNDS = [
    *[(cfg.Model, name, 0) for name in ("width", "layers", "heads", "kv_heads", "head_dim")],
    *[(cfg.Model, name, 0) for name in ("experts_per_token", "expert_ffn", "vocab_size")],
    *[(cfg.Model, name, -1) for name in ("experts", "shared_ffn", "dense_ffn")],
    (cfg.Model, "full_attention_every", 0),
    (cfg.Model, "rotary_fraction", 0.0),
    (cfg.Model, "rotary_fraction", 1.5),
    (cfg.Model, "rope_theta", 0.0),
    (cfg.Model, "norm_eps", 0.0),
    (cfg.Quant, "keep_first", -1),
    (cfg.Quant, "keep_last", -1),
    *[(cfg.Data, name, 0) for name in ("eval_size", "prompts_per_step", "max_prompt_tokens")],
    *[(cfg.WarmStart, name, 0) for name in ("max_steps", "batch", "check_every")],
    (cfg.WarmStart, "learning_rate", 0.0),
    (cfg.WarmStart, "stop_at_accuracy", 0.0),
    (cfg.WarmStart, "stop_at_accuracy", 1.01),
    *[(cfg.Rollout, name, 0) for name in ("group_size", "max_new_tokens", "top_k")],
    *[(cfg.Rollout, name, 0) for name in ("bucket_tokens", "bucket_batch")],
    (cfg.Rollout, "version_lag", -1),
    (cfg.Rollout, "temperature", 0.0),
    (cfg.Rollout, "top_p", 0.0),
    (cfg.Rollout, "top_p", 1.01),
    (cfg.Loss, "clip_low", 0.0),
    (cfg.Loss, "clip_low", 1.0),
    (cfg.Loss, "clip_high", 0.0),
    (cfg.Loss, "kl_coef", -0.1),
    (cfg.Loss, "importance_cap", 0.9),
    (cfg.Loss, "std_floor", 0.0),
    (cfg.Optim, "learning_rate", -1e-9),
    (cfg.Optim, "warmup_steps", -1),
    (cfg.Optim, "b1", -0.1),
    (cfg.Optim, "b1", 1.0),
    (cfg.Optim, "b2", 1.0),
    (cfg.Optim, "weight_decay", -0.1),
    (cfg.Optim, "max_grad_norm", 0.0),
    (cfg.Optim, "minibatches", 0),
    (cfg.Optim, "micro_batch", 0),
    *[(cfg.Run, name, 0) for name in ("eval_every", "eval_samples", "checkpoint_every")],
    (cfg.Run, "samples_kept", -1),
]


@pytest.mark.parametrize(("section", "field", "value"), BOUNDS)
def test_sections_refuse_values_out_of_bounds(section, field, value):
    section()
    with pytest.raises(ValueError, match=rf"\.{field}: got {re.escape(str(value))}, need [<>]"):
        section(**{field: value})


@pytest.mark.parametrize("change", [{"steps": -1}, {"seed": -1}, {"seed": 2**32}])
def test_config_refuses_numbers_out_of_bounds(change):
    with pytest.raises(ValueError, match=rf"config\.{next(iter(change))}: got"):
        cfg.Config(name="x", **change)


@pytest.mark.parametrize("name", ["", "a/b", "a b"])
def test_config_refuses_a_name_that_is_no_folder(name):
    with pytest.raises(ValueError, match=r"config\.name: got"):
        cfg.Config(name=name)


def float_fields() -> list[tuple[type, str]]:
    sections = (cfg.Model, cfg.WarmStart, cfg.Rollout, cfg.Loss, cfg.Optim)
    return [
        (section, field.name)
        for section in sections
        for field in dataclasses.fields(section)
        if field.type in (float, float | None)
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("section", "field"), float_fields())
def test_sections_refuse_a_number_that_is_not_finite(section, field, value):
    with pytest.raises(ValueError, match=rf"\.{field}: got .*, need float"):
        section(**{field: value})


def test_sections_turn_an_int_written_for_a_float_into_one(plain):
    rates = plain.Optim(learning_rate=1, max_grad_norm=2)
    assert (type(rates.learning_rate), type(rates.max_grad_norm)) == (float, float)


@pytest.fixture(scope="module")
def plain():
    """The module as a user imports it: in tests beartype would refuse a wrong type before we do."""
    spec = importlib.util.spec_from_file_location("plain_config", cfg.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("section", "field", "value", "need"),
    [
        ("Model", "layers", 2.0, "int"),
        ("Model", "layers", True, "int"),
        ("Model", "layers", None, "int"),
        ("Model", "tie_embeddings", 1, "bool"),
        ("Model", "rope_theta", "1", "float"),
        ("Optim", "max_grad_norm", True, "float | None"),
        ("Rollout", "top_k", 1.0, "int | None"),
        ("Quant", "rollout", None, "str"),
        ("Data", "task_args", [("n", 1)], "tuple"),
        ("Data", "task_args", (("n", 1, 2),), "tuple"),
        ("Data", "task_args", ((1, 1),), "tuple"),
        ("Data", "task_args", (("n", None),), "tuple"),
    ],
)
def test_sections_refuse_another_type(plain, section, field, value, need):
    where = rf"\.{field}: got {re.escape(repr(value))}, need {re.escape(need)}"
    with pytest.raises(ValueError, match=where):
        getattr(plain, section)(**{field: value})


def test_config_refuses_a_section_of_another_stage(plain):
    with pytest.raises(ValueError, match=r"config\.loss: got Optim\(.*, need Loss"):
        plain.Config(name="x", loss=plain.Optim())
