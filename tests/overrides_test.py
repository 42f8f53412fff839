"""Command-line overrides, the JSON round trip, and loading a configuration file."""

import dataclasses
import json
import pathlib

import pytest

from trace_jax import config as cfg
from trace_jax import overrides

BASE = cfg.Config(name="base")


@pytest.mark.parametrize(
    ("assignment", "section", "field", "value"),
    [
        ("steps=7", None, "steps", 7),
        ("name=other", None, "name", "other"),
        ("warm_start=none", None, "warm_start", None),
        ("model.layers=2", "model", "layers", 2),
        ("model.rope_theta=1e6", "model", "rope_theta", 1e6),
        ("optim.learning_rate=3", "optim", "learning_rate", 3.0),
        ("model.tie_embeddings=False", "model", "tie_embeddings", False),
        ("loss.replay=true", "loss", "replay", True),
        ("loss.importance_cap=none", "loss", "importance_cap", None),
        ("loss.kl_coef=0.1", "loss", "kl_coef", 0.1),
        ("data.system_prompt=a=b, c", "data", "system_prompt", "a=b, c"),
        ("quant.guide_layers=0,2", "quant", "guide_layers", "0,2"),
        ("warm_start.stop_at_accuracy=None", "warm_start", "stop_at_accuracy", None),
        ("data.task_args=a:1,b:0.5,c:true,d:x", "data", "task_args",
         (("a", 1), ("b", 0.5), ("c", True), ("d", "x"))),
        ('data.task_args=[["a", 1], ["b", "1"]]', "data", "task_args", (("a", 1), ("b", "1"))),
        ("data.task_args=", "data", "task_args", ()),
    ],
)  # fmt: skip
def test_override_reads_a_value_by_its_declared_type(assignment, section, field, value):
    changed = overrides.override(BASE, [assignment])
    owner = changed if section is None else getattr(changed, section)
    assert repr(getattr(owner, field)) == repr(value)  # repr: 1, 1.0 and True differ
    if section is None:
        expected = dataclasses.replace(BASE, **{field: value})
    else:
        inner = dataclasses.replace(getattr(BASE, section), **{field: value})
        expected = dataclasses.replace(BASE, **{section: inner})
    assert changed == expected  # and nothing else changed


def test_override_validates_once_after_all_assignments_whatever_their_order():
    pair = ["quant.rollout=bf16", "quant.trainer=bf16"]
    with pytest.raises(ValueError, match="trace with rollout bf16"):
        overrides.override(BASE, pair[:1])
    assert overrides.override(BASE, pair) == overrides.override(BASE, pair[::-1])


def test_override_turns_a_section_on_when_one_of_its_fields_is_set():
    off = overrides.override(BASE, ["warm_start=none"])
    on = overrides.override(off, ["warm_start.batch=3"])
    assert on.warm_start == cfg.WarmStart(batch=3)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lr=1", r"--set optim\.lr: got lr, need one of \['learning_rate', .*'micro_batch'"),
        (
            "optimizer.b1=1",
            r"--set optimizer\.b1: got optimizer, need one of \['asynchrony', .*'optim'",
        ),
        ("step=1", r"--set step: got step, need one of \['name', 'seed', 'steps'"),
        ("steps.x=1", r"--set steps\.x: got steps, need one of \['asynchrony'"),
        ("steps", r"--set steps: got no '=', need section\.field=value"),
        ("steps=1.5", r"--set steps: got '1\.5', need int"),
        ("steps=none", r"--set steps: got 'none', need int"),
        ("rollout.top_k=x", r"--set rollout\.top_k: got 'x', need int \| None"),
        ("optim.b1=fast", r"--set optim\.b1: got 'fast', need float"),
        ("loss.replay=1", r"--set loss\.replay: got '1', need true or false"),
        ("data.task_args=a", r"--set data\.task_args: got 'a', need key:value"),
        ("data.task_args=[1", r"--set data\.task_args: got '\[1', need a JSON list"),
        ("optim=none", r"--set optim: got 'none', need a field of it: optim\.FIELD"),
        ("warm_start=3", r"--set warm_start: got '3', need none, or a field of it"),
        ("optim.b1=nan", r"config\.optim\.b1: got nan, need float"),
        ("rollout.group_size=1", r"config\.rollout\.group_size: got 1, need >= 2"),
    ],
)
def test_override_refuses_in_the_house_form(assignment, message):
    with pytest.raises(ValueError, match=message):
        overrides.override(BASE, [assignment])


