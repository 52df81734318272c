"""The built-in dataset: real facts of data packages, said in short passages and asked in chains.

`build` makes it from the installed packages, without a download. The steps: `facts` joins the
packages' rows to a graph, `render` says the facts of each entity, `questions` asks for chains of
them. docs/demo_dataset.md tells the sources, the counts and how hard the questions are.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from cirag_jax.datasets.demo import facts, questions, render
from cirag_jax.datasets.demo.graph import World
from cirag_jax.datasets.demo.templates import RELATIONS
from cirag_jax.types import Dataset, Triple


class TypedTriple(NamedTuple):
    """A triple with what it is in the graph.

    Attributes:
        triple: As the dataset has it.
        relation: ``<kind>.<what>``.
        head: The key of the entity.
        tail: That of the entity which the tail names; None where it names none.
    """

    triple: Triple
    relation: str
    head: str
    tail: str | None


@functools.lru_cache(maxsize=1)
def graph() -> tuple[World, questions.Rendered]:
    """The entities with their facts, and the passage and the triples of each by its key."""
    world = facts.build_world()
    return world, render.render_world(world)


def typed_triples() -> Iterator[TypedTriple]:
    """All triples of the passages, in their order."""
    world, rendered = graph()
    for key, (_, triples) in rendered.items():
        stated = {
            (name, fact.value): (relation, fact.target)
            for relation, found in world.entities[key].facts.items()
            for fact in found
            for name in RELATIONS[relation]
        }
        for triple in triples:
            relation, target = stated[triple.relation, triple.tail]
            yield TypedTriple(triple, relation, key, target if target in rendered else None)


@functools.lru_cache(maxsize=1)
def build() -> Dataset:
    """The dataset of the quickstart: about 3,300 passages and as many questions, in seconds.

    Deterministic for the pinned versions of the data packages: it depends on no clock, network,
    random number or hash seed.
    """
    world, rendered = graph()
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
