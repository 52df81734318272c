"""The built-in dataset: real facts in short passages, and questions about chains of them.

``experiments/demo_dataset`` generated the data files in this folder; loading them needs no other
package. NOTICE names the sources of the facts and their licenses; docs/demo_dataset.md has details.
"""

import functools
import gzip
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from cirag_jax.types import Dataset, Passage, Question, Triple

FOLDER = pathlib.Path(__file__).parent
QUESTIONS = "questions.jsonl.gz"
CORPUS = "corpus.jsonl.gz"
ENTITIES = "entities.jsonl.gz"

T = TypeVar("T")


class EntityRecord(msgspec.Struct):
    """A line of `ENTITIES`: the entity of one passage and the facts that the passage states.

    Attributes:
        passage_id: The id of the passage.
        key: ``<kind>:<identifier in the source>``.
        spoken_name: The name as written inside a sentence ("the Netherlands").
        starts_questions: Whether a question may start from the entity, because its name is unique.
        triples: Head, relation and tail of each fact, in the order of the sentences.
        triple_sentences: The sentence index of each fact.
        types: The type of each fact's relation, ``<kind>.<relation>``.
        targets: The key of the entity that each fact's tail names; None if it has no passage.
    """

    passage_id: str
    key: str
    spoken_name: str
    starts_questions: bool
    triples: tuple[tuple[str, str, str], ...]
    triple_sentences: tuple[int, ...]
    types: tuple[str, ...]
    targets: tuple[str | None, ...]


class TypedTriple(NamedTuple):
    """A triple with its place in the graph of entities.

    Attributes:
        triple: The triple as in `Dataset.triples`.
        type: The type of its relation, ``<kind>.<relation>``.
        head: The key of the head.
        target: The key of the entity that the tail names; None if it has no passage.
    """

    triple: Triple
    type: str
    head: str
    target: str | None


class Entity(NamedTuple):
    """An entity that has a passage; `EntityRecord` documents the other fields."""

    key: str
    name: str
    spoken_name: str
    starts_questions: bool
    triples: tuple[TypedTriple, ...]

    @property
    def kind(self) -> str:
        """The kind of entity, for example ``film``."""
        return self.key.partition(":")[0]


@functools.lru_cache(maxsize=1)
def build() -> Dataset:
    """Loads the built-in dataset, about 3,300 passages and 3,300 questions."""
    corpus = {passage.id: passage for passage in _read(CORPUS, Passage)}
    triples = {
        entity.triples[0].triple.passage_id or "": tuple(typed.triple for typed in entity.triples)
        for entity in entities().values()
    }
    return Dataset("demo", tuple(_read(QUESTIONS, Question)), corpus, triples)


@functools.lru_cache(maxsize=1)
def entities() -> Mapping[str, Entity]:
    """Returns the entities by key, in the order of their passages."""
    return {record.key: _entity(record) for record in _read(ENTITIES, EntityRecord)}


def typed_triples() -> Iterator[TypedTriple]:
    """Yields the triples of all passages in order, with their types."""
    for entity in entities().values():
        yield from entity.triples


def statistics(dataset: Dataset) -> dict[str, object]:
    """Counts passages, words, triples, and questions by split, type and number of hops."""
    by_kind = Counter((q.split, q.type, q.hops) for q in dataset.questions)
    return {
        "passages": len(dataset.corpus),
        "words": sum(len(p.text.split()) for p in dataset.corpus.values()),
        "triples": sum(len(triples) for triples in dataset.triples.values()),
        "questions": dict(Counter(q.split for q in dataset.questions)),
        "by split, type and hops": {
            f"{split} {kind} {hops}": number
            for (split, kind, hops), number in sorted(by_kind.items(), key=str)
        },
    }


def _read(name: str, kind: type[T]) -> list[T]:
    return msgspec.json.Decoder(kind).decode_lines(gzip.decompress((FOLDER / name).read_bytes()))


def _entity(record: EntityRecord) -> Entity:
    triples = tuple(
        TypedTriple(Triple(*parts, record.passage_id, sentence), kind, record.key, target)
        for parts, sentence, kind, target in zip(
            record.triples, record.triple_sentences, record.types, record.targets, strict=True
        )
    )
    name = record.triples[0][0]
    return Entity(record.key, name, record.spoken_name, record.starts_questions, triples)
