"""Config files: which one is meant, its preset, the overrides of the command line."""

import contextlib
import copy
import difflib
import inspect
import pathlib
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from absl import flags
from ml_collections import ConfigDict, FieldReference, config_flags

from cirag_jax.errors import UserError
from cirag_jax.io import one_line

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_NULL_WORDS = ("null", "none", "None")
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
    config = _execute_config_file(path_and_preset)
    if extend is not None:
        extend(config)
    return override(config, overrides, path_and_preset)


def override(config: Any, overrides: Sequence[str], source: str) -> Any:
    """Applies overrides to a config, as `load_config` does, and locks it.

    ``source`` is where a message says that the config is from.
    """
    arguments, cleared = _check_overrides(config, overrides, source)
    parsed = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=parsed, sys_argv=["", *arguments]
        )
        rest = parsed(["", *arguments])
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise UserError(_override_message(config, arguments, error)) from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}: values are given as --flag=value")
    config = cast(ConfigDict, parsed["config"].value)
    for key in cleared:
        holder, last = find_block(config, key)
        holder[last] = () if holder.get_type(last) is tuple else None
    _check_names(config)
    return config.lock()


def _check_names(config: ConfigDict) -> None:
    """Refuses an empty name of a model, which would be taken for none."""
    for key, value in leaves(config):
        holder, last = find_block(config, key)
        if value == "" and last in _MODELS:
            unset = ", or be null" if _is_optional(holder, last) else ""
            raise UserError(f"config.{key}={value!r} must name a model{unset}.")


def copy_without(config: Any, *fields: str) -> Any:
    """An unlocked copy of a config, which keeps the types of unset fields, without ``fields``."""
    config = copy.deepcopy(config).unlock()
    for field in fields:
        del config[field]
    return config


def _check_overrides(
    config: ConfigDict, arguments: Sequence[str], source: str
) -> tuple[list[str], list[str]]:
    """Returns the overrides left to parse and the keys to clear; refuses unknown keys."""
    left, cleared = [], []
    for argument in arguments:
        if not argument.startswith("-"):
            left.append(argument)
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        key = name.partition("config.")[2]
        if not has_key(config, key):
            raise UserError(
                f"unknown config key {key!r} (of {source}){did_you_mean(key, _keys(config), '')}"
            )
        holder, last = find_block(config, key)
        is_null = bool(equals) and value in _NULL_WORDS
        if is_null and _is_optional(holder, last):
            cleared.append(key)
        elif is_null and isinstance(holder.get(last), str):
            raise UserError(f"--{name}={value}: expected text, got {value!r}")
        else:
            left.append(argument)
    return left, cleared


def _override_message(config: ConfigDict, arguments: Sequence[str], error: Exception) -> str:
    """One sentence for an override that ml_collections refused."""
    text = one_line(str(error))
    for argument in arguments:
        name, equals, value = argument.lstrip("-").partition("=")
        if f"{name}=" not in text and f"{name} " not in f"{text} " and len(arguments) > 1:
            continue
        key = name.partition("config.")[2]
        with contextlib.suppress(KeyError, AttributeError, ValueError, TypeError):
            expected = _type_of(config, key)
            if equals:
                return f"--{name}={value}: expected {expected}, got {value!r}"
    return f"bad config override: {text}"


def _type_of(config: ConfigDict, key: str) -> str:
    holder, last = find_block(config, key)
    kind = holder.get_type(last)
    if issubclass(kind, ConfigDict):
        return f"one of its fields (--config.{key}.field=value)"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, kind.__name__)


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


def leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field and its value, those of blocks by their dotted names."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _keys(config: ConfigDict, prefix: str = "") -> list[str]:
    """Fields and blocks."""
    found = []
    for name, value in config.items():
        found.append(prefix + name)
        if isinstance(value, ConfigDict):
            found += _keys(value, f"{prefix}{name}.")
    return found


def did_you_mean(name: str, known: Sequence[str], dashes: str) -> str:
    """``; did you mean NAME?``, or nothing where no known name is like it."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        # A right field given without its section, or with a wrong one.
        last = name.rpartition(".")[2]
        close = [key for key in known if key.rpartition(".")[2] == last][:1]
    return f"; did you mean {dashes}{close[0]}?" if close else ""


def _execute_config_file(path_and_preset: str) -> ConfigDict:
    """Runs the file's ``get_config`` and returns its unlocked result."""
    path, preset = _find_config_file(path_and_preset)
    module = types.ModuleType("config_file")
    module.__file__ = str(path)
    arguments = () if preset is None else (preset,)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
        exec(code, module.__dict__)
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
    return config


def _find_config_file(path_and_preset: str) -> tuple[pathlib.Path, str | None]:
    path, colon, preset = path_and_preset.partition(":")
    candidates = [pathlib.Path(path)]
    if not candidates[0].is_absolute():
        candidates.append(_ROOT / path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate, preset if colon else None
    beside = [file.name for file in candidates[-1].parent.glob("*.py")]
    close = difflib.get_close_matches(candidates[-1].name, beside, n=1)
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
