"""The registry of methods, which finds a method (a module that defines ``METHOD``) by name."""

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from cirag_jax import methods
from cirag_jax.errors import UserError
from cirag_jax.methods import baselines
from cirag_jax.runtime.requests import Program
from cirag_jax.types import Prediction, Question

_NOT_METHODS = ("baselines", "common", "registry", "prompt_digests")


@dataclasses.dataclass(frozen=True)
class Method:
    """A question-answering method.

    Attributes:
      program: generator function that answers a question. The question has only its id and text,
        unless the settings' `Needs` include gold annotations.
      config: frozen dataclass of the settings, which a config file has in ``config.<name>``. The
        attribute ``needs`` of the dataclass is a `Needs`.
      render: builds a conversation with each `Prompt` of the method, given the settings. A prompt
        file may replace these prompts.
    """

    program: Callable[[Question, Any], Program[Prediction]]
    config: type[Any]
    render: Callable[[Any], Any] = lambda settings: None


def method_names() -> list[str]:
    """Returns the names of the built-in methods."""
    folders = (module.name for module in pkgutil.iter_modules(methods.__path__))
    files = (module.name for module in pkgutil.iter_modules(baselines.__path__))
    return sorted({*folders, *files} - {*_NOT_METHODS})


def find_method(name: str) -> Method:
    """Returns the method called ``name``.

    Args:
      name: a folder of ``cirag_jax/methods``, a file of ``cirag_jax/methods/baselines``, or the
        dotted path of any other module, such as ``my_package.my_method``.
    """
    module = method_module(name)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"config.method={name!r} cannot be imported: no module {error.name!r} on PYTHONPATH."
        ) from None
    method = getattr(imported, "METHOD", None)
    if not isinstance(method, Method):
        raise UserError(
            f"config.method={name!r}: the module {module} must define "
            "METHOD = Method(program, config)."
        )
    return method


def method_module(name: str) -> str:
    """Returns the dotted path of the module that defines a method."""
    if "." in name:
        return name
    if name not in method_names():
        raise UserError(
            f"config.method={name!r} is not a method; choose one of {', '.join(method_names())}, "
            "or give the dotted path of a module that defines METHOD."
        )
    is_file = importlib.util.find_spec(f"{baselines.__name__}.{name}") is not None
    return f"{baselines.__name__}.{name}" if is_file else f"{methods.__name__}.{name}.method"


def block_name(name: str) -> str:
    """Returns the name of a method's config block: the last part of its dotted name."""
    return name.rpartition(".")[2]


def method_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings block of ``config.method``; empty if the config names no method."""
    return config.get(block_name(config.get("method", "")), {})
