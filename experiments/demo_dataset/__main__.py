"""Builds the built-in dataset from its sources.

``python -m experiments.demo_dataset`` prints the versions of the sources, the counts, and which of
the shipped files would change. ``--out=cirag_jax/datasets/demo`` replaces them.
"""

import argparse
import gzip
import json
import pathlib
import sys

from cirag_jax.datasets import demo
from cirag_jax.errors import UserError
from cirag_jax.io import one_line, say, standard_streams
from experiments.demo_dataset import build, sources


def main(arguments: list[str] | None = None) -> int:
    """Builds and compares, or writes, the data files; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.demo_dataset",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder to write the data files to")
    options = parser.parse_args(arguments)
    try:
        dataset, files = build.build_files()
        changed = [name for name, content in files.items() if content != _shipped(name)]
        if options.out:
            _write(options.out, files)
    except UserError as error:
        say(f"demo_dataset: {one_line(str(error))}")
        return 2
    result = {"packages": sources.versions(), **demo.statistics(dataset), "changed files": changed}
    print(json.dumps(result, indent=2))
    return 0


def _shipped(name: str) -> bytes | None:
    path = demo.FOLDER / name
    return gzip.decompress(path.read_bytes()) if path.is_file() else None


def _write(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(build.compress(content))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
