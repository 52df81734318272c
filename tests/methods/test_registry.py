import dataclasses

import pytest

from cirag_jax.errors import UserError
from cirag_jax.methods import registry
from cirag_jax.methods.baselines.native_rag import NativeRagConfig
from cirag_jax.methods.cirag.settings import CiragConfig
from cirag_jax.runtime.requests import Needs
from tests.own_method import own_method


@dataclasses.dataclass(frozen=True)
class Settings:
    needs = Needs(corpus=False)


def program(question, config):
    yield
    raise AssertionError("must not be started")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules are not methods."""
    folder = tmp_path / "registry_package"
    folder.mkdir()
    for name, text in (
        ("__init__", ""),
        ("empty", ""),
        ("wrong", "METHOD = 'direct'"),
        ("broken", "import a_module_that_nobody_has"),
    ):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


@pytest.mark.parametrize(
    ("name", "settings"), [("cirag", CiragConfig), ("native_rag", NativeRagConfig)]
)
def test_find_method_folder_or_file_of_the_package_is_found(name, settings):
    assert registry.find_method(name).config is settings


def test_method_names_lists_every_method():
    names = registry.method_names()
    assert names == sorted(names) and {"cirag", "kirag", "direct", "oracle"} <= {*names}
    assert not {"baselines", "common", "registry", "prompt_digests"} & {*names}
    assert all(registry.find_method(name).config().needs.roles for name in names)


def test_find_method_dotted_path_is_found(monkeypatch):
    name = own_method(monkeypatch, "mine", program, Settings)
    assert registry.find_method(name) == registry.Method(program, Settings)


@pytest.mark.parametrize("name", ["crag", "", "common", "registry", "baselines"])
def test_find_method_unknown_name_lists_the_methods(name):
    with pytest.raises(UserError) as error:
        registry.find_method(name)
    assert str(error.value) == (
        f"config.method={name!r} is not a method; choose one of "
        f"{', '.join(registry.method_names())}, or give the dotted path of a module that defines "
        "METHOD."
    )


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("no_package_of_this_name.method", "no_package_of_this_name"),
        ("registry_package.absent", "registry_package.absent"),
        ("registry_package.absent.method", "registry_package.absent"),
    ],
)
def test_find_method_missing_module_is_named(package, name, missing):
    with pytest.raises(UserError) as error:
        registry.find_method(name)
    assert str(error.value) == (
        f"config.method={name!r} cannot be imported: no module {missing!r} on PYTHONPATH."
    )


@pytest.mark.parametrize("module", ["empty", "wrong"])
def test_find_method_module_without_method_is_refused(package, module):
    with pytest.raises(
        UserError, match=rf"{module} must define METHOD = Method\(program, config\)"
    ):
        registry.find_method(f"{package}.{module}")


def test_find_method_broken_module_raises_its_error(package):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        registry.find_method(f"{package}.broken")


@pytest.mark.parametrize(
    ("name", "block"), [("cirag", "cirag"), ("my_package.my_method", "my_method"), ("a.b.c", "c")]
)
def test_block_name_is_the_last_part_of_the_name(name, block):
    assert registry.block_name(name) == block


def test_method_block_without_method_or_block_is_empty():
    values = {"num_passages": 3}
    assert registry.method_block({"method": "a.mine", "mine": values}) == values
    assert registry.method_block({"method": "a.mine"}) == {} == registry.method_block({})
