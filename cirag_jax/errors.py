"""The one exception that means "the user can fix this", and what is checked in many places."""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(Exception):
    """Bad input: a file, a flag or a checkpoint that cannot be used as given.

    The message is one sentence that names the file, line and field where there are such. The
    command line prints it on stderr and exits with code 2, without a traceback.

    Any public function may raise it when its input cannot be used, so docstrings do not list it.
    """


class InUse(UserError):
    """Another process works in the folder, or writes the file."""


@contextlib.contextmanager
def parsing(told: str, hint: str = "") -> Iterator[None]:
    """Around a library's parser: whatever that runs into becomes a `UserError`.

    Args:
      told: what cannot be read; the reason follows in parentheses.
      hint: what the user can do, after that.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{told} ({reason}){hint}.") from error


def extra(name: str, who: str, requirements: str) -> Any:
    """A module that not every installation has.

    Args:
      name: of the module.
      who: needs it.
      requirements: the file that installs it.
    """
    try:
        with warnings.catch_warnings():  # umap says that it has no TensorFlow
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"{who} needs {name.partition('.')[0]}, which is not installed; "
            f"install {requirements} (pip install -r {requirements})."
        ) from None


def check_at_least(least: float, config: Any, *fields: str, prefix: str = "config.") -> None:
    """Raises `UserError` where a number of ``config`` is too small.

    Dots in ``fields`` lead into blocks; ``prefix`` is what the user puts before the names.
    """
    for field in fields:
        value = functools.reduce(getattr, field.split("."), config)
        if value < least:
            wanted = f"be at least {least}" if least else "not be negative"
            raise UserError(f"{prefix}{field}={value} must {wanted}.")


def check_positive(config: Any, *fields: str) -> None:
    """Raises `UserError` where a number of ``config`` is not above 0; see `check_at_least`."""
    for field in fields:
        value = functools.reduce(getattr, field.split("."), config)
        if not value > 0:
            raise UserError(f"config.{field}={value} must be above 0.")


def check_choice(field: str, value: Any, options: Iterable[Any]) -> None:
    """Raises `UserError` where the value of ``field`` is none of the options."""
    options = tuple(options)
    if value not in options:
        known = ", ".join("null" if option is None else str(option) for option in options)
        raise UserError(f"{field}={value!r} is not one of {known}.")
