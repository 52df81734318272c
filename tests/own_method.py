"""A method outside of the package, like one that a user wrote."""

import sys
import types

from cirag_jax.methods.registry import Method


def own_method(monkeypatch, name, program, settings) -> str:
    """Makes a method importable; returns its name for ``config.method``."""
    package, module = types.ModuleType("own_methods"), types.ModuleType(f"own_methods.{name}")
    module.METHOD = Method(program, settings)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__
