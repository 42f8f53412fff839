"""How a launcher ends: exit codes, one clear line for the user's errors, tracebacks for ours."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


INHERITED = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=INHERITED | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_main(body: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    source = (
        f"import os\nfrom launch import cli\ndef main():\n    {body}\ncli.run(main, 'The doc.')"
    )
    return launch("-c", source, *flags, **environment)


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("open('no/such/file')", 2, "error: no/such/file: got No such file or directory, need a p"),
        ("open('launch')", 2, "error: launch: got Is a directory, need a path"),
        ("raise ValueError('a.b: got 1, need 2.')", 2, "error: a.b: got 1, need 2.\n"),
        ("raise FileNotFoundError('x: got 1, need 2. Fix: 3.')", 2, "error: x: got 1, need 2. Fix"),
    ],
)
def test_cli_run_ends_with_the_code_that_says_what_happened(body, code, stderr):
    ended = run_main(body)
    assert ended.returncode == code
    assert ended.stderr.startswith(stderr)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == (1 if stderr else 0)


def test_several_problems_are_a_line_each():
    ended = run_main("raise ValueError('a: got 1, need 2.\\nb: got 3, need 4.')")
    assert (ended.returncode, ended.stderr) == (2, "error:\na: got 1, need 2.\nb: got 3, need 4.\n")


def test_ctrl_c_closes_what_is_open_and_tears_nothing_down():
    body = (
        "import atexit, contextlib; atexit.register(print, 'torn down'); print('flushed', end=' ')"
        "\n    with contextlib.closing(type('X', (), {'close': lambda s: print('closed')})()):"
        "\n        raise KeyboardInterrupt"
    )
    ended = run_main(body)
    assert (ended.returncode, ended.stdout) == (130, "flushed closed\n")


@pytest.mark.parametrize("error", ["ValueError('shapes do not match')", "KeyError('a: got, need')"])
def test_cli_run_keeps_the_traceback_of_a_bug(error):
    ended = run_main(f"raise {error}")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


@pytest.mark.parametrize("flags", [("--nope=1",), ("stray",)])
def test_cli_run_refuses_unknown_arguments_before_main(flags):
    ended = run_main("print('started')", *flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr


def test_cli_run_keeps_a_compilation_cache_that_the_environment_may_move(tmp_path):
    body = "print(os.environ['JAX_COMPILATION_CACHE_DIR'])"
    own = run_main(body, HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR="/elsewhere")
    assert own.stdout.strip() == "/elsewhere"
    unset = run_main(body, HOME=str(tmp_path))
    assert unset.stdout.strip() == str(tmp_path / ".cache" / "trace_jax")


@pytest.mark.parametrize("how", [("launch/train.py",), ("-m", "launch.train")])
def test_train_explains_itself(how):
    ended = launch(*how, "--help")
    assert ended.returncode == 0
    for part in ("--config=configs/tiny_cpu.py", "--set optim.learning_rate=", "--workdir:"):
        assert part in ended.stdout


def test_train_refuses_a_bad_setting_in_one_line_and_starts_nothing(tmp_path):
    workdir = tmp_path / "run"
    ended = launch("launch/train.py", f"--workdir={workdir}", "--set", "rollout.group_size=1")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: config.rollout.group_size: got 1, need >= 2. Fix:")
    assert ended.stderr.count("\n") == 1
    assert not workdir.exists()


def test_a_run_directory_of_another_configuration_is_one_line_and_code_2(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 5}')
    body = f"from trace_jax import rundir; rundir.open_run({str(tmp_path)!r}, dict(seed=6))"
    done = run_main(body)
    assert done.returncode == 2
    assert "seed: 5 -> 6" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_module_in_the_current_folder_can_be_imported_by_a_script():
    done = run_main("import configs.tiny_cpu")
    assert done.returncode == 0, done.stderr
