"""Files that are never seen half-written, and what a person at the terminal is told."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tqdm


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line; see `write_text`."""
    write_text(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_json(path: Path, value: Any) -> None:
    """Writes one indented JSON value, without NaN and infinities; see `write_text`."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, (text, "\n"))


def write_text(path: Path, parts: Iterable[str]) -> None:
    """Writes a file of UTF-8: aside, to disk, then renamed.

    Raises:
      OSError: the folder cannot be written; what ``path`` held before is still there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def is_training_workdir(spec: str | None) -> bool:
    """Whether a trainer left its checkpoints there."""
    return spec is not None and (Path(spec).expanduser() / "checkpoints").is_dir()


def local_path(spec: str) -> Path:
    """The path that names a model: ``shipped:NAME`` lies in this package."""
    name = spec.removeprefix("shipped:")
    return Path(spec).expanduser() if name == spec else Path(__file__).parent / "shipped" / name


def cache_folder(name: str) -> Path | None:
    """Where the user keeps what can be computed again (``CIRAG_JAX_CACHE``); None: nowhere."""
    setting = os.environ.get("CIRAG_JAX_CACHE", "")
    if setting == "0":
        return None
    return Path(setting or Path.home() / ".cache" / "cirag_jax") / name


def say(text: str) -> None:
    """Prints a line on standard error; a progress bar that is shown there goes on below it."""
    tqdm.tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
