"""What every launch script shares: flags, the working directory, exit codes, the printed result.

A launch script is a few lines::

    def main(config, workdir):
        from cirag_jax.training import aligner  # JAX is imported late: --help answers at once
        return aligner.train_and_evaluate(config, workdir)

    if __name__ == "__main__":
        cli.run(main, "configs/aligner.py")

Exit codes: 0 success, 1 a fault of ours (with a traceback), 2 bad input or a bad flag (one sentence
on stderr), 130 interrupted from the keyboard. Standard output carries one JSON object, the result,
and nothing else; whatever a library prints there meanwhile goes to standard error.

One command at a time works in a workdir: a lock on it is held until the process ends, however it
ends. Of several processes the first holds it for all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import inspect
import json
import logging
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from absl import flags
from ml_collections import ConfigDict

from cirag_jax import config_files, config_words, processes
from cirag_jax.errors import InUse, UserError
from cirag_jax.io import cache_folder, naming, one_line, replacing, say, visible, write_json

Main = Callable[[Any, pathlib.Path], Mapping[str, Any]]

LOCK = ".lock"  # in a workdir: locked while a command works there

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_RECORDED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# What the user can mend when a file cannot be written: no room, no right.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class Shown(dict[str, Any]):
    """A result that is printed and not kept: the command leaves its workdir as it found it."""


def run(
    main: Main,
    default_config: str,
    argv: Sequence[str] | None = None,
    *,
    default_workdir: str | None = None,
    resumes: bool = False,
    several_processes: bool = False,
    shared: bool = False,
    extend: Callable[[Any], None] | None = None,
) -> NoReturn:
    """Runs ``main(config, workdir)`` as a command and exits with a code of the module's docstring.

    Args:
      main: takes the locked ``ConfigDict`` and the existing working directory; returns the result,
        a mapping that JSON can hold once arrays are listed; NaN and infinities become null. It is
        saved as ``result.json``, except a `Shown`.
      default_config: path of the default config file, or ``path.py:preset``; see
        `config_files.load_config`.
      argv: the command line with the program's name first; ``sys.argv`` by default.
      default_workdir: the default of ``--workdir``; without it the flag is required.
      resumes: whether the same command resumes an interrupted one, which its message then says.
      several_processes: whether the processes of a run share the work; otherwise they are refused.
      shared: whether other commands may use the workdir at the same time: it is neither locked nor
        written to, only the folders that `run_inside` is given.
      extend: adds the command's own fields to the config; see `config_files.load_config`.
    """
    argv = list(sys.argv if argv is None else argv)
    with _exit_codes(pathlib.Path(argv[0]).name, resumes):
        own, overrides = _parse_own_flags(argv, default_config, default_workdir)
        if own.help:
            _tell(_help_text(main, argv[0], own, extend), sys.stdout)
            sys.exit(0)
        config = config_files.load_config(own.config, overrides, extend)
        if own.workdir is None:
            raise UserError(
                "--workdir=DIRECTORY is required: the folder that receives every output"
            )
        workdir = _make_workdir(own.workdir)
        if config.get("engine") == "ray":  # JAX would take GPUs of this machine from its workers
            os.environ["JAX_PLATFORMS"] = "cpu"
        with _stdout_to_stderr() as stdout:
            process_index, process_count = processes.setup_distributed(
                own.coordinator_address, own.num_processes, own.process_id, own.process_timeout
            )
            if process_count > 1 and not several_processes:
                raise UserError(f"this command runs in one process, not in {process_count}")
            enable_compilation_cache()
            if shared:
                result = jsonable(dict(main(config, workdir)))
            else:
                result = run_inside(workdir, config, lambda: main(config, workdir), argv)
            if process_index == 0:
                _tell(_printable(result), stdout)
    sys.exit(0)


@contextlib.contextmanager
def _exit_codes(program: str, resumes: bool) -> Iterator[None]:
    """Turns exceptions into a message on stderr and an exit code, as in the module's docstring."""
    if logging.lastResort is not None:  # writes what no other handler is there for
        logging.lastResort.setFormatter(_Formatter())
    try:
        yield
    except UserError as error:
        say(f"{program}: {one_line(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        hint = "; what is recorded is kept, and the same command resumes from there"
        say(f"{program}: interrupted{hint if resumes else ''}")
        sys.exit(130)
    except Exception as error:
        message = _unwritable(error)
        say(f"{program}: {message}" if message else traceback.format_exc().rstrip())
        sys.exit(2 if message else 1)


def _unwritable(error: Exception) -> str | None:
    """What a user can mend of an error of the file system: names, room and rights."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename or 'a path')[:80]}... is too long for the name of a file"
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}"
    return None


class _Formatter(logging.Formatter):
    """Writes warnings as `say` would."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _tell(text: str, file: TextIO) -> None:
    """Prints a line, unless nobody reads on, as behind ``| head``."""
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:
        # What is still in the file's buffer would fail once more when it is closed.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), file.fileno())


def _printable(result: Mapping[str, Any]) -> str:
    """The result as one line of JSON in which every character that drives a terminal is escaped."""
    text = json.dumps(result, ensure_ascii=False, allow_nan=False)
    if visible(text) == text:
        return text
    return "".join(c if visible(c) == c else json.dumps(c)[1:-1] for c in text)


def run_inside(
    workdir: pathlib.Path,
    config: Any,
    work: Callable[[], Mapping[str, Any]],
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Runs a command, or a part of one that leaves a folder as a command does; returns its result.

    Args:
      workdir: locked until ``work`` returns; gets ``config.json``, ``environment.json`` and, unless
        the result is `Shown`, ``result.json``. The first of several processes does so for all.
      config: of the part.
      work: returns the result.
      argv: the command line, ``sys.argv`` by default.

    Raises:
      InUse: another command works in ``workdir``.
    """
    import jax

    argv = list(sys.argv if argv is None else argv)
    workdir.mkdir(parents=True, exist_ok=True)
    first = jax.process_index() == 0
    with contextlib.ExitStack() as held:
        lock = _lock(workdir, pathlib.Path(argv[0]).name) if first else contextlib.nullcontext()
        processes.together(lambda: held.enter_context(lock))
        before = _record(workdir, config, argv) if first else {}
        there = set(workdir.iterdir())
        try:
            returned = work()
        except UserError:
            if there.issuperset(workdir.iterdir()):  # refused before it left anything else
                _restore(before)
            raise
        result = jsonable(dict(returned))
        if isinstance(returned, Shown):
            _restore(before)
        elif first:
            write_json(workdir / "result.json", result)
    return result


def _record(
    workdir: pathlib.Path, config: Any, argv: list[str]
) -> dict[pathlib.Path, bytes | None]:
    """Writes ``config.json`` and ``environment.json``; returns what they held before."""
    contents = {"config.json": config.to_dict(), "environment.json": _environment(argv)}
    paths = [workdir / name for name in contents]
    before = {path: path.read_bytes() if path.is_file() else None for path in paths}
    for path, content in zip(paths, contents.values(), strict=True):
        write_json(path, jsonable(content))
    return before


def _restore(before: Mapping[pathlib.Path, bytes | None]) -> None:
    for path, content in before.items():
        if content is None:
            path.unlink(missing_ok=True)
        else:
            with replacing(path) as aside:
                aside.write_bytes(content)


# ---------------------------------------------------------------------------------------- flags


def _parse_own_flags(
    argv: Sequence[str], default_config: str, default_workdir: str | None
) -> tuple[flags.FlagValues, list[str]]:
    """Parses the command's own flags; returns them and the rest (``--config.field=value``)."""
    for argument in argv:
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            raise UserError(f"the argument {argument!r} is not valid UTF-8")
    own = flags.FlagValues()
    text = functools.partial(flags.DEFINE_string, flag_values=own)
    number = functools.partial(flags.DEFINE_integer, flag_values=own)
    default = f"default {default_workdir}" if default_workdir else "required"
    address = "host:port of process 0; else JAX_COORDINATOR_ADDRESS, SLURM's"
    silent = (
        f"seconds without a heartbeat after which a process ends the others ({processes.TIMEOUT})"
    )
    text("config", default_config, f"config file, or file.py:preset (default {default_config})")
    text("workdir", default_workdir, f"folder that receives every output ({default})")
    text("coordinator_address", None, address)
    number("num_processes", None, "number of processes; else JAX_NUM_PROCESSES", lower_bound=1)
    number("process_id", None, "index of this process; else JAX_PROCESS_ID", lower_bound=0)
    number("process_timeout", processes.TIMEOUT, silent, lower_bound=1)
    flags.DEFINE_boolean("help", False, "show this help", short_name="h", flag_values=own)
    own.set_gnu_getopt(True)
    try:
        rest = own(list(argv), known_only=True)
    except flags.Error as error:
        raise UserError(f"{error}") from None
    # Libraries that read absl's global flags find them parsed, with their defaults.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS([argv[0]])
    known = list(own)
    for argument in rest[1:]:
        name = argument.lstrip("-").partition("=")[0]
        if argument.startswith("-") and not name.removeprefix("no").startswith("config."):
            hint = config_files.did_you_mean(name, known, "--")
            hint = hint or "; fields of the config are set by --config.FIELD=VALUE"
            raise UserError(f"unknown flag --{name}{hint}")
    return own, rest[1:]


# ----------------------------------------------------------------------------------------- help


def _help_text(
    main: Main, program: str, own: flags.FlagValues, extend: Callable[[Any], None] | None
) -> str:
    doc = inspect.getdoc(sys.modules.get(main.__module__)) or ""
    lines = [
        *([doc.strip(), ""] if doc else []),
        f"usage: python {program} [--config=FILE.py[:preset]] [--config.FIELD=VALUE ...]"
        f" --workdir=DIRECTORY",
        "",
        *(f"  --{name:<22} {own[name].help}" for name in own if len(name) > 1),
        f"  --{'config.FIELD=VALUE':<22} set one field; null clears a field that may be unset",
        "",
    ]
    try:
        config = config_files.load_config(own.config, extend=extend)
    except UserError as error:
        return "\n".join([*lines, f"The fields are not shown: {one_line(str(error))}"])
    lines.append(f"Fields of {own.config}:")
    functions = [config_files.function_of(own.config), *([extend] if extend else [])]
    descriptions = config_words.describe_fields(config, functions)
    for key, value in config_files.leaves(config):
        lines.append(f"  --config.{key}={json.dumps(jsonable(value))}")
        indents: Any = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}
        lines += textwrap.wrap(descriptions[key], 100, **indents)
    return "\n".join(lines)


# --------------------------------------------------------------------------------- environment


def enable_compilation_cache() -> pathlib.Path | None:
    """Turns on JAX's persistent compilation cache; returns its folder, or None where it is off.

    ``CIRAG_JAX_CACHE`` names another folder or, as ``0``, switches the cache off; a
    ``JAX_COMPILATION_CACHE_DIR`` of the user's own is left alone.
    """
    base = cache_folder("xla")
    if base is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    # XLA warns loudly, and may crash, when code compiled for one CPU is loaded on another, as
    # happens with a home directory shared by a cluster: one folder for each kind of CPU.
    folder = base / _cpu_fingerprint()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # A read-only home costs compile time, nothing else.
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder


def _cpu_fingerprint() -> str:
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        wanted = ("model name", "flags", "Features")
        text += "".join(sorted({line for line in lines if line.startswith(wanted)}))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _environment(argv: Sequence[str]) -> dict[str, Any]:
    import importlib.metadata

    import jax

    versions = {}
    for package in _RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": list(argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "num_processes": jax.process_count(),
        "cpu_count": os.cpu_count(),
        **_git_state(),
    }


