"""Who may import whom, and how long a file may grow. Each rule is also shown a planted breach."""

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Lowest first. A module imports only from lower ranks, and freely within its own entry; two entries
# of one rank do not see each other: they meet in `types`. The longest matching entry counts.
RANKS: list[tuple[str, ...]] = [
    ("checks", "interrupt", "progress"),
    ("field_checks", "layer_choice", "layer_kinds"),
    ("formats", "guidance.record", "manifest", "rundir", "sharding"),
    ("model_checks",),
    ("config_checks",),
    ("config", "types"),
    ("stacks",),
    ("checkpoint", "data", "guidance", "metrics", "overrides", "reward", "rl", "upcycle"),
    ("plots", "qat", "summary"),
    ("models", "report"),
    ("weight_sync",),
    ("hf",),
    ("parity", "policy", "ptq", "rollout", "sources"),
    ("evaluate", "position", "update"),
    ("stages",),
    ("engines",),
    ("aot", "loop"),
    ("compare", "convert", "generation", "sensitivity"),
    ("inspection",),
    ("inspection_text",),
]
RANK_OF = {f"trace_jax.{name}": rank for rank, names in enumerate(RANKS) for name in names}

# Only these modules of trace_jax see the whole Config; any may import the sections it reads.
# `stages` is the half of the loop that builds what the other half runs.
SEES_CONFIG = {
    f"trace_jax.{name}"
    for name in (
        "config",
        "overrides",
        "stages",
        "engines",
        "loop",
        "compare",
        "sensitivity",
        "aot.step",
    )
}
MESH_NAMES = {"PartitionSpec", "Mesh", "AbstractMesh", "make_mesh"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Sources = dict[str, str]  # module name -> source text


def read_sources(package: str) -> Sources:
    """Every module of a package, by its dotted name."""
    sources = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        sources[".".join(parts)] = file.read_text()
    return sources


def imports(source: str) -> Iterator[str]:
    """Dotted names that a module imports; `from a import b` may mean a module: both are given."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def entry_of(name: str) -> str | None:
    """The longest entry of the rank table that `name` lies in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RANK_OF), None)


def unranked(sources: Sources) -> list[str]:
    return [
        name
        for name in sources
        if entry_of(name) is None
        and not any(entry.startswith(f"{name}.") for entry in RANK_OF)
        and name != "trace_jax"
    ]


def upward_imports(sources: Sources) -> list[str]:
    found = []
    for module, source in sources.items():
        here = entry_of(module)
        for name in imports(source):
            there = entry_of(name)
            if here is None or there is None or here == there:
                continue
            if RANK_OF[there] >= RANK_OF[here]:
                found.append(f"{module} imports {name}")
    return found


def cycles(sources: Sources) -> list[str]:
    """An import cycle, if there is one; `from package import module` counts as the module."""
    graph = {}
    for module, source in sources.items():
        targets = set()
        for name in imports(source):
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and target != module:
                targets.add(target)
        graph[module] = targets
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def config_readers(sources: Sources) -> list[str]:
    """Modules that name `trace_jax.config.Config`, by import or through an alias of the module."""
    found = []
    for module, source in sources.items():
        tree = ast.parse(source)
        aliases = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "trace_jax"
            for alias in node.names
            if alias.name == "config"
        }
        whole = {
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "Config"
        }
        reads = any(f"{alias}.Config" in whole for alias in aliases | {"trace_jax.config"})
        if reads or "trace_jax.config.Config" in imports(source):
            found.append(module)
    return found


def mesh_namers(sources: Sources) -> list[str]:
    found = []
    for module, source in sources.items():
        names = {name.rpartition(".")[2] for name in imports(source)}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
        if names & MESH_NAMES:
            found.append(module)
    return found


def pallas_users(sources: Sources) -> list[str]:
    return [
        module for module, source in sources.items() if any("pallas" in n for n in imports(source))
    ]


def too_long(sources: Sources) -> list[str]:
    found = []
    for module, source in sources.items():
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{module}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{module}.{node.name}: {lines} lines")
    return found


