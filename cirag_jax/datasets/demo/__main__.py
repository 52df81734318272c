"""``python -m cirag_jax.datasets.demo --out=FOLDER`` writes the dataset and prints its counts."""

import argparse
import json
import sys

from cirag_jax.datasets.demo import build, statistics
from cirag_jax.datasets.jsonl import write_dataset
from cirag_jax.errors import UserError
from cirag_jax.io import one_line, say, standard_streams


def main(arguments: list[str] | None = None) -> int:
    """Writes the dataset folder and prints the counts; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m cirag_jax.datasets.demo", description=__doc__)
    parser.add_argument("--out", help="folder to write; without it only the counts are printed")
    options = parser.parse_args(arguments)
    try:
        dataset = build()
        if options.out:
            write_dataset(dataset, options.out)
    except UserError as error:
        say(f"demo: {one_line(str(error))}")
        return 2
    print(json.dumps(statistics(dataset), indent=2))
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
