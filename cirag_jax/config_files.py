"""Loading of config files with presets and command-line overrides."""

import contextlib
import difflib
import importlib.machinery
import importlib.util
import inspect
import itertools
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, FieldReference, config_flags

from cirag_jax.errors import UserError
from cirag_jax.io import is_utf8, one_line
from cirag_jax.validation import TYPE_NAMES

_PACKAGE = pathlib.Path(__file__).resolve().parent
# An installed package contains a copy of the folder "configs" here (setup.py).
_INSTALLED = _PACKAGE / "_installed"
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent
CONFIGS = _ROOT / "configs"
_NULL_WORDS = ("null", "none", "None")
# Fields that name a model or an adapter.
_MODEL_FIELDS = ("adapter", "average_with", "frozen", "model", "spec", "start")


def load_config(
    path_and_preset: str, overrides: Sequence[str] = (), extend: Callable[[Any], None] | None = None
) -> Any:
    """Loads a config file, applies overrides and locks the result.

    Args:
      path_and_preset: ``path.py`` or ``path.py:preset``; the preset is passed to ``get_config``.
      overrides: command-line arguments, ``--config.field=value`` or ``--config.field value``.
        ``null`` unsets an optional field and empties a tuple.
      extend: adds fields to the config that only one command uses.
    """
    config = _execute(path_and_preset)[1]
    if extend is not None:
        extend(config)
    return override(config, overrides, path_and_preset)


def get_config_of(path_and_preset: str) -> Callable[..., ConfigDict]:
    """Returns the function ``get_config`` of a config file."""
    return _execute(path_and_preset)[0]


def override(config: Any, overrides: Sequence[str], source: str) -> Any:
    """Applies overrides to a config from ``source`` and locks it; see `load_config`."""
    by_field: dict[str, list[str]] = {}  # arguments by field; an empty list unsets the field
    words = iter(overrides)
    for word in words:
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r}: values are given as --flag=value")
        name, equals, value = word.lstrip("-").partition("=")
        key = name.partition("config.")[2]
        if not has_key(config, key):
            hint = did_you_mean(key, [known for known, _ in _fields(config)], "")
            raise UserError(f"unknown config key {key!r} (of {source}){hint}")
        if not equals and _type_of(config, key) not in (bool, object):
            word = "=".join([word, *itertools.islice(words, 1)])
            value = word.partition("=")[2]
        if value not in _NULL_WORDS:
            by_field.setdefault(key, []).append(word)
        else:
            by_field[key] = [] if _is_optional(*find_block(config, key)) else [word]
    for key, arguments in by_field.items():
        block, last = find_block(config, key)
        if arguments:
            _parse(config, key, arguments)
        else:
            block[last] = () if block.get_type(last) is tuple else None
    _check_texts(config)
    return config.lock()


def _parse(config: ConfigDict, key: str, arguments: Sequence[str]) -> None:
    """Sets a field; several arguments set the items of a tuple."""
    kind, (name, equals, value) = _type_of(config, key), arguments[-1].partition("=")
    expected = TYPE_NAMES.get(kind, kind.__name__)
    if issubclass(kind, ConfigDict):
        expected = f"one of its fields (--config.{key}.field=value)"
    problem = f"--{name.lstrip('-')}={value}: expected {expected}, got {value!r}"
    if kind is str and value in _NULL_WORDS and value != "none":  # A value of config.tracker.
        raise UserError(problem)
    block, last = find_block(config, key)
    target = block
    if kind in (bool, int, float, str):  # ml_collections is slow with blocks of many fields.
        block = ConfigDict({last: kind()})
    argv = ["", *(word.replace(f"config.{key}", f"config.{last}", 1) for word in arguments)]
    parsed = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", block, flag_values=parsed, sys_argv=argv)
        parsed(argv)
        if block is not target:
            target[last] = block[last]
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        problem = problem if equals else f"bad config override: {one_line(str(error))}"
        raise UserError(problem) from None


def _type_of(config: ConfigDict, key: str) -> type:
    block, last = find_block(config, key)
    return block.get_type(last) if last in block else object  # the item of a tuple


def _check_texts(config: ConfigDict) -> None:
    """Rejects texts that are not valid UTF-8, and empty names of models.

    Other code would treat an empty name as no model.
    """
    for key, value in leaves(config):
        block, last = find_block(config, key)
        for text in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(text, str) and not is_utf8(text):
                raise UserError(f"config.{key}={value!r} is not valid UTF-8.")
        if value == "" and last in _MODEL_FIELDS:
            unset = ", or be null" if _is_optional(block, last) else ""
            raise UserError(f"config.{key}={value!r} must name a model{unset}.")


