"""The layers of the package: every import points to the same layer or a lower one."""

import ast
import graphlib
import pathlib
from collections.abc import Mapping

import pytest

_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "cirag_jax"

# From bottom to top. A module may import from its own layer and from those before it.
LAYERS = (
    "types", "errors", "validation", "io", "server", "identity", "sqlite", "processes",
    "config_files", "config_words", "cli", "sharding", "triples", "datasets", "models",
    "retrieval", "llm", "runtime", "methods", "distill", "grade", "evaluation", "reports",
    "training", "commands",
)  # fmt: skip


def _modules() -> list[pathlib.Path]:
    return sorted(_PACKAGE.rglob("*.py"))


def _layer(module: str) -> str:
    return module.split(".")[1]


def imports(source: str) -> set[str]:
    """Returns the modules of this package that a source file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where they point"
            base = node.module or ""
            # In `from cirag_jax import x`, the imported name x decides the layer.
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("cirag_jax.")}


def upward(name: str, source: str) -> set[str]:
    """Returns the imports of module ``name`` from higher layers."""
    own = LAYERS.index(_layer(name))
    return {other for other in imports(source) if LAYERS.index(_layer(other)) > own}


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(_PACKAGE)))
def test_imports_point_to_lower_layers(path):
    name = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
    if name == "cirag_jax.__init__":
        return  # the package itself
    assert not upward(name, path.read_text("utf-8"))


def _outside(source: str) -> set[str]:
    """Returns the other folders of the repository that a source file imports from."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names & {"configs", "experiments", "launch", "tests"}


def test_package_imports_no_other_folder():
    assert {str(p): o for p in _modules() if (o := _outside(p.read_text("utf-8")))} == {}
    assert _outside("def f():\n    from experiments.demo_dataset import build")


def modules_by_name() -> dict[str, str]:
    """Returns the source of each module by dotted name; a package is its ``__init__``."""
    paths = {".".join(p.relative_to(_PACKAGE.parent).with_suffix("").parts): p for p in _modules()}
    return {name.removesuffix(".__init__"): p.read_text("utf-8") for name, p in paths.items()}


def cycle(sources: Mapping[str, str]) -> list[str]:
    """Returns modules that import each other in a cycle, also within functions."""
    graph = {}
    for name, source in sources.items():
        nearest = {
            next(filter(sources.__contains__, _parents(other)), name) for other in imports(source)
        }
        graph[name] = nearest - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def _parents(name: str) -> list[str]:
    """Returns a dotted name and the names of the packages that contain it, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def test_package_imports_have_no_cycle():
    assert not cycle(modules_by_name())


@pytest.mark.parametrize(
    "line",
    ["from cirag_jax.commands.b import name", "def f():\n    from cirag_jax.commands import b"],
)
def test_cycle_two_modules_is_found(line):
    sources = {"cirag_jax.commands.a": line, "cirag_jax.commands.b": "import cirag_jax.commands.a"}
    assert set(cycle(sources)) == set(sources)
    assert not cycle({**sources, "cirag_jax.commands.b": "import json"})


def test_layers_are_complete():
    found = {
        p.stem for p in _PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert found - {"__init__"} == set(LAYERS)


@pytest.mark.parametrize(
    "line",
    [
        "from cirag_jax.commands import answer",
        "from cirag_jax import training",
        "import cirag_jax.commands.answer",
        "def f():\n    from cirag_jax.training import aligner",
    ],
)
def test_upward_import_is_found(line):
    assert upward("cirag_jax.methods.cirag.method", line)
    assert not upward("cirag_jax.commands.compare", line)
