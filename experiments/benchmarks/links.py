"""Measures title links, and walks over them, for corpora of up to a million passages.

A corpus of N passages consists of shuffled copies of the real passages of ``--data``. Every copy
except the first adds a word to each of its titles, also in texts and questions ("Grey Harbour"
becomes "Grey Harbour baq"). The passages of a copy therefore name each other, but no passage of
another copy. The number of titles grows with N, and the number of links per passage is as in real
text if N covers all folders. A million real passages would have more distinct words, and some of
their titles would occur in far more passages. The last copy is truncated and loses some links.

A walk starts at the titles that a question names, and at five passages of the question's pool (or
random ones), which represent the top of another ranking.

    python experiments/benchmarks/links.py --data 2wikimultihopqa hotpotqa musique

Every N has its own process, whose peak memory is reported. ``--links`` also measures other versions
of cirag_jax/retrieval/links.py, in alternation. ``rows`` is a digest of the results of all walks.

Results
  --data as above, 2026-11-27, 2 CPU cores of an AMD EPYC, 24 GiB; processor seconds of one thread,
  because other programs were running. The new version of links.py is from commit 76eab84, the old
  one from 2d72771 (--links); they alternate, with --passages 10000 100000 --questions 200. The last
  row (--passages 1000000 --questions 64) is from 269a0c1, which only splits the code of transitions
  into two functions; its wall seconds were 30, 287, 12 and 85. With a million passages, the old
  version was stopped after 13 minutes on a third of a core:

    passages   links.py  titles  mentions            transitions  walk per question  peak
    10,000     new       0.13     1.7 (5,811/s)      0.02         1.3 ms             0.20 GiB
               old       0.11     2.0 (4,965/s)      0.03         1.5 ms             0.20 GiB
    100,000    new       1.6     19.4 (5,149/s)      0.39         42 ms              0.58 GiB
               old       1.8     34.5 (2,900/s)      0.83         42 ms              0.58 GiB
    1,000,000  new       19.8    188 (5,314/s)       7.2          792 ms             2.46 GiB

  The corpus takes 0.18, 0.26 and 1.09 GiB of the peaks. A passage has 1.6, 8.2 and 8.8 links on
  average, in both directions. Old and new versions return the same rows.
"""

import argparse
import hashlib
import importlib.util
import itertools
import json
import pathlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.datasets import load
from cirag_jax.io import standard_streams
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.types import Passage
from configs import common

_LIMIT_GIB = 24.0
_CODE = pathlib.Path(__file__).resolve().parents[2] / "cirag_jax/retrieval/links.py"
_MARKER = "\0"  # replaced by a copy's word
_LETTERS = "bdfghklmnprstvz"
_MEASURES = ("titles", "mentions", "transitions", "walks")


class Corpus(NamedTuple):
    """Passages, questions, and the rows at which each question's walk starts."""

    passages: list[Passage]
    questions: list[str]
    first: list[list[int]]


