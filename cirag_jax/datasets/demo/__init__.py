"""The built-in dataset: real facts of data packages, said in short passages and asked in chains.

`build` makes it from the installed packages, without a download. The steps: `facts` joins the
packages' rows to a graph, `render` says the facts of each entity, `questions` asks for chains of
them. docs/demo_dataset.md tells the sources, the counts and how hard the questions are.
"""

import functools
from collections import Counter

from cirag_jax.datasets.demo import facts, questions, render
from cirag_jax.types import Dataset


@functools.lru_cache(maxsize=1)
def build() -> Dataset:
    """The dataset of the quickstart: about 3,700 passages and 3,300 questions, in seconds.

    Deterministic for the pinned versions of the data packages: it depends on no clock, network,
    random number or hash seed.

    Raises:
        UserError: a data package is not installed or lacks a file.
    """
    world = facts.build_world()
    rendered = render.render_world(world)
    asked = questions.build_questions(world, rendered)
    corpus = {passage.id: passage for passage, _ in rendered.values()}
    triples = {passage.id: found for passage, found in rendered.values()}
    return Dataset("demo", asked, corpus, triples)


def statistics(dataset: Dataset) -> dict[str, object]:
    """Counts of passages, words, triples, and questions by split, type and number of hops."""
    by_kind = Counter((q.split, q.type, q.hops) for q in dataset.questions)
    return {
        "passages": len(dataset.corpus),
        "words": sum(len(p.text.split()) for p in dataset.corpus.values()),
        "triples": sum(len(found) for found in dataset.triples.values()),
        "questions": dict(Counter(q.split for q in dataset.questions)),
        "by split, type and hops": {
            f"{split} {kind} {hops}": number
            for (split, kind, hops), number in sorted(by_kind.items(), key=str)
        },
    }
