"""The house: one order of layers, from nouns to commands, and every import points down."""

import ast
import pathlib

import pytest

_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "cirag_jax"

# From the ground up. A module may import its own layer and those before it, anywhere in its text.
LAYERS = (
    "types", "errors", "validation", "io", "sqlite", "processes", "config_files", "config_words",
    "cli", "sharding", "datasets", "models", "triples", "retrieval", "llm", "runtime",
    "methods", "distill", "grade", "evaluation", "reports", "training", "commands",
)  # fmt: skip


def _modules() -> list[pathlib.Path]:
    return sorted(_PACKAGE.rglob("*.py"))


def _layer(module: str) -> str:
    return module.split(".")[1]


def imports(source: str) -> set[str]:
    """The modules of this package that a text imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where they point"
            base = node.module or ""
            # `from cirag_jax import x` names a layer only in its alias.
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("cirag_jax.")}


def upward(name: str, source: str) -> set[str]:
    """What the module ``name`` imports from above its own layer."""
    own = LAYERS.index(_layer(name))
    return {other for other in imports(source) if LAYERS.index(_layer(other)) > own}


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(_PACKAGE)))
def test_every_import_points_down(path):
    name = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
    if name == "cirag_jax.__init__":
        return  # the package itself
    assert not upward(name, path.read_text("utf-8"))


def _outside(source: str) -> set[str]:
    """The other folders of the repository that a text imports from."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names & {"configs", "experiments", "launch", "tests"}


def test_package_imports_no_other_folder_of_the_repository():
    assert {str(p): o for p in _modules() if (o := _outside(p.read_text("utf-8")))} == {}
    assert _outside("def f():\n    from experiments.demo_dataset import build")


def test_every_layer_is_named():
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
def test_an_upward_import_is_seen(line):
    assert upward("cirag_jax.methods.cirag.method", line)
    assert not upward("cirag_jax.commands.compare", line)
