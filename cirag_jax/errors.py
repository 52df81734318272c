"""The exception for errors that the user can fix, and checks that raise it."""

import contextlib
import functools
import importlib
import pathlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(Exception):
    """Bad input: a file, a flag or a checkpoint that cannot be used.

    The message is one sentence that names the file, line and field, if there are any. The command
    line prints it on stderr and exits with code 2, without a traceback. Any public function may
    raise it on bad input, so docstrings do not list it.
    """


class TryAgain(UserError):
    """A failure after which running the same command again continues. Its exit code is 75."""


class InUse(UserError):
    """Raised if another process is using a folder or file."""


@contextlib.contextmanager
def parsing(problem: str, hint: str = "") -> Iterator[None]:
    """Turns every error of a library's parser into a `UserError`.

    The message is ``problem``, the reason in parentheses, and ``hint``.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust panics are not Exceptions
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{problem} ({reason}){hint}.") from error


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, a group of optional packages.

    An installed package has extras; the repository has a requirements file for each of them.
    """
    file = f"requirements-{extra}.txt"
    in_repository = (pathlib.Path(__file__).resolve().parents[1] / file).is_file()
    return f"pip install -r {file}" if in_repository else f'pip install "cirag-jax[{extra}]"'


def import_optional(name: str, feature: str, extra: str) -> Any:
    """Imports an optional package.

    Args:
      name: the module to import.
      feature: the feature that needs the package, for the error message.
      extra: the extra that contains the package; see `install_command`.
    """
    try:
        with warnings.catch_warnings():  # umap warns about missing TensorFlow
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"{feature} needs {name.partition('.')[0]}, which is not installed; "
            f"run: {install_command(extra)}"
        ) from None


def check_at_least(least: float, config: Any, *fields: str, prefix: str = "config.") -> None:
    """Raises `UserError` if a field of ``config`` is less than ``least``.

    Fields of blocks have dotted names. ``prefix`` precedes the names in the message.
    """
    for field in fields:
        value = functools.reduce(getattr, field.split("."), config)
        if value < least:
            limit = f"be at least {least}" if least else "not be negative"
            raise UserError(f"{prefix}{field}={value} must {limit}.")


def check_positive(config: Any, *fields: str) -> None:
    """Raises `UserError` if a field of ``config`` is not above 0; see `check_at_least`."""
    for field in fields:
        value = functools.reduce(getattr, field.split("."), config)
        if not value > 0:
            raise UserError(f"config.{field}={value} must be above 0.")


def check_choice(field: str, value: Any, options: Iterable[Any]) -> None:
    """Raises `UserError` if the value of ``field`` is not one of the options."""
    options = tuple(options)
    if value not in options:
        choices = ", ".join("null" if option is None else str(option) for option in options)
        raise UserError(f"{field}={value!r} is not one of {choices}.")