def _git_state() -> dict[str, Any]:
    """The commit that the repository is at; of an installed package there is none."""
    # Without locks: a command that is killed while git looks would leave git's behind.
    command = ["git", "--no-optional-locks", "-C", str(_ROOT), "describe", "--always"]
    command += ["--abbrev=40", "--dirty", "--exclude=*"]
    commit = ""
    if (_ROOT / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            commit = done.stdout.strip()
    is_modified = commit.endswith("-dirty")
    return {"git_commit": commit.removesuffix("-dirty") or None, "git_modified": is_modified}


# --------------------------------------------------------------------------------------- output


def _make_workdir(name: str) -> pathlib.Path:
    workdir = pathlib.Path(name).expanduser()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        reason = "it is a file" if workdir.is_file() else error.strerror or error
        raise UserError(f"--workdir={name}: cannot write there ({reason})") from None
    return workdir


@contextlib.contextmanager
def _lock(workdir: pathlib.Path, program: str) -> Iterator[None]:
    """Holds a workdir's lock, which the kernel releases however the process dies.

    Raises:
      InUse: another command holds it.
    """
    path = workdir / LOCK
    with path.open("ab+", buffering=0) as file:  # a buffer would be written once more at the end
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(
                f"--workdir={workdir} is in use by "
                f"{file.read().decode(errors='replace') or 'another command'}; wait for its end or "
                "choose another --workdir"
            ) from None
        except OSError as error:
            say(f"WARNING: {workdir} cannot be locked ({error.strerror}): run one command there")
        with naming(path):
            file.truncate(0)
            file.write(f"{program} (process {os.getpid()})".encode())
        try:
            yield
        finally:
            file.truncate(0)
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have the file open still


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[Any]:
    """Sends standard output, that of C++ libraries and child processes too, to standard error.

    Yields a stream on the real standard output.
    """
    stdout, saved = sys.stdout, None
    stdout.flush()
    with contextlib.suppress(OSError, ValueError):  # a captured stream has no descriptor
        if stdout.fileno() == 1:
            saved = os.dup(1)
            os.dup2(2, 1)
            stdout = open(saved, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield stdout
    finally:
        if saved is not None:
            stdout.close()
            os.dup2(saved, 1)
            os.close(saved)


def jsonable(value: Any) -> Any:
    """The value as JSON's own types: arrays as lists, paths as text, NaN and infinities null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Mapping, ConfigDict)):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return jsonable(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a result cannot hold {type(value).__name__}")
