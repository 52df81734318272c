"""What a method has collected: facts with their provenance, and the rankings they induce."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from cirag_jax.datasets.chains import passage_text, sentence_text, sentence_texts, triple_text
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.triples.normalization import Normalization, triple_key
from cirag_jax.types import Passage, Sentence, Step, Triple, Unit

Fact = Unit  # a candidate of a round: a triple, a sentence, or a passage by its id


class Candidates(NamedTuple):
    """The facts that a round may keep, best first, with the ranker's scores."""

    facts: tuple[Fact, ...]
    scores: tuple[float, ...]


class Evidence:
    """The pools of the cascade: core triples, sentences and passages, in order, each once.

    Args:
      normalization: normalisation by which triples are equal.
    """

    def __init__(self, normalization: Normalization):
        self.normalization: Normalization = normalization
        self._facts: dict[Hashable, Fact] = {}
        self._places: dict[tuple[str | None, int | None], None] = {}  # Of every kept fact.
        self._seen: dict[str, Passage] = {}

    def see(self, passages: Iterable[Passage]) -> None:
        """Notes passages that were retrieved."""
        for passage in passages:
            self._seen.setdefault(passage.id, passage)

    def keep(self, facts: Iterable[Fact]) -> None:
        """Adds core triples, or core sentences."""
        for fact in facts:
            self._facts.setdefault(fact_key(fact, self.normalization), fact)
            self._places.setdefault(place_of(fact))

    @property
    def triples(self) -> tuple[Triple, ...]:
        """Core triples (the paper's C)."""
        return tuple(fact for fact in self._facts.values() if isinstance(fact, Triple))

    @property
    def sentences(self) -> tuple[tuple[str, int], ...]:
        """Core sentences (S) as (passage id, sentence index): all that state a core fact."""
        return tuple(
            (p, s)
            for p, s in self._places
            # A store may have been made from other sentence boundaries.
            if p in self._seen and s is not None and s < len(sentences_of(self._seen[p]))
        )

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Core passages (D): all that state a core fact."""
        ids = dict.fromkeys(passage_id for passage_id, _ in self._places)
        return tuple(self._seen[i] for i in ids if i is not None and i in self._seen)

    @property
    def seen(self) -> tuple[Passage, ...]:
        """Everything retrieved so far, in order."""
        return tuple(self._seen.values())

    def text(self, fact: Fact) -> str:
        """A fact as an aligner reads it."""
        match fact:
            case Triple():
                return triple_text(fact)
            case Sentence():
                return fact.text or sentence_text(self._seen[fact.passage_id], fact.index)
        return passage_text(self._seen[fact])

    def sentence(self, place: tuple[str, int]) -> str:
        """A sentence as the reader sees it."""
        return sentence_line(self._seen[place[0]], place[1])


def places_of(passages: Iterable[Passage]) -> dict[str, Sentence]:
    """Sentences by their texts as an aligner reads them: of equal ones the first."""
    places: dict[str, Sentence] = {}
    for passage in passages:
        for text, index in sentence_texts(passage).items():
            places.setdefault(text, Sentence(passage.id, index))  # Chunks may overlap.
    return places


def triple_line(triple: Triple, normalization: Normalization) -> str:
    """A triple as the reader sees it."""
    return repr(triple_key(triple, normalization))


def sentence_line(passage: Passage, index: int) -> str:
    """A sentence as the reader sees it, its passage's title in front."""
    return f"{passage.title}: {sentences_of(passage)[index].strip()}"


def passage_line(passage: Passage) -> str:
    """A passage as the reader sees it."""
    return f"{passage.title}\n{passage.text}"


def fact_key(fact: Fact, normalization: Normalization) -> Hashable:
    """What makes a fact the same as another."""
    return triple_key(fact, normalization) if isinstance(fact, Triple) else fact


def place_of(fact: Fact) -> tuple[str | None, int | None]:
    """(passage id, sentence index) of a fact, each None where it is unknown."""
    match fact:
        case Triple():
            return fact.passage_id, fact.sentence
        case Sentence():
            return fact.passage_id, fact.index
    return fact, None


def rank_facts(steps: Sequence[Step], normalization: Normalization) -> tuple[Fact, ...]:
    """Core facts by round, then by the ranker's score; then the other candidates by best score.

    The paper's Table 5 does not say how triples are ranked; this is the rule of our specification.
    """
    ranked: dict[Hashable, Fact] = {}
    for step in steps:
        score = dict(zip(step.candidates, step.scores, strict=True))
        for fact in sorted(step.kept, key=lambda t: -score.get(t, float("-inf"))):
            ranked.setdefault(fact_key(fact, normalization), fact)
    rest = [pair for step in steps for pair in zip(step.candidates, step.scores, strict=True)]
    for fact, _ in sorted(rest, key=lambda pair: -pair[1]):
        ranked.setdefault(fact_key(fact, normalization), fact)
    return tuple(ranked.values())


def rank_sentences(facts: Iterable[Fact]) -> tuple[tuple[str, int], ...]:
    """Sentences in the order of their best fact."""
    return tuple(
        dict.fromkeys((p, s) for p, s in map(place_of, facts) if p is not None and s is not None)
    )


def rank_passages(facts: Iterable[Fact], steps: Sequence[Step]) -> tuple[str, ...]:
    """Passages in the order of their best fact, then those without one, as retrieved."""
    first = [passage for passage, _ in map(place_of, facts) if passage is not None]
    return tuple(dict.fromkeys([*first, *(p for step in steps for p in step.passages)]))