def make_corpus(folders: Sequence[str], size: int, count: int, rng: np.random.Generator) -> Corpus:
    """Creates ``size`` passages, and ``count`` questions, each about a random copy."""
    real, questions = [], []
    for folder in folders or [""]:
        config = common.data(split="", units="sentence")
        config.dir = folder
        dataset = load.load_dataset(config)
        row = {passage: len(real) + at for at, passage in enumerate(dataset.corpus)}
        real += dataset.corpus.values()
        for question in dataset.questions:
            questions.append((question.question, [row[p] for p in (question.context or ())[:5]]))
    titles = TitleIndex(real)

    def marked(text: str) -> str:
        """Inserts a marker for a copy's word after every title."""
        names = [_plain(real[rows[0]].title) for rows in titles.mentions(text)]
        names = sorted((re.findall(r"\w+", name) for name in names), key=len, reverse=True)
        forms = "|".join(r"\W+".join(words) for words in names if words)
        return re.sub(rf"\b({forms})\b", rf"\1{_MARKER}", text, flags=re.I) if forms else text

    templates = []
    for passage in real:
        name = _plain(passage.title)
        title = passage.title.replace(name, name + _MARKER, 1)
        templates.append(Passage("x", title, marked(passage.text)))
    words = ["", *itertools.islice(_words(), size // len(templates))]
    copies = ((word, passage) for word in words for passage in templates)
    passages = [
        Passage(str(row), _filled(passage.title, word), _filled(passage.text, word))
        for row, (word, passage) in enumerate(itertools.islice(copies, size))
    ]
    row_N = rng.permutation(size)
    shuffled = [passages[row] for row in row_N.tolist()]
    position_N = np.argsort(row_N)
    texts, first = [], []
    for question, pool in itertools.islice(itertools.cycle(questions), count):
        copy = rng.integers(len(words))
        rows = [row for row in (copy * len(templates) + at for at in pool) if row < size]
        texts.append(_filled(marked(question), words[copy]))
        first.append(position_N[rows].tolist() if rows else rng.integers(size, size=5).tolist())
    return Corpus(shuffled, texts, first)


def _plain(title: str) -> str:
    return re.sub(r"\s*\([^()]*\)\s*$", "", title)


def _words() -> Iterator[str]:
    """Yields different lower-case words: "baq", "beq", ..."""
    for size in itertools.count(1):
        for parts in itertools.product([a + b for a in _LETTERS for b in "aeiou"], repeat=size):
            yield "".join(parts) + "q"


def _filled(text: str, word: str) -> str:
    return text.replace(_MARKER, f" {word}" if word else "")


def measure(options: Any) -> dict[str, Any]:
    """Returns wall and processor seconds of each phase, the number of links, and memory."""
    spec = importlib.util.spec_from_file_location("measured_links", options.worker)
    assert spec and spec.loader
    links: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = links  # required by the module's dataclasses
    spec.loader.exec_module(links)
    size = options.passages[0]
    corpus = make_corpus(options.data, size, options.questions, np.random.default_rng(0))
    clock = [(time.perf_counter(), time.process_time())]
    before = _peak()

    def lap() -> None:
        clock.append((time.perf_counter(), time.process_time()))

    transitions, results = links.transitions, []

    def timed_transitions(*arguments: Any) -> Any:
        lap()
        results.append(transitions(*arguments))
        lap()
        return results[0]

    links.transitions = timed_transitions
    titles = links.TitleIndex(corpus.passages)
    lap()
    walk = links.LinkWalk(corpus.passages, titles=titles)
    rows = walk.search(corpus.questions, corpus.first, 10)
    lap()
    wall_P, processor_P = np.diff(np.array(clock), axis=0).T
    return {
        "links": options.worker,
        "passages": size,
        "titles": len({passage.title for passage in corpus.passages}),
        "questions": options.questions,
        "steps_per_passage": round(results[0].nnz / size, 2),
        "wall_seconds": dict(zip(_MEASURES, wall_P.round(2).tolist(), strict=True)),
        "processor_seconds": dict(zip(_MEASURES, processor_P.round(2).tolist(), strict=True)),
        "mentions_per_second": round(size / processor_P[1]),
        "corpus_gib": before,
        "peak_gib": _peak(),
        "rows": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12],
    }


def _peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def main() -> None:
    """Prints one JSON object per line; exits with 1 if a run took too much memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--data", nargs="*", default=[], help="folders; the built-in dataset by default"
    )
    parser.add_argument("--passages", nargs="+", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument(
        "--links", nargs="*", default=[], help="other versions of links.py to measure"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options)))
        return
    peaks = []
    for size, code in itertools.product(options.passages, [str(_CODE), *options.links]):
        command = [sys.executable, __file__, "--worker", code, "--passages", str(size)]
        command += ["--questions", str(options.questions), "--data", *options.data]
        process = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        print(process.stdout.splitlines()[-1], flush=True)
        peaks.append(json.loads(process.stdout.splitlines()[-1])["peak_gib"])
    sys.exit(max(peaks) > _LIMIT_GIB)


if __name__ == "__main__":
    with standard_streams():
        main()
