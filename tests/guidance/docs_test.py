"""The examples of docs/guidance.md run, and print what their comments say."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guidance.md").read_text(), re.DOTALL)


def test_the_page_has_examples():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_an_example_runs_and_prints_what_it_says(block):
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for line in block.splitlines():
        if "print(" in line and "  # " in line:
            assert line.partition("  # ")[2].strip() in done.stdout, line
