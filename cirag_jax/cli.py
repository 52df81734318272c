"""The command line of every launch script: flags, working directory, exit codes and result.

A launch script is a few lines::

    def main(config, workdir):
        from cirag_jax.training import aligner  # imports JAX, which --help does not need
        return aligner.train_and_evaluate(config, workdir)

    if __name__ == "__main__":
        cli.run(main, "configs/aligner.py")

Exit codes: 0 for success, 1 for a bug (with a traceback), 2 for bad input (one sentence on stderr),
75 for a failure after which the same command continues if it is run again, 130 for an interrupt
from the keyboard. Standard output carries only the result, one JSON object. Text that libraries
print there is redirected to standard error.

A lock in each workdir ensures that only one command runs there at a time. If a command has several
processes, the first process locks the workdir. The lock is released when that process ends.
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
from typing import Any, NoReturn

from absl import flags
from ml_collections import ConfigDict

from cirag_jax import config_files, config_words, processes
from cirag_jax.errors import InUse, TryAgain, UserError
from cirag_jax.io import (
    cache_folder,
    check_arguments,
    naming,
    one_line,
    replacing,
    say,
    standard_stream,
    standard_streams,
    visible,
    write_json,
)

Main = Callable[[Any, pathlib.Path], Mapping[str, Any]]

_TRY_AGAIN = 75  # the exit code of a `TryAgain`, as EX_TEMPFAIL in sysexits.h

# XLA's options for programs that give the same bits in every run: no atomic additions, and no
# choice of algorithms by measured time.
DETERMINISTIC_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")

LOCK = ".lock"  # in a workdir; locked while a command runs there

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_RECORDED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Errors of the file system that the user can fix: a full disk, missing permissions.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class PrintOnly(dict[str, Any]):
    """A result that is only printed; the command leaves its workdir unchanged."""


def run(
    main: Main,
    default_config: str,
    argv: Sequence[str] | None = None,
    *,
    default_workdir: str | None = None,
    question_workdir: str | None = None,
    resumes: bool = False,
    several_processes: bool = False,
    shared: bool = False,
    extend: Callable[[Any], None] | None = None,
) -> NoReturn:
    """Runs ``main(config, workdir)`` as a command and exits; see the module's docstring.

    Args:
      main: called with the locked config and an existing workdir. Its result is saved as
        ``result.json`` unless it is a `PrintOnly`; see `jsonable` for allowed values.
      default_config: path of the default config file, or ``path.py:preset``.
      argv: the command line, including the program's name; ``sys.argv`` by default.
      default_workdir: default of ``--workdir``; by default the flag is required.
      question_workdir: default of ``--workdir`` if ``config.question`` is set.
      resumes: whether running the same command again resumes an interrupted run.
      several_processes: whether the command supports several processes.
      shared: whether other commands may use the workdir at the same time. If so, it is neither
        locked nor written to, apart from folders passed to `run_inside`.
      extend: adds fields to the config that only this command uses.
    """
    argv = list(sys.argv if argv is None else argv)
    program = pathlib.Path(argv[0]).name
    args = flags.FlagValues()

    def join(seconds: int = processes.TIMEOUT) -> tuple[int, int]:
        address, count = args["coordinator_address"].value, args["num_processes"].value
        index, timeout = args["process_id"].value, args["process_timeout"].value
        timeout = timeout or processes.TIMEOUT
        return processes.setup_distributed(address, count, index, timeout, seconds)

    with standard_streams(), _exit_codes(program, resumes, join):
        overrides = _parse_flags(args, argv, default_config, default_workdir, question_workdir)
        if args.help:
            print(_help_text(main, argv[0], args, extend), flush=True)
            sys.exit(0)
        config = config_files.load_config(args.config, overrides, extend)
        if args.workdir is None:
            raise UserError("--workdir=DIRECTORY is required: the folder for all outputs")
        folder = args.workdir
        if question_workdir and config.get("question") is not None and not args["workdir"].present:
            folder = question_workdir
        workdir = _make_workdir(folder)
        if args.deterministic:  # Before JAX reads the variable.
            given = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = " ".join([given, *DETERMINISTIC_FLAGS])
        if config.get("engine") == "ray":  # so that Ray's workers can use the GPUs
            os.environ["JAX_PLATFORMS"] = "cpu"
        with _stdout_to_stderr() as stdout:
            process_index, process_count = join()
            if process_count > 1:
                processes.watch(program)
            if process_count > 1 and not several_processes:
                raise UserError(f"this command runs in one process, not in {process_count}")
            enable_compilation_cache()
            if process_count > 1:
                values = {"config": jsonable(config.to_dict()), "workdir": str(workdir.resolve())}
                values |= {"packages": _versions(), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
                processes.check_equal(values)
            if shared:
                result = jsonable(dict(main(config, workdir)))
            else:
                result = run_inside(workdir, config, lambda: main(config, workdir), argv)
            if process_index == 0:
                print(_printable(result), file=stdout, flush=True)
            processes.stop_watching()
    sys.exit(0)


@contextlib.contextmanager
def _exit_codes(
    program: str, resumes: bool, join: Callable[[int], tuple[int, int]]
) -> Iterator[None]:
    """Turns exceptions into a message on stderr and an exit code, in all processes of the run."""
    if logging.lastResort is not None:  # the handler of loggers without a handler
        logging.lastResort.setFormatter(_Formatter())
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, UserError):
            message, code = one_line(str(error)), _TRY_AGAIN if isinstance(error, TryAgain) else 2
        elif isinstance(error, KeyboardInterrupt):
            hint = "; progress is saved; run the same command to resume" if resumes else ""
            message, code = f"interrupted{hint}", 130
        else:
            message = _file_system_message(error)
            code = 2 if message else 1
        say(f"{program}: {message}" if message else traceback.format_exc().rstrip())
        processes.fail(error, code, program, join)
        sys.exit(code)


def _file_system_message(error: Exception) -> str | None:
    """Returns a message about a file-system error that the user can fix, or None."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename or 'a path')[:80]}... is too long for a file name"
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}"
    return None


