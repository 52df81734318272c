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
import difflib
import errno
import fcntl
import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from absl import flags
from ml_collections import ConfigDict, config_flags

from cirag_jax.errors import UserError
from cirag_jax.io import say, visible, write_json

Main = Callable[[Any, pathlib.Path], Mapping[str, Any]]
T = TypeVar("T")

LOCK = ".lock"  # in a workdir: locked while a command works there

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_RECORDED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_NULL_WORDS = ("null", "none", "None")
# What the user can mend when a file cannot be written: no room, no right.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_A_YEAR_MS = 1000 * 3600 * 24 * 365
_meetings = itertools.count()  # of `together`: the same number in every process


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
) -> NoReturn:
    """Runs ``main(config, workdir)`` as a command and leaves the process.

    Args:
      main: gets the locked ``ConfigDict`` and the existing working directory, returns the result,
        a mapping that JSON can hold once arrays are listed; NaN and infinities become null. It is
        kept in ``result.json``, except a `Shown`.
      default_config: path of the default config file (``path.py`` or ``path.py:preset``), looked
        up in the current directory first, then in the repository.
      argv: the command line with the program's name first; ``sys.argv`` by default.
      default_workdir: used where ``--workdir`` is not given; without it the flag is required.
      resumes: whether the same command resumes an interrupted one; its message says so.
      several_processes: whether the command shares its work among the processes of a run; others
        refuse to be run in several.

    Raises:
      SystemExit: always, with the exit code of the module's docstring.
    """
    argv = list(sys.argv if argv is None else argv)
    program = pathlib.Path(argv[0]).name
    if logging.lastResort is not None:  # who writes where nobody asked for another handler
        logging.lastResort.setFormatter(_Formatter())
    try:
        code = _run(main, default_config, argv, default_workdir, several_processes)
    except UserError as error:
        say(f"{program}: {_one_line(str(error))}")
        code = 2
    except KeyboardInterrupt:
        hint = "; what is recorded is kept, and the same command resumes from there"
        say(f"{program}: interrupted{hint if resumes else ''}")
        code = 130
    except Exception as error:
        code = 1
        if isinstance(error, OSError) and error.errno in _REFUSED:
            say(f"{program}: {error.filename or 'a file'} cannot be written: {error.strerror}")
            code = 2
        else:
            say(traceback.format_exc().rstrip())
    sys.exit(code)


class _Formatter(logging.Formatter):
    """Writes warnings as `say` would."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _run(
    main: Main,
    default_config: str,
    argv: list[str],
    default_workdir: str | None,
    several_processes: bool,
) -> int:
    own, overrides = _parse_own_flags(argv, default_config, default_workdir)
    if own.help:
        print(_help_text(main, argv[0], own))
        return 0
    config = load_config(own.config, overrides)
    if own.workdir is None:
        raise UserError("--workdir=DIRECTORY is required: the folder that receives every output")
    workdir = _make_workdir(own.workdir)
    with _stdout_to_stderr() as stdout, contextlib.ExitStack() as held:
        process_index, process_count = setup_distributed(
            own.coordinator_address, own.num_processes, own.process_id
        )
        if process_count > 1 and not several_processes:
            raise UserError(f"this command runs in one process, not in {process_count}")
        enable_compilation_cache()
        lock = _lock(workdir, pathlib.Path(argv[0]).name) if process_index == 0 else None
        together(lambda: held.enter_context(lock) if lock else None)
        with _recorded(workdir, config, argv, process_index == 0) as take_back:
            found = main(config, workdir)
            if isinstance(found, Shown):
                take_back()
        result = _jsonable(found)
        if not isinstance(result, dict):
            raise TypeError(f"main returned {type(result).__name__}, not a mapping")
        if process_index == 0:
            if not isinstance(found, Shown):
                write_json(workdir / "result.json", result)
            print(_printable(result), file=stdout, flush=True)
    return 0


def _printable(result: Mapping[str, Any]) -> str:
    """The result as one line of JSON in which every character that drives a terminal is escaped."""
    text = json.dumps(result, ensure_ascii=False, allow_nan=False)
    if visible(text) == text:
        return text
    return "".join(c if visible(c) == c else json.dumps(c)[1:-1] for c in text)


def run_inside(workdir: pathlib.Path, config: Any, work: Callable[[], Mapping[str, Any]]) -> Any:
    """A part of a command that leaves its folder as a command of its own would.

    Args:
      workdir: locked while it runs; gets ``config.json``, ``environment.json``, ``result.json``.
      config: of the part.
      work: returns its result.

    Returns:
      The result as JSON holds it.

    Raises:
      UserError: another command works in ``workdir``, or ``work`` raised one.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    program = pathlib.Path(sys.argv[0]).name
    with _lock(workdir, program), _recorded(workdir, config, sys.argv, True):
        result = _jsonable(work())
        write_json(workdir / "result.json", result)
    return result


