"""The run directory: what it records, what may change on resume, and one writer at a time."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from trace_jax import config as cfg
from trace_jax import rundir

ROOT = pathlib.Path(__file__).resolve().parents[1]


def as_dict(**changes) -> dict:
    return dataclasses.asdict(dataclasses.replace(cfg.Config(name="test"), **changes))


def read(path: pathlib.Path):
    return json.loads(path.read_text())


def test_a_new_run_has_its_folders_configuration_and_environment(tmp_path):
    with rundir.open_run(tmp_path / "a" / "run", as_dict(seed=3)) as run:
        assert not run.resumed
        names = {path.name for path in run.root.iterdir() if path.is_dir()}
        assert names == {"checkpoints", "samples", "plots", "tensorboard", "guidance"}
    assert read(run.root / "config.json")["seed"] == 3
    assert read(run.root / "config.json")["model"]["width"] == cfg.Model().width
    (start,) = read(run.root / "env.json")["starts"]
    assert start["python"] == ".".join(map(str, sys.version_info[:3]))
    assert start["packages"]["jax"] == __import__("jax").__version__
    assert len(start["devices"]) == 4 and start["backend"] == "cpu"
    assert start["command"][0] == sys.executable and start["cpus"] >= 1


def test_a_resume_allows_more_steps_and_other_cadences_and_records_them(tmp_path):
    rundir.open_run(tmp_path, as_dict()).close()
    longer = as_dict(steps=99, run=cfg.Run(eval_every=7))
    with rundir.open_run(tmp_path, longer) as run:
        assert run.resumed
        assert run.config_changes == ["steps: 60 -> 99", "run.eval_every: 20 -> 7"]
    assert read(tmp_path / "config.json")["steps"] == 99
    starts = read(tmp_path / "env.json")["starts"]
    assert [start["config_changes"] for start in starts] == [[], run.config_changes]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"optim": cfg.Optim(learning_rate=1e-5)}, "optim.learning_rate: 0.0004 -> 1e-05"),
        ({"loss": cfg.Loss(kl_coef=0.0)}, "loss.kl_coef: null -> 0.0"),
    ],
)
def test_another_configuration_is_refused_field_by_field(tmp_path, changes, text):
    rundir.open_run(tmp_path, as_dict()).close()
    before = (tmp_path / "config.json").read_bytes(), (tmp_path / "env.json").read_bytes()
    with pytest.raises(rundir.RunDirError, match="Fix: give a new --workdir, or the same") as error:
        rundir.open_run(tmp_path, as_dict(steps=99, **changes))
    assert text in str(error.value) and "steps" not in str(error.value)
    assert before == ((tmp_path / "config.json").read_bytes(), (tmp_path / "env.json").read_bytes())
    rundir.open_run(tmp_path, as_dict()).close()  # the refusal gave the lock back


def test_a_run_does_not_change_where_it_started_from(tmp_path):
    rundir.open_run(tmp_path, as_dict(warm_start=None)).close()
    with pytest.raises(rundir.RunDirError, match=r'got run.init_from: null -> "elsewhere", need'):
        rundir.open_run(tmp_path, as_dict(warm_start=None, run=cfg.Run(init_from="elsewhere")))
    with pytest.raises(rundir.RunDirError, match=r"got warm_start: null -> \{.*max_steps"):
        rundir.open_run(tmp_path, as_dict())


def test_tuples_compare_equal_to_what_json_made_of_them(tmp_path):
    data = cfg.Data(task_args=(("min_word_len", 3),))
    rundir.open_run(tmp_path, as_dict(data=data)).close()
    with rundir.open_run(tmp_path, as_dict(data=data)) as run:
        assert run.config_changes == []


def test_two_processes_never_write_one_run(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from trace_jax import rundir\n"
        "run = rundir.open_run(sys.argv[1], {'name': 'x'})\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    args = [sys.executable, "-c", code, str(tmp_path), str(ROOT)]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(rundir.RunDirError, match=f"in use by process {child.pid}, need"):
            rundir.open_run(tmp_path, {"name": "x"})
        child.kill()  # the lock does not outlive its process
        child.wait()
        rundir.open_run(tmp_path, {"name": "x"}).close()


def test_a_workdir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        with pytest.raises(rundir.RunDirError, match=f"--workdir: got {bad} .*writable"):
            rundir.open_run(bad, {"name": "x"})


def test_a_garbled_configuration_is_named_and_not_replaced(tmp_path):
    (tmp_path / "config.json").write_text('{"name": ')
    with pytest.raises(rundir.RunDirError, match=r"config.json: got bad JSON"):
        rundir.open_run(tmp_path, {"name": "x"})
    assert (tmp_path / "config.json").read_text() == '{"name": '


def test_reading_a_run_needs_no_lock_but_a_run(tmp_path):
    with rundir.open_run(tmp_path / "run", {"name": "x"}):
        assert rundir.read_run(tmp_path / "run").config() == {"name": "x"}
    with pytest.raises(rundir.RunDirError, match=r"need a run directory with config\.json"):
        rundir.read_run(tmp_path)