@pytest.fixture(scope="module")
def library() -> Sources:
    sources = read_sources("trace_jax")
    assert "trace_jax.formats.nvfp4" in sources  # the walk really finds the tree
    return sources


def test_every_module_has_a_rank(library):
    assert unranked(library) == [], "add it to RANKS above, as low as its imports allow"


def test_modules_import_only_lower_ranks(library):
    assert upward_imports(library) == []


def test_imports_have_no_cycle(library):
    assert cycles(library) == []


def test_stages_get_their_section_and_not_the_whole_config(library):
    assert set(config_readers(library)) <= SEES_CONFIG
    assert "trace_jax.overrides" in config_readers(library)


def test_only_sharding_names_mesh_axes(library):
    # aot.targets describes one device to the lowering of kernels by a mesh without axes
    assert set(mesh_namers(library)) <= {"trace_jax.sharding", "trace_jax.aot.targets"}


def test_only_pallas_kernels_imports_pallas(library):
    # The library calls kernels by `pallas_kernels.<op>.op`, never Pallas itself.
    inside = {name: source.replace("pallas_kernels", "kernels") for name, source in library.items()}
    assert pallas_users(inside) == []


KERNELS_KNOW = ("trace_jax.formats.", "trace_jax.checks.")


def test_pallas_kernels_know_formats_and_the_form_of_errors_only():
    sources = read_sources("pallas_kernels")
    assert "pallas_kernels.common.packed" in sources
    for module, source in sources.items():
        ours = [name for name in imports(source) if name.split(".")[0] == "trace_jax"]
        strangers = [name for name in ours if not f"{name}.".startswith(KERNELS_KNOW)]
        assert strangers == [], module


def test_files_and_functions_stay_short(library):
    assert too_long(library) == []


LOSS = "trace_jax.rl.loss"


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (unranked, {"trace_jax.newcomer": ""}),
        (upward_imports, {LOSS: "from trace_jax import update"}),
        (upward_imports, {LOSS: "from trace_jax.update import make_update"}),
        (upward_imports, {LOSS: "import trace_jax.update"}),
        (upward_imports, {LOSS: "def f():\n    from trace_jax.models import moe"}),
        (upward_imports, {LOSS: "from trace_jax.data import batching"}),  # of equal rank
        (upward_imports, {"trace_jax.types": "from trace_jax.guidance import codec"}),
        (cycles, {LOSS: "from trace_jax.rl import b", "trace_jax.rl.b": f"import {LOSS}"}),
        (config_readers, {LOSS: "from trace_jax.config import Config"}),
        (config_readers, {LOSS: "from trace_jax import config as cfg\ndef f(c: cfg.Config): ..."}),
        (config_readers, {LOSS: "import trace_jax.config\nx = trace_jax.config.Config"}),
        (mesh_namers, {LOSS: "from jax.sharding import PartitionSpec as P"}),
        (mesh_namers, {LOSS: "import jax\nmesh = jax.make_mesh((2,), ('data',))"}),
        (pallas_users, {LOSS: "from jax.experimental import pallas as pl"}),
        (too_long, {LOSS: "\n" * 401}),
        (too_long, {LOSS: "def f():\n" + "    x = 1\n" * 60}),
    ],
)
def test_each_rule_finds_a_planted_breach(rule, sources):
    assert len(rule(sources)) == 1


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (unranked, {"trace_jax": "", "trace_jax.rl": "", "trace_jax.rl.anything": ""}),
        (upward_imports, {LOSS: "from trace_jax.types import Batch\nfrom trace_jax.rl import b"}),
        (upward_imports, {"trace_jax.types": "from trace_jax.guidance.record import Guidance"}),
        (config_readers, {LOSS: "from trace_jax import config as cfg\nx = cfg.Loss"}),
        (too_long, {LOSS: "\n" * 300 + "def f():\n" + "    x = 1\n" * 59}),
    ],
)
def test_each_rule_lets_the_rest_pass(rule, sources):
    assert rule(sources) == []
