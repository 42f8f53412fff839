"""The examples of docs/qat.md run as they stand, and print the table that is shown there."""

import pathlib
import re

from trace_jax.qat import Rule

DOC = pathlib.Path(__file__).resolve().parents[2] / "docs" / "qat.md"


def test_the_examples_in_the_documentation_run(capsys):
    blocks = re.findall(r"```(python)?\n(.*?)```", DOC.read_text(), re.DOTALL)
    code = [text for language, text in blocks if language]
    shown = [text for language, text in blocks if not language]
    assert len(code) == 6 and len(shown) == 1
    names: dict = {}
    for text in code:
        exec(compile(text, str(DOC), "exec"), names)
    assert capsys.readouterr().out == shown[0]


def test_the_documentation_names_every_field_of_a_rule():
    fields = [f for f in Rule.__dataclass_fields__ if f not in ("pattern", "_")]
    table = DOC.read_text().partition("| field |")[2]
    assert [f for f in fields if f"`{f}`" not in table] == []