@contextlib.contextmanager
def _recorded(
    workdir: pathlib.Path, config: Any, argv: list[str], writes: bool
) -> Iterator[Callable[[], None]]:
    """Writes ``config.json`` and ``environment.json``; a refused command leaves what was there.

    Yields what takes them back.
    """
    if not writes:
        yield lambda: None
        return
    contents = {"config.json": config.to_dict(), "environment.json": _environment(argv)}
    paths = [workdir / name for name in contents]
    before = {path: path.read_bytes() if path.is_file() else None for path in paths}

    def take_back() -> None:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)

    for name, content in contents.items():
        write_json(workdir / name, _jsonable(content))
    try:
        yield take_back
    except UserError:
        take_back()
        raise


# ---------------------------------------------------------------------------------------- flags


def _parse_own_flags(
    argv: Sequence[str], default_config: str, default_workdir: str | None
) -> tuple[flags.FlagValues, list[str]]:
    """Parses the command's own flags; returns them and the rest (``--config.field=value``)."""
    for argument in argv:
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            raise UserError(f"the argument {argument!r} is not valid UTF-8")
    own = flags.FlagValues()
    where: Any = {"flag_values": own}
    flags.DEFINE_string("config", default_config, "config file, or file.py:preset", **where)
    flags.DEFINE_string("workdir", default_workdir, "folder that receives every output", **where)
    flags.DEFINE_string("coordinator_address", None, "host:port of process 0", **where)
    flags.DEFINE_integer("num_processes", None, "number of processes", lower_bound=1, **where)
    flags.DEFINE_integer("process_id", None, "index of this process", lower_bound=0, **where)
    flags.DEFINE_boolean("help", False, "show this help", short_name="h", **where)
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
        is_override = name.removeprefix("no").startswith("config.") or name.startswith("config.")
        if argument.startswith("-") and not is_override:
            raise UserError(f"unknown flag --{name}{_did_you_mean(name, known, '--')}")
    return own, rest[1:]


def load_config(path_and_preset: str, overrides: Sequence[str] = ()) -> Any:
    """Loads a config file, applies ``--config.field=value`` overrides and locks the result.

    Args:
      path_and_preset: ``path.py`` or ``path.py:preset``; the preset is passed to ``get_config``.
      overrides: command-line arguments, each ``--config.field=value`` or ``--config.field value``.
        ``null`` clears a field that may be unset.

    Raises:
      UserError: the file is missing or fails, a key is unknown, a value has the wrong type.
    """
    config = _execute_config_file(path_and_preset)
    arguments, cleared = _check_overrides(config, overrides, path_and_preset)
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
        config.update_from_flattened_dict({key: None})
    return config.lock()


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
                f"unknown config key {key!r} (of {source})"
                f"{_did_you_mean(key, _leaf_keys(config), '')}"
            )
        if equals and value in _NULL_WORDS and _is_optional(config, key):
            cleared.append(key)
        else:
            left.append(argument)
    return left, cleared


