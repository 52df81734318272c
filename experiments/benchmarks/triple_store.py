"""Measures reading and writing of a triple store with 100,000 passages.

A passage has nine triples of 98 bytes each (MuSiQue's triples have 67). They are written in
transactions of 256 passages, as in an extraction, and then read 100 random passages at a time.

Results
  Two cores of a shared AMD EPYC machine at load 9 to 12 (which increases wall times), 2026-11-23;
  medians of 200 reads, as ranges over several runs. The Arrow store is from commit 9756213, with
  the same records:

                                          writing       bytes   wall            processor
    SQLite                                9 to 14 s     900     2.4 to 12 ms    2.9 to 3.8 ms
    Arrow segments, as extraction left    21 s          887     31 to 63 ms     25 ms
    Arrow segments, compacted             36 to 46 s    883     9 to 13 ms      4.7 ms

  The slowest single read took 11 to 75 ms with SQLite, and 94 to 350 ms with Arrow.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.io import standard_streams
from cirag_jax.triples.store import FILE, Record, TripleStore
from cirag_jax.types import Triple

_WORDS = ("Lund", "Skane", "river", "bishop", "founded", "borders", "university", "1666", "Osk")
_LIMIT_MS = 5.0


def records(count: int, rng: random.Random) -> Iterator[Record]:
    """Yields passages with nine triples each, in sentences 0 to 8."""

    def words(number: int) -> str:
        return " ".join(rng.choices(_WORDS, k=number))

    for index in range(count):
        name = f"passage-{index}"
        triples = (Triple(words(4), words(2), words(5), name, at) for at in range(9))
        yield Record(name, rng.randbytes(16), tuple(triples))


def main() -> None:
    """Prints the results as JSON; exits with 1 if reading takes too much processor time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument(
        "--reads", type=int, default=200, help="number of reads of 100 random passages"
    )
    options = parser.parse_args()
    rng = random.Random(0)
    written = list(records(options.passages, rng))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / FILE
        start = time.perf_counter()
        with TripleStore.create(path) as store:
            for first in range(0, len(written), 256):
                store.commit(written[first : first + 256], {"model": "m"})
        writing = time.perf_counter() - start
        wall_ms, processor_ms = [], []
        with TripleStore.open(path) as store:
            for _ in range(options.reads):
                sample = rng.sample(written, 100)
                start, before = time.perf_counter(), time.process_time()
                triples = store.triples(record.id for record in sample)
                wall_ms.append(1000 * (time.perf_counter() - start))
                processor_ms.append(1000 * (time.process_time() - before))
                assert all(triples[record.id] == record.triples for record in sample)
        result = {
            "passages": len(written),
            "write_seconds": round(writing, 2),
            "bytes_per_passage": round(path.stat().st_size / len(written)),
            "read_100_ms_median": round(statistics.median(wall_ms), 3),
            "read_100_ms_max": round(max(wall_ms), 3),
            "read_100_processor_ms_median": round(statistics.median(processor_ms), 3),
        }
    print(json.dumps(result))
    sys.exit(statistics.median(processor_ms) > _LIMIT_MS)


if __name__ == "__main__":
    with standard_streams():
        main()