def find_block(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    """Returns the block that contains the dotted ``key``, and the field's name in the block."""
    *parents, last = key.split(".")
    block: Any = config
    for parent in parents:
        block = block[parent]
    return block, last


def has_key(config: ConfigDict, key: str) -> bool:
    """Returns whether ``config`` has the dotted ``key``, possibly with an index."""
    return key.partition("[")[0] in dict(_fields(config))


def _is_optional(block: ConfigDict, name: str) -> bool:
    """Returns whether ``null`` is allowed, that is, for tuples and for optional fields."""
    if isinstance(block.get(name), str):  # an optional field with a value
        fields: Any = block._fields
        return isinstance(fields[name], FieldReference)
    return name in block and isinstance(block[name], (tuple, type(None)))


def leaves(config: ConfigDict) -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every field, without the blocks themselves."""
    return (field for field in _fields(config) if not isinstance(field[1], ConfigDict))


def _fields(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        yield f"{prefix}{name}", value
        if isinstance(value, ConfigDict):
            yield from _fields(value, f"{prefix}{name}.")


def did_you_mean(name: str, known: Sequence[str], dashes: str) -> str:
    """Returns ``; did you mean NAME?``, or an empty string if no known name is similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        # An existing field in a wrong block, or without its block.
        last = name.rpartition(".")[2]
        close = [key for key in known if key.rpartition(".")[2] == last][:1]
    return f"; did you mean {dashes}{close[0]}?" if close else ""


def _execute(path_and_preset: str) -> tuple[Callable[..., Any], ConfigDict]:
    """Executes a config file; returns its ``get_config`` and the unlocked config."""
    path, preset = _find_config_file(path_and_preset)
    module = types.ModuleType("config_file")
    module.__file__ = str(path)
    arguments = () if preset is None else (preset,)
    try:
        with _configs_importable():
            exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
            get_config = module.__dict__.get("get_config")
            if not callable(get_config):
                raise UserError(f"config file {path} defines no get_config() function")
            try:
                inspect.signature(get_config).bind(*arguments)
            except TypeError:
                needs = "takes no preset" if arguments else "needs a preset (file.py:preset)"
                raise UserError(f"config file {path} {needs}") from None
            config = get_config(*arguments)
    except UserError:
        raise
    except Exception as error:
        line = _line_in(path, error)
        with_preset = f" with preset {preset!r}" if preset is not None else ""
        raise UserError(
            f"config file {path}{line}{with_preset} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"config file {path}: get_config() returned {type(config).__name__}, not a ConfigDict"
        )
    return get_config, config


@contextlib.contextmanager
def _configs_importable() -> Iterator[None]:
    """Makes `CONFIGS` importable as ``configs`` while a config file is executed.

    Outside the repository, the folder is not on the path, and the user may have another package
    called ``configs``.
    """
    spec = importlib.util.find_spec("configs")
    if spec and str(CONFIGS) in (spec.submodule_search_locations or ()):
        yield
        return
    others = _pop_configs()
    spec = importlib.machinery.ModuleSpec("configs", None, is_package=True)
    spec.submodule_search_locations = [str(CONFIGS)]
    sys.modules["configs"] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        _pop_configs()
        sys.modules.update(others)


def _pop_configs() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "configs"]
    return {name: sys.modules.pop(name) for name in names}


def _find_config_file(path_and_preset: str) -> tuple[pathlib.Path, str | None]:
    path, colon, preset = path_and_preset.partition(":")
    candidates = [pathlib.Path(path), _ROOT / path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate, preset if colon else None
    near = [file.name for file in candidates[-1].parent.glob("*.py")]
    close = difflib.get_close_matches(candidates[-1].name, near, n=1)
    hint = f"; did you mean {pathlib.Path(path).with_name(close[0])}?" if close else ""
    raise UserError(f"--config={path_and_preset}: there is no config file {path!r}{hint}")


def _line_in(path: pathlib.Path, error: Exception) -> str:
    """Returns ``, line N`` of the config file where the error arose, or an empty string."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def texts_of(value: Any, separator: str | None = None) -> list[str]:
    """Returns the value of a field as a list of strings.

    The value is a tuple, None (an empty list), or a single string, which is split at ``separator``.
    Items that flags have parsed as numbers are converted back.
    """
    if isinstance(value, (tuple, list)) or value is None:
        return [str(part) for part in value or ()]
    return [part.strip() for part in str(value).split(separator)] if separator else [str(value)]
