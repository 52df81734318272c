"""Config files: which one is meant, its preset, the overrides of the command line."""

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
from cirag_jax.io import one_line

_PACKAGE = pathlib.Path(__file__).resolve().parent
# Where "configs/..." is looked up: an installed package has it inside (setup.py).
_INSTALLED = _PACKAGE / "_installed"
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent
CONFIGS = _ROOT / "configs"
_NULL_WORDS = ("null", "none", "None")
_TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
# Fields that name a model or an adapter.
_MODELS = ("adapter", "average_with", "frozen", "model", "spec", "start")


def load_config(
    path_and_preset: str,
    overrides: Sequence[str] = (),
    extend: Callable[[Any], None] | None = None,
) -> Any:
    """Loads a config file, applies ``--config.field=value`` overrides and locks the result.

    Args:
      path_and_preset: ``path.py`` or ``path.py:preset``; the preset is passed to ``get_config``.
      overrides: command-line arguments, each ``--config.field=value`` or ``--config.field value``.
        ``null`` clears a field that may be unset, and empties a tuple.
      extend: adds a command's own fields to what the file says.
    """
    config = _execute(path_and_preset)[1]
    if extend is not None:
        extend(config)
    return override(config, overrides, path_and_preset)


def function_of(path_and_preset: str) -> Callable[..., ConfigDict]:
    """Returns the function ``get_config`` of a config file."""
    return _execute(path_and_preset)[0]


def override(config: Any, overrides: Sequence[str], source: str) -> Any:
    """Applies overrides to a config, as `load_config` does, and locks it.

    ``source`` is where a message says that the config is from.
    """
    given: dict[str, list[str]] = {}  # by field; a field that is cleared has none
    words = iter(overrides)
    for word in words:
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r}: values are given as --flag=value")
        name, equals, value = word.lstrip("-").partition("=")
        key = name.partition("config.")[2]
        if not has_key(config, key):
            near = did_you_mean(key, [known for known, _ in _fields(config)], "")
            raise UserError(f"unknown config key {key!r} (of {source}){near}")
        if not equals and _type_of(config, key) not in (bool, object):
            word = "=".join([word, *itertools.islice(words, 1)])
            value = word.partition("=")[2]
        if value not in _NULL_WORDS:
            given.setdefault(key, []).append(word)
        elif _is_optional(*find_block(config, key)):
            given[key] = []
        else:
            given[key] = [word]
    for key, arguments in given.items():
        block, last = find_block(config, key)
        if arguments:
            _parse(config, key, arguments)
        else:
            block[last] = () if block.get_type(last) is tuple else None
    _check_names(config)
    return config.lock()


def _parse(config: ConfigDict, key: str, arguments: Sequence[str]) -> None:
    """Sets a field; several arguments are parts of a tuple."""
    kind, (name, equals, value) = _type_of(config, key), arguments[-1].partition("=")
    expected = _TYPES.get(kind, kind.__name__)
    if issubclass(kind, ConfigDict):
        expected = f"one of its fields (--config.{key}.field=value)"
    refusal = f"--{name.lstrip('-')}={value}: expected {expected}, got {value!r}"
    if kind is str and value in _NULL_WORDS:
        raise UserError(refusal)
    argv, parsed = ["", *arguments], flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=parsed, sys_argv=argv)
        parsed(argv)
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        refusal = refusal if equals else f"bad config override: {one_line(str(error))}"
        raise UserError(refusal) from None


def _type_of(config: ConfigDict, key: str) -> type:
    block, last = find_block(config, key)
    return block.get_type(last) if last in block else object  # an item of a tuple


def _check_names(config: ConfigDict) -> None:
    """Refuses an empty name of a model, which would be taken for none."""
    for key, value in leaves(config):
        holder, last = find_block(config, key)
        if value == "" and last in _MODELS:
            unset = ", or be null" if _is_optional(holder, last) else ""
            raise UserError(f"config.{key}={value!r} must name a model{unset}.")


def find_block(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    """The block that has the field ``key``, and its name there."""
    *parents, last = key.split(".")
    holder: Any = config
    for parent in parents:
        holder = holder[parent]
    return holder, last


def has_key(config: ConfigDict, key: str) -> bool:
    """Whether ``--config.KEY=...`` names a field of ``config``."""
    try:
        holder, last = find_block(config, key.partition("[")[0])
        return isinstance(holder, ConfigDict) and last in holder
    except (KeyError, AttributeError, TypeError):
        return False


def _is_optional(block: ConfigDict, name: str) -> bool:
    """Whether ``null`` clears the field: it is unset, a tuple, or text that may be unset."""
    if isinstance(block.get(name), str):  # a placeholder that has a value by now stays one
        fields: Any = block._fields
        return isinstance(fields[name], FieldReference)
    return name in block and isinstance(block[name], (tuple, type(None)))


def leaves(config: ConfigDict) -> Iterator[tuple[str, Any]]:
    """Yields every field and its value, those of blocks by their dotted names."""
    return (field for field in _fields(config) if not isinstance(field[1], ConfigDict))


def _fields(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields and blocks."""
    for name, value in config.items():
        yield f"{prefix}{name}", value
        if isinstance(value, ConfigDict):
            yield from _fields(value, f"{prefix}{name}.")


def did_you_mean(name: str, known: Sequence[str], dashes: str) -> str:
    """``; did you mean NAME?``, or nothing where no known name is like it."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        # A right field given without its section, or with a wrong one.
        last = name.rpartition(".")[2]
        close = [key for key in known if key.rpartition(".")[2] == last][:1]
    return f"; did you mean {dashes}{close[0]}?" if close else ""


def _execute(path_and_preset: str) -> tuple[Callable[..., Any], ConfigDict]:
    """Runs a config file; returns its ``get_config`` and the unlocked result."""
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
        where = _line_in(path, error)
        given = f" with preset {preset!r}" if preset is not None else ""
        raise UserError(
            f"config file {path}{where}{given} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"config file {path}: get_config() returned {type(config).__name__}, not a ConfigDict"
        )
    return get_config, config


@contextlib.contextmanager
def _configs_importable() -> Iterator[None]:
    """Makes ``configs`` the folder `CONFIGS`, as in the repository, while a config file runs.

    Elsewhere it is not on the path, and a package of the user may have that name.
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
    candidates = [pathlib.Path(path), _ROOT / path]  # the first, where the path is absolute
    for candidate in candidates:
        if candidate.is_file():
            return candidate, preset if colon else None
    near = [file.name for file in candidates[-1].parent.glob("*.py")]
    close = difflib.get_close_matches(candidates[-1].name, near, n=1)
    hint = f"; did you mean {pathlib.Path(path).with_name(close[0])}?" if close else ""
    raise UserError(f"--config={path_and_preset}: there is no config file {path!r}{hint}")


def _line_in(path: pathlib.Path, error: Exception) -> str:
    """``, line N`` of the config file where the error arose, or nothing."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def texts_of(value: Any, separator: str | None = None) -> list[str]:
    """A tuple of texts, or one, in which ``separator`` may stand between several; a flag may have
    made numbers of them.
    """
    if isinstance(value, (tuple, list)) or value is None:
        return [str(part) for part in value or ()]
    return [part.strip() for part in str(value).split(separator)] if separator else [str(value)]
