"""The command: exit statuses and messages; the compilers themselves are tested elsewhere."""

import collections

import pytest

from trace_jax.aot import __main__ as command
from trace_jax.aot import check
from trace_jax.aot.compile import Compiled, CompileError
from trace_jax.aot.survival import Survival

WRITTEN = collections.Counter({"x > 0.25": 1, "to f8e4m3fn": 1})
COMPILED = Compiled(
    hlo="", written="", ptx="", memory={"argument": 2**21}, lower_s=1.0, compile_s=2.0
)


def fake(monkeypatch, alive):
    def report(target, config, settings, *, timeout_s):
        site = Survival(site=("layers[0:2]", "k"), written=WRITTEN, alive=alive, copies=1)
        return check.Report(target=target, sites=[site], compiled=COMPILED)

    monkeypatch.setattr(check, "check", report)


def test_all_kept_is_success_and_prints_the_table(monkeypatch, capsys):
    fake(monkeypatch, WRITTEN)
    assert command.main(["--target=all"]) == 0
    printed = capsys.readouterr().out
    first = [line.split()[0] for line in printed.splitlines()[1:5]]
    assert first == ["h200", "b200", "v6e", "tpu7x"]
    assert "kept" in printed and "argument 2.0 MiB" in printed


def test_a_deletion_is_named_and_is_status_1(monkeypatch, capsys):
    fake(monkeypatch, collections.Counter({"to f8e4m3fn": 1}))
    assert command.main(["--target=h200"]) == 1
    printed = capsys.readouterr().out
    assert "PARTLY DELETED" in printed and "h200 layers[0:2] k: gone are 1 of 'x > 0.25'" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target=h100"], "error: aot: target: got h100, need one of"),
        (["--target=h200", "--set", "quant.trainers=qat"], "quant.trainers"),
    ],
)
def test_what_is_wrong_with_the_command_is_one_line_and_status_2(capsys, arguments, says):
    assert command.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_crashed_compiler_is_status_2(monkeypatch, capsys):
    def crash(*_, **__):
        raise CompileError("aot: got a crash (SIGSEGV), need a compiled program.")

    monkeypatch.setattr(check, "check", crash)
    assert command.main(["--target=h200"]) == 2
    assert "SIGSEGV" in capsys.readouterr().err
