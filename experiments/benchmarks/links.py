"""Title links and walks over them, as a corpus grows to a million passages.

What is real: the passages of the folders of ``--data`` with their titles, and the questions. What
is made: a corpus of N passages is as many copies of all of these as it takes, shuffled. Every copy
but the first has a word of its own that stands after each of its titles, in the passages' texts and
in the questions too ("Grey Harbour" becomes "Grey Harbour baq"), so that a copy's passages name one
another as the real ones do, and no other copy's. Titles grow with N, and from whole copies on links
per passage stay those of real text; but a million real passages would have more different words,
and among them some that far more others name. The last copy is cut off, and with it some of its
links: a corpus smaller than the folders has fewer.

A walk begins at the titles that a question names and at five passages of its own pool (random ones
where it has none), which stand for another ranking's first.

    python experiments/benchmarks/links.py --data 2wikimultihopqa hotpotqa musique

Every N has a process of its own, which peak memory is of. ``--links`` measures other versions of
cirag_jax/retrieval/links.py beside this one, in turn; ``rows`` is a digest of what all walks found.

Results
  --data as above, 2026-11-27, 2 CPU cores of an AMD EPYC, 24 GiB; beside a training of higher
  priority and tests, hence processor seconds, all of one thread. Old and new in turn, --passages
  10000 100000 --questions 200: commit 76eab84, and by --links links.py of 2d72771. New alone,
  --passages 1000000 --questions 64: commit 269a0c1, whose transitions are the same lines in two
  functions; its wall seconds were 30, 287, 12 and 85. The old was stopped there after 13 minutes,
  in which it got a third of a core and had not ended:

    passages   links.py  titles  mentions            transitions  walks, a question  peak
    10,000     new       0.13     1.7 (5,811/s)      0.02         1.3 ms             0.20 GiB
               old       0.11     2.0 (4,965/s)      0.03         1.5 ms             0.20 GiB
    100,000    new       1.6     19.4 (5,149/s)      0.39         42 ms              0.58 GiB
               old       1.8     34.5 (2,900/s)      0.83         42 ms              0.58 GiB
    1,000,000  new       19.8    188 (5,314/s)       7.2          792 ms             2.46 GiB

  Of the peaks 0.18, 0.26 and 1.09 GiB are the corpus. Steps per passage, both directions: 1.6, 8.2
  and 8.8. Old and new found the same rows.
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
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.types import Passage
from configs import common

_LIMIT_GIB = 24.0
_CODE = pathlib.Path(__file__).resolve().parents[2] / "cirag_jax/retrieval/links.py"
_HERE = "\0"  # Where a copy's word comes.
_LETTERS = "bdfghklmnprstvz"
_MEASURES = ("titles", "mentions", "transitions", "walks")


class Corpus(NamedTuple):
    """Passages, questions, and for each some rows where its walk begins."""

    passages: list[Passage]
    questions: list[str]
    first: list[list[int]]


def corpus(folders: Sequence[str], size: int, asked: int, rng: np.random.Generator) -> Corpus:
    """A corpus of ``size`` passages and ``asked`` questions of random copies."""
    real, questions = [], []
    for folder in folders or [""]:
        config = common.data(split="", units="sentence")
        config.dir = folder
        dataset = load.load_dataset(config)
        row = {passage: len(real) + at for at, passage in enumerate(dataset.corpus)}
        real += dataset.corpus.values()
        for asking in dataset.questions:
            questions.append((asking.question, [row[p] for p in (asking.context or ())[:5]]))
    titles = TitleIndex(real)

    def marked(text: str) -> str:
        """Where a title stands, there is a place for a copy's word."""
        names = [_plain(real[rows[0]].title) for rows in titles.mentions(text)]
        names = sorted((re.findall(r"\w+", name) for name in names), key=len, reverse=True)
        forms = "|".join(r"\W+".join(words) for words in names if words)
        return re.sub(rf"\b({forms})\b", rf"\1{_HERE}", text, flags=re.I) if forms else text

    made = [
        Passage("x", passage.title.replace(plain := _plain(passage.title), plain + _HERE, 1), text)
        for passage, text in zip(real, (marked(passage.text) for passage in real), strict=True)
    ]
    words = ["", *itertools.islice(_words(), size // len(made))]
    copies = ((word, passage) for word in words for passage in made)
    passages = [
        Passage(str(row), _filled(passage.title, word), _filled(passage.text, word))
        for row, (word, passage) in enumerate(itertools.islice(copies, size))
    ]
    row_N = rng.permutation(size)
    shuffled = [passages[row] for row in row_N.tolist()]
    place_N = np.argsort(row_N)
    texts, first = [], []
    for question, pool in itertools.islice(itertools.cycle(questions), asked):
        copy = rng.integers(len(words))
        rows = [row for row in (copy * len(made) + at for at in pool) if row < size]
        texts.append(_filled(marked(question), words[copy]))
        first.append(place_N[rows].tolist() if rows else rng.integers(size, size=5).tolist())
    return Corpus(shuffled, texts, first)


def _plain(title: str) -> str:
    return re.sub(r"\s*\([^()]*\)\s*$", "", title)


def _words() -> Iterator[str]:
    """Different words without a capital: "baq", "beq", ..."""
    for size in itertools.count(1):
        for parts in itertools.product([a + b for a in _LETTERS for b in "aeiou"], repeat=size):
            yield "".join(parts) + "q"


def _filled(text: str, word: str) -> str:
    return text.replace(_HERE, f" {word}" if word else "")


def measured(options: Any) -> dict[str, Any]:
    """Wall and processor seconds of each phase, links, memory."""
    spec = importlib.util.spec_from_file_location("measured_links", options.worker)
    assert spec and spec.loader
    links: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = links  # Its dataclasses look there.
    spec.loader.exec_module(links)
    size = options.passages[0]
    made = corpus(options.data, size, options.questions, np.random.default_rng(0))
    clock = [(time.perf_counter(), time.process_time())]
    before = _peak()

    def lap() -> None:
        clock.append((time.perf_counter(), time.process_time()))

    transitions, found = links.transitions, []

    def watched(*arguments: Any) -> Any:
        lap()
        found.append(transitions(*arguments))
        lap()
        return found[0]

    links.transitions = watched
    titles = links.TitleIndex(made.passages)
    lap()
    walk = links.LinkWalk(made.passages, titles=titles)
    rows = walk.search(made.questions, made.first, 10)
    lap()
    wall_P, processor_P = np.diff(np.array(clock), axis=0).T
    return {
        "links": options.worker,
        "passages": size,
        "titles": len({passage.title for passage in made.passages}),
        "questions": options.questions,
        "steps_per_passage": round(found[0].nnz / size, 2),
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
    """Prints one JSON object a line; exit code 1 where one took too much memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="*", default=[], help="folders; none: the built-in dataset")
    parser.add_argument("--passages", nargs="+", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--links", nargs="*", default=[], help="other versions of links.py")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measured(options)))
        return
    peaks = []
    for size, code in itertools.product(options.passages, [str(_CODE), *options.links]):
        command = [sys.executable, __file__, "--worker", code, "--passages", str(size)]
        command += ["--questions", str(options.questions), "--data", *options.data]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        print(done.stdout.splitlines()[-1], flush=True)
        peaks.append(json.loads(done.stdout.splitlines()[-1])["peak_gib"])
    sys.exit(max(peaks) > _LIMIT_GIB)


if __name__ == "__main__":
    main()
