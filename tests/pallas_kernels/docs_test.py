"""docs/kernels.md: its examples run as they stand, its tables name what there is."""

import pathlib
import re

from pallas_kernels import catalogue
from pallas_kernels.common import impls
from trace_jax import config as cfg
from trace_jax.config_checks import KERNELS

DOC = pathlib.Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_the_examples_run_and_the_debug_mode_says_what_is_wrong(capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL):
        exec(compile(code, str(DOC), "exec"), names)
    assert re.search(r"got .*11.*need .*6", capsys.readouterr().out)


def test_the_tables_name_every_op_implementation_and_field():
    rows = [line.split("|") for line in DOC.read_text().splitlines() if line.startswith("| `")]
    first = [row[1].strip(" `") for row in rows]
    assert first == [*catalogue.OPS, *cfg.Kernels.__dataclass_fields__]
    text = DOC.read_text()
    assert [impl for impl in impls.IMPLS if f"**{impl}**" not in text] == []
    ops = {
        "grouped_matmul": "fp4_grouped_matmul",
        "kv_attention": "fp4_kv_attention_decode",
    }
    for field, has in KERNELS.items():
        cells = next(row for row in rows if row[1].strip(" `") == ops.get(field, field))
        header = ("xla", "triton", "mosaic_gpu", "mosaic_tpu")
        written = {name for name, cell in zip(header, cells[2:6], strict=True) if cell.strip()}
        if (
            field == "grouped_matmul"
        ):  # the trainer's; the sampler's packed form is for Blackwell too
            written -= {"mosaic_gpu"}
        assert written == set(has), field


def test_the_catalogue_names_every_folder():
    folder = pathlib.Path(catalogue.__file__).parent
    assert {path.parent.name for path in folder.glob("*/op.py")} == set(catalogue.OPS)
    for op in catalogue.OPS:
        cases = [bench.case for bench in catalogue.benches(op)]
        assert len(set(cases)) == len(cases)
        assert {bench.op for bench in catalogue.benches(op)} == {op}
        assert any(bench.small for bench in catalogue.benches(op))
        assert not all(bench.small for bench in catalogue.benches(op))