@pytest.mark.parametrize(
    "pair",
    [
        ["steps=1", "steps=2"],
        ["warm_start=none", "warm_start.batch=3"],
        ["warm_start.batch=3", "warm_start=none"],
    ],
)
def test_override_refuses_to_set_one_thing_twice(pair):
    with pytest.raises(ValueError, match="need each field once"):
        overrides.override(BASE, pair)


def changed_everywhere() -> cfg.Config:
    """Awkward values: floats with no short form, a None that is not the default, nested tuples."""
    return overrides.override(
        BASE,
        [
            "optim.learning_rate=0.1",
            "model.norm_eps=3.3333333333333335e-07",
            "loss.importance_cap=none",
            "data.task_args=a:1,b:1.0,c:true,d:1e-9,e:ü",
            "warm_start=none",
            "run.init_from=runs/x",
        ],
    )


@pytest.mark.parametrize("config", [BASE, changed_everywhere()], ids=["default", "changed"])
def test_json_round_trip_is_exact(config):
    text = json.dumps(overrides.to_dict(config))
    back = overrides.from_dict(json.loads(text))
    assert repr(back) == repr(config)  # repr: == takes 1 for 1.0 and for True
    assert back == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "x", "sede": 1}, r"config: got sede, need one of \['name', 'seed'"),
        ({"name": "x", "loss": {"cap": 1}}, r"config\.loss: got cap, need one of \['clip_low'"),
        ({"name": "x", "loss": 3}, r"config\.loss: got 3, need the fields of Loss"),
        ({}, r"config: got no name, need a str"),
    ],
)
def test_from_dict_refuses_what_is_no_config(values, message):
    with pytest.raises(ValueError, match=message):
        overrides.from_dict(values)


def test_load_runs_a_file_and_finds_a_bare_name(tmp_path: pathlib.Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from trace_jax import config as cfg\n"
        "def get_config():\n    return cfg.Config(name='mine', steps=3)\n"
    )
    assert overrides.load(file) == cfg.Config(name="mine", steps=3)
    assert overrides.load("tiny_cpu") == overrides.load(overrides.CONFIGS / "tiny_cpu.py")


def test_load_lists_the_configs_that_exist_when_the_file_does_not(tmp_path: pathlib.Path):
    (tmp_path / "one.py").touch()
    with pytest.raises(
        FileNotFoundError, match=r"two\.py, which is no file, need one of \['one'\]"
    ):
        overrides.load(tmp_path / "two.py")
    with pytest.raises(FileNotFoundError, match=r"got nope, .* 'tiny_cpu'"):
        overrides.load("nope")


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("a.py", "x = 1", "got no get_config"),
        ("a.py", "def get_config(): return 3", r"got a int from get_config\(\)"),
        ("a.txt", "", "need a Python file"),
    ],
)
def test_load_refuses_a_file_that_gives_no_config(tmp_path, name, source, message):
    (tmp_path / name).write_text(source)
    with pytest.raises(ValueError, match=message):
        overrides.load(tmp_path / name)


@pytest.mark.parametrize(
    "file", sorted(overrides.CONFIGS.glob("[!_]*.py")), ids=lambda file: file.stem
)
def test_every_config_is_valid_and_named_after_its_file(file):
    config = overrides.load(file)
    assert config.name == file.stem
    header = file.read_text().split('"""')[1]
    for part in (f"configs/{file.name}", "Cost:", "Expect:"):
        assert part in header


def test_another_task_does_not_inherit_the_arguments_of_the_old_one():
    demo = overrides.load("demo_cpu")
    assert demo.data.task_args
    assert overrides.override(demo, ["data.task=chain_sum"]).data.task_args == ()
    own = overrides.override(demo, ["data.task=none", "data.path=mine.jsonl"])
    assert (own.data.task, own.data.task_args) == (None, ())
    given = overrides.override(demo, ["data.task=chain_sum", "data.task_args=min_terms:2"])
    assert given.data.task_args == (("min_terms", 2),)