class _Formatter(logging.Formatter):
    """Escapes control characters of log records, as `say` does."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _printable(result: Mapping[str, Any]) -> str:
    """Returns one line of JSON with escaped control characters."""
    text = json.dumps(result, ensure_ascii=False, allow_nan=False)
    return "".join(c if visible(c) == c else json.dumps(c)[1:-1] for c in text)


def run_inside(
    workdir: pathlib.Path,
    config: Any,
    work: Callable[[], Mapping[str, Any]],
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Runs ``work`` in a locked workdir, as a command or as one of its runs; returns the result.

    Args:
      workdir: the folder to lock; created if missing. The first process writes ``config.json``,
        ``environment.json`` and, unless the result is `PrintOnly`, ``result.json`` there.
      config: the config to record.
      work: the function to run; it returns the result.
      argv: the command line to record; ``sys.argv`` by default.

    Raises:
      InUse: another command is running in ``workdir``.
    """
    import jax

    argv = list(sys.argv if argv is None else argv)
    workdir.mkdir(parents=True, exist_ok=True)
    is_first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        lock = _lock(workdir, pathlib.Path(argv[0]).name) if is_first else contextlib.nullcontext()
        processes.together(lambda: stack.enter_context(lock))
        old_records = _record(workdir, config, argv) if is_first else {}
        old_files = set(workdir.iterdir())
        try:
            result = work()
        except UserError:
            if old_files.issuperset(workdir.iterdir()):  # the run has written nothing
                _restore(old_records)
            raise
        plain_result = jsonable(dict(result))
        if isinstance(result, PrintOnly):
            _restore(old_records)
        elif is_first:
            write_json(workdir / "result.json", plain_result)
    return plain_result


def _record(
    workdir: pathlib.Path, config: Any, argv: list[str]
) -> dict[pathlib.Path, bytes | None]:
    """Writes ``config.json`` and ``environment.json``; returns their old contents."""
    contents = {"config.json": config.to_dict(), "environment.json": _environment(argv)}
    paths = [workdir / name for name in contents]
    old_records = {path: path.read_bytes() if path.is_file() else None for path in paths}
    for path, content in zip(paths, contents.values(), strict=True):
        write_json(path, jsonable(content))
    return old_records


def _restore(old_records: Mapping[pathlib.Path, bytes | None]) -> None:
    for path, content in old_records.items():
        if content is None:
            path.unlink(missing_ok=True)
        else:
            with replacing(path) as temporary:
                temporary.write_bytes(content)


# ---------------------------------------------------------------------------------------- flags


def _parse_flags(
    args: flags.FlagValues,
    argv: Sequence[str],
    default_config: str,
    default_workdir: str | None,
    question_workdir: str | None,
) -> list[str]:
    """Parses all flags except ``--config.field=value`` to ``args``; returns the other arguments."""
    text = functools.partial(flags.DEFINE_string, flag_values=args)
    number = functools.partial(flags.DEFINE_integer, flag_values=args)
    default = f"default {default_workdir}" if default_workdir else "required"
    default += f", or {question_workdir} with config.question" if question_workdir else ""
    address = "host:port of process 0 (default: JAX_COORDINATOR_ADDRESS, or set by SLURM)"
    timeout = f"exit if another process sends no heartbeat for N seconds ({processes.TIMEOUT})"
    text("config", default_config, f"config file, or file.py:preset (default {default_config})")
    text("workdir", default_workdir, f"folder for all outputs ({default})")
    text("coordinator_address", None, address)
    number("num_processes", None, "default: JAX_NUM_PROCESSES", lower_bound=1)
    number("process_id", None, "default: JAX_PROCESS_ID", lower_bound=0)
    number("process_timeout", processes.TIMEOUT, timeout, lower_bound=1)
    deterministic = "a GPU computes the same bits in every run, but more slowly (docs/training.md)"
    flags.DEFINE_boolean("deterministic", False, deterministic, flag_values=args)
    flags.DEFINE_boolean("help", False, "show this help", short_name="h", flag_values=args)
    args.set_gnu_getopt(True)
    check_arguments(argv)
    try:
        rest = args(list(argv), known_only=True)
    except flags.Error as error:
        raise UserError(f"{error}") from None
    # Some libraries read absl's global flags, which must be parsed first.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS([argv[0]])
    for argument in rest[1:]:
        name = argument.lstrip("-").partition("=")[0]
        if argument.startswith("-") and not name.removeprefix("no").startswith("config."):
            hint = config_files.did_you_mean(name, list(args), "--")
            hint = hint or "; set fields of the config with --config.FIELD=VALUE"
            raise UserError(f"unknown flag --{name}{hint}")
    return rest[1:]