def _override_message(config: ConfigDict, arguments: Sequence[str], error: Exception) -> str:
    """One sentence for an override that ml_collections refused."""
    text = _one_line(str(error))
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
    holder, last = _holder(config, key)
    kind = holder.get_type(last)
    if issubclass(kind, ConfigDict):
        return f"one of its fields (--config.{key}.field=value)"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, kind.__name__)


def _holder(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    *parents, last = key.split(".")
    holder: Any = config
    for parent in parents:
        holder = holder[parent]
    return holder, last


def has_key(config: ConfigDict, key: str) -> bool:
    """Whether ``--config.KEY=...`` names a field of ``config``."""
    try:
        holder, last = _holder(config, key.partition("[")[0])
        return isinstance(holder, ConfigDict) and last in holder
    except (KeyError, AttributeError, TypeError):
        return False


def _is_optional(config: ConfigDict, key: str) -> bool:
    """Whether ``null`` clears the field: it is unset by default, or text or a list of things."""
    holder, last = _holder(config, key)
    return holder[last] is None or isinstance(holder[last], (str, tuple))


def _leaf_keys(config: ConfigDict, prefix: str = "") -> list[str]:
    keys = []
    for name, value in config.items():
        keys.append(prefix + name)
        if isinstance(value, ConfigDict):
            keys += _leaf_keys(value, f"{prefix}{name}.")
    return keys


def _did_you_mean(name: str, known: Sequence[str], dashes: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        # A right field given without its section, or with a wrong one.
        last = name.rpartition(".")[2]
        close = [key for key in known if key.rpartition(".")[2] == last][:1]
    return f"; did you mean {dashes}{close[0]}?" if close else ""


# --------------------------------------------------------------------------------- config files


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
    raise UserError(f"--config={path_and_preset}: there is no config file {path!r}")


def _line_in(path: pathlib.Path, error: Exception) -> str:
    """``, line N`` of the config file where the error arose, or nothing."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


# ----------------------------------------------------------------------------------------- help


def _help_text(main: Main, program: str, own: flags.FlagValues) -> str:
    doc = inspect.getdoc(sys.modules.get(main.__module__)) or ""
    default_workdir = own["workdir"].default
    lines = [
        *([doc.strip(), ""] if doc else []),
        f"usage: python {program} [--config=FILE.py[:preset]] [--config.FIELD=VALUE ...]"
        f" --workdir=DIRECTORY",
        "",
        f"  --config                 config file (default {own['config'].default})",
        "  --config.FIELD=VALUE     set one field; null clears a field that may be unset",
        "  --workdir                folder that receives every output"
        + (f" (default {default_workdir})" if default_workdir else " (required)"),
        "  --coordinator_address, --num_processes, --process_id",
        "                           several processes by hand; SLURM and JAX_COORDINATOR_ADDRESS,",
        "                           JAX_NUM_PROCESSES, JAX_PROCESS_ID are understood without them",
        "  --help                   show this help",
        "",
    ]
    try:
        config = load_config(own.config)
    except UserError as error:
        return "\n".join([*lines, f"The fields are not shown: {_one_line(str(error))}"])
    lines.append(f"Fields of {own.config}:")
    for key in _leaf_keys(config):
        holder, last = _holder(config, key)
        if not isinstance(holder[last], ConfigDict):
            lines.append(f"  --config.{key}={json.dumps(_jsonable(holder[last]))}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------- environment


def setup_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> tuple[int, int]:
    """Joins the other processes of this run, if there are any; returns (index, count).

    Values not given are taken from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID``. Without them, a SLURM step or Open MPI job of several tasks is found by JAX
    itself. A single process initialises nothing and does not import JAX.

    Raises:
      UserError: some but not all of the three values are given, or they do not fit together.
    """
    env = os.environ
    coordinator_address = coordinator_address or env.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _int_or_env(num_processes, "JAX_NUM_PROCESSES")
    process_id = _int_or_env(process_id, "JAX_PROCESS_ID")
    given = [coordinator_address, num_processes, process_id]
    if all(value is None for value in given):
        tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("OMPI_COMM_WORLD_SIZE") or "1"
        if int(tasks) <= 1:
            return 0, 1
    elif coordinator_address is None or num_processes is None or process_id is None:
        raise UserError(
            "--coordinator_address, --num_processes and --process_id (or JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID) must be given together"
        )
    elif process_id >= num_processes:
        raise UserError(
            f"--process_id={process_id} must be less than --num_processes={num_processes}"
        )
    import jax

    jax.distributed.initialize(coordinator_address, num_processes, process_id)
    return jax.process_index(), jax.process_count()


def together(work: Callable[[], T]) -> T:
    """Runs ``work`` in every process of this run and waits for all; an error in one is one in all.

    Returns what this process's ``work`` returned.

    Raises:
      UserError: ``work`` failed in another process; the message says why.
    """
    import jax

    if jax.process_count() == 1:
        return work()
    # JAX's coordination service: unlike a collective, it can wait for hours.
    from jax._src import distributed

    client: Any = distributed.global_state.client
    place = f"cirag_jax/together/{next(_meetings)}"
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    text = "" if error is None else _one_line(str(error)) or type(error).__name__
    client.key_value_set(f"{place}/{jax.process_index()}", f"={text}")
    count = jax.process_count()
    texts = [client.blocking_key_value_get(f"{place}/{i}", _A_YEAR_MS)[1:] for i in range(count)]
    if error is not None:
        raise error
    for index, text in enumerate(texts):
        if text:
            raise UserError(f"process {index} of {count} failed: {text}")
    return cast(T, result)


def _int_or_env(value: int | None, name: str) -> int | None:
    text = os.environ.get(name)
    if value is not None or text is None:
        return value
    if not text.isdigit():
        raise UserError(f"environment variable {name}={text} is not a number")
    return int(text)


def enable_compilation_cache() -> pathlib.Path | None:
    """Turns on JAX's persistent compilation cache; returns its folder, or None where it is off.

    ``CIRAG_JAX_CACHE`` names another folder or, as ``0``, switches the cache off; a
    ``JAX_COMPILATION_CACHE_DIR`` of the user's own is left alone.
    """
    setting = os.environ.get("CIRAG_JAX_CACHE", "")
    if setting == "0" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    base = pathlib.Path(setting or pathlib.Path.home() / ".cache" / "cirag_jax" / "xla")
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
        "git_commit": _git("rev-parse", "HEAD"),
        "git_modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str | None:
    try:
        # Without locks: a command that is killed while git looks would leave git's behind.
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --------------------------------------------------------------------------------------- output


def _make_workdir(name: str) -> pathlib.Path:
    workdir = pathlib.Path(name).expanduser()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--workdir={name}: cannot write there ({reason})") from None
    return workdir


@contextlib.contextmanager
def _lock(workdir: pathlib.Path, program: str) -> Iterator[None]:
    """Holds a workdir's lock, which the kernel releases however the process dies.

    Raises:
      UserError: another command holds it.
    """
    with (workdir / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"--workdir={workdir} is in use by {file.read() or 'another command'}; wait for "
                "its end or choose another --workdir"
            ) from None
        except OSError as error:
            say(f"WARNING: {workdir} cannot be locked ({error.strerror}): run one command there")
        file.truncate(0)
        file.write(f"{program} (process {os.getpid()})")
        file.flush()
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


def _jsonable(value: Any) -> Any:
    """The value as JSON's own types: arrays as lists, paths as text, NaN and infinities null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Mapping, ConfigDict)):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return _jsonable(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a result cannot hold {type(value).__name__}")


def _one_line(text: str) -> str:
    return " ".join(text.split())
