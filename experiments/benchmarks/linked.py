"""Compares retrieval by aligner and links (`LinkedIndex`) with retrieval by the aligner only.

Both sides search the same units with the same aligner for all questions, in alternation. Indexing,
which is mostly embedding, is timed separately. The time of a query is then mostly spent in the
encoder, which both sides call once per step. Questions come from the first folder; passages of the
other folders fill the corpus.

    python experiments/benchmarks/linked.py --data A B --checkpoint W

Results
  --data 2wikimultihopqa musique --repeats 1, 2026-11-27, 2 idle CPU cores of an AMD EPYC, 24 GiB;
  1,000 questions, 10,000 passages with 35,302 sentences, 4 steps:
    commit 4702bec: embedding 303 s, links and words 5.9 s, searching 103 s (98.5 s with the
      aligner only, ratio 1.05), peak memory 1.6 GiB.
    commit 674166e, which embedded the chains of 64 questions together and padded the last batch of
      every length: searching 167 s (101 s with the aligner only, ratio 1.66), 1.4 GiB.
  Both commits miss the goal of 60 s, because of the time of the encoder.
"""

import argparse
import json
import pathlib
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.commands.retrieval_systems import iterate
from cirag_jax.datasets import load
from cirag_jax.datasets.chains import units_of
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.io import standard_streams
from cirag_jax.methods.kirag.method import KiragConfig
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval.encode import Progress
from cirag_jax.retrieval.encoders import Encoder, FlaxEncoder, MemoizingEncoder
from cirag_jax.retrieval.linked import LinkedIndex, require_link_head
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.types import Role
from configs import common
from experiments.benchmarks import measure


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", help="folders; the built-in dataset by default")
    parser.add_argument("--checkpoint", required=True, help="workdir of configs/aligner.py:linked")
    parser.add_argument("--dtype", default="float32", help="of the encoder: float32 | bfloat16")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--passages", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(compare(options), indent=2))


class _Embedder:
    """An encoder that caches the vectors of units and, until they are cleared, of queries."""

    def __init__(self, encoder: Encoder):
        self._encoder, self._units = encoder, MemoizingEncoder(encoder)
        self.identity, self.dim = encoder.identity, encoder.dim
        self.truncated = encoder.truncated
        self.forget_queries()

    def forget_queries(self) -> None:
        """Clears the cached queries before a new run."""
        self._queries = MemoizingEncoder(self._encoder)

    def encode(
        self, texts: Sequence[str], kind: Role = "passage", progress: Progress | None = None
    ) -> np.ndarray:
        """See `Encoder.encode`."""
        encoder = self._queries if kind == "query" else self._units
        return encoder.encode(texts, kind, progress)


def compare(options: Any) -> dict[str, Any]:
    """Returns the seconds of indexing and of both searches."""
    head = require_link_head(options.checkpoint)
    config = common.data(split="", units=head.units)
    datasets = []
    for config.dir in options.data or [None]:
        datasets.append(load.load_dataset(config))
    questions = datasets[0].questions[: options.questions]
    sources = [(d, passage) for d in datasets for passage in d.corpus.values()][: options.passages]
    passages = tuple(passage for _, passage in sources)
    texts = [[unit.text for unit in units_of(d, p.id, head.units)] for d, p in sources]
    encoder, _ = open_encoder(options.checkpoint, dtype=options.dtype)
    embedder = _Embedder(FlaxEncoder(encoder, query_max_length=256, passage_max_length=128))
    start = time.monotonic()
    unit_index = UnitIndex(texts, embedder)
    embedded = time.monotonic()
    index = LinkedIndex(passages, texts, embedder, head, head.units, steps=options.steps)
    linked = time.monotonic()

    def search_linked() -> None:
        embedder.forget_queries()
        index.search([question.question for question in questions], 10)

    def search_aligner() -> None:
        embedder.forget_queries()
        settings = KiragConfig(
            max_steps=options.steps, num_candidates=0, units=head.units, use_constructor=False,
            accumulate=True, ranking="chain", reader="nothing",
        )  # fmt: skip
        corpus = Corpus("all", passages, None)
        iterate(questions, datasets[0], corpus, unit_index.search, embedder, settings)

    sides = {"ours": search_linked, "theirs": search_aligner}
    return {
        "questions": len(questions),
        "passages": len(passages),
        "units": sum(map(len, texts)),
        "seconds": {
            "embedding": round(embedded - start, 1),
            "links and words": round(linked - embedded, 1),
        },
        "searching": measure.row(measure.alternately(sides, options.repeats)),
        "GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
    }


if __name__ == "__main__":
    with standard_streams():
        main()