# ----------------------------------------------------------------------------------------- help


def _help_text(
    main: Main, program: str, args: flags.FlagValues, extend: Callable[[Any], None] | None
) -> str:
    doc = inspect.getdoc(sys.modules.get(main.__module__)) or ""
    lines = [
        *([doc.strip(), ""] if doc else []),
        f"usage: python {program} [--config=FILE.py[:preset]] [--config.FIELD=VALUE ...]"
        f" --workdir=DIRECTORY",
        "",
        *(f"  --{name:<22} {args[name].help}" for name in args if len(name) > 1),
        f"  --{'config.FIELD=VALUE':<22} set a field; null unsets an optional field",
        "",
    ]
    try:
        config = config_files.load_config(args.config, extend=extend)
    except UserError as error:
        return "\n".join([*lines, f"The fields cannot be shown: {one_line(str(error))}"])
    lines.append(f"Fields of {args.config}:")
    functions = [config_files.get_config_of(args.config), *([extend] if extend else [])]
    descriptions = config_words.describe_fields(config, functions)
    for key, value in config_files.leaves(config):
        lines.append(f"  --config.{key}={json.dumps(jsonable(value))}")
        indents: Any = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}
        lines += textwrap.wrap(descriptions[key], 100, **indents)
    return "\n".join(lines)


# --------------------------------------------------------------------------------- environment


def enable_compilation_cache() -> pathlib.Path | None:
    """Enables JAX's persistent compilation cache; returns its folder, or None if it is disabled.

    The environment variable ``CIRAG_JAX_CACHE`` sets another folder; ``0`` disables the cache. If
    the user has set ``JAX_COMPILATION_CACHE_DIR``, nothing changes.
    """
    base = cache_folder("xla")
    if base is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    # XLA may crash if it loads code that was compiled for another kind of CPU. The machines of a
    # cluster may share the home directory, so each kind of CPU has a separate folder.
    folder = base / _cpu_fingerprint()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a read-only home directory only costs compile time
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder


def _cpu_fingerprint() -> str:
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        fields = ("model name", "flags", "Features")
        text += "".join(sorted({line for line in lines if line.startswith(fields)}))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _environment(argv: Sequence[str]) -> dict[str, Any]:
    import jax

    return {
        "command": list(argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "num_processes": jax.process_count(),
        "cpu_count": os.cpu_count(),
        **_git_state(),
    }


def _versions() -> dict[str, str]:
    import importlib.metadata

    versions = {}
    for package in _RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _git_state() -> dict[str, Any]:
    """Returns the git commit and whether files are modified; an installed package has no commit."""
    # Without locks, because a killed command would leave git's lock behind.
    command = ["git", "--no-optional-locks", "-C", str(_ROOT), "describe", "--always"]
    command += ["--abbrev=40", "--dirty", "--exclude=*"]
    commit = ""
    if (_ROOT / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            git = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            commit = git.stdout.strip()
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
    """Locks a workdir; the kernel releases the lock when the process ends."""
    path = workdir / LOCK
    with path.open("ab+", buffering=0) as file:  # a buffer would be written again on close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(
                f"--workdir={workdir} is in use by "
                f"{file.read().decode(errors='replace') or 'another command'}; wait until it ends "
                "or use another --workdir"
            ) from None
        except OSError as error:
            say(f"WARNING: cannot lock {workdir} ({error.strerror}); run only one command there")
        with naming(path):
            file.truncate(0)
            file.write(f"{program} (process {os.getpid()})".encode())
        try:
            yield
        finally:
            file.truncate(0)
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have it open


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[Any]:
    """Redirects standard output to standard error, also for C++ libraries and child processes.

    Yields a stream to the real standard output.
    """
    stdout, saved = sys.stdout, None
    stdout.flush()
    with contextlib.suppress(OSError, ValueError):  # a captured stream has no descriptor
        if stdout.fileno() == 1:
            saved = os.dup(1)
            os.dup2(2, 1)
            result = open(saved, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            stdout = standard_stream(result)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield stdout
    finally:
        if saved is not None:
            stdout.close()
            os.dup2(saved, 1)
            os.close(saved)


def jsonable(value: Any) -> Any:
    """Converts a value to JSON types: arrays to lists, paths to text, NaN and infinity to null."""
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
    raise TypeError(f"a result cannot contain {type(value).__name__}")
