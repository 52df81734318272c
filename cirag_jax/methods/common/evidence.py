"""The facts that a method has collected, their sources, and rankings of facts and sources."""

import collections
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from cirag_jax.datasets.chains import passage_text, sentence_text, sentence_texts, triple_text
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.runtime.requests import Extract, Extracted, Program
from cirag_jax.triples.normalization import Normalization, triple_key
from cirag_jax.types import Passage, Sentence, Step, Triple, Unit

Fact = Unit  # A candidate of a round: a triple, a sentence, or the id of a passage.
_Key = TypeVar("_Key", bound=Hashable)


class Candidates(NamedTuple):
    """The facts that a round may keep, best first, with the ranker's scores."""

    facts: tuple[Fact, ...]
    scores: tuple[float, ...]


class Evidence:
    """The cascade's pools: core triples, sentences and passages, in order, without repeats.

    Args:
      normalization: normal form in which triples are compared.
    """

    def __init__(self, normalization: Normalization):
        self.normalization: Normalization = normalization
        self._facts: dict[Hashable, Fact] = {}
        self._locations: dict[tuple[str | None, int | None], None] = {}
        self._retrieved: dict[str, Passage] = {}

    def add_retrieved(self, passages: Iterable[Passage]) -> None:
        """Records retrieved passages, from which `keep` takes the sources of facts."""
        for passage in passages:
            self._retrieved.setdefault(passage.id, passage)

    def keep(self, facts: Iterable[Fact]) -> None:
        """Adds core facts, with their source sentences and passages."""
        for fact in facts:
            self._facts.setdefault(fact_key(fact, self.normalization), fact)
            self._locations.setdefault(location_of(fact))

    @property
    def triples(self) -> tuple[Triple, ...]:
        """Core triples (the paper's C)."""
        return tuple(fact for fact in self._facts.values() if isinstance(fact, Triple))

    @property
    def sentences(self) -> tuple[tuple[str, int], ...]:
        """Core sentences (S), the sources of core facts, as (passage id, sentence index)."""
        return tuple(
            (p, s)
            for p, s in self._locations
            # Triples may come from a store that split passages into different sentences.
            if p in self._retrieved and s is not None and s < len(sentences_of(self._retrieved[p]))
        )

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Core passages (D), the sources of core facts."""
        ids = dict.fromkeys(passage_id for passage_id, _ in self._locations)
        return tuple(self._retrieved[i] for i in ids if i is not None and i in self._retrieved)

    @property
    def retrieved(self) -> tuple[Passage, ...]:
        """All retrieved passages, in order."""
        return tuple(self._retrieved.values())

    def text(self, fact: Fact) -> str:
        """Returns a fact as text for the aligner."""
        match fact:
            case Triple():
                return triple_text(fact)
            case Sentence():
                return fact.text or sentence_text(self._retrieved[fact.passage_id], fact.index)
        return passage_text(self._retrieved[fact])

    def sentence(self, location: tuple[str, int]) -> str:
        """Returns a sentence as a line of the reader's prompt."""
        return sentence_line(self._retrieved[location[0]], location[1])


def request_triples(
    passages: Sequence[Passage], parse_errors: collections.Counter[str]
) -> Program[tuple[tuple[Triple, ...] | None, ...]]:
    """Returns each passage's triples (None: not extracted); counts passages without triples."""
    extracted: Extracted = yield Extract(tuple(passages))
    parse_errors["passage_without_triples"] += sum(t == () for t in extracted.triples)
    parse_errors["passage_not_extracted"] += sum(t is None for t in extracted.triples)
    return extracted.triples


def sentences_by_text(passages: Iterable[Passage]) -> dict[str, Sentence]:
    """Maps the text of each sentence (in the aligner's form) to its first occurrence."""
    sentences: dict[str, Sentence] = {}
    for passage in passages:
        for text, index in sentence_texts(passage).items():
            sentences.setdefault(text, Sentence(passage.id, index))  # Passages may overlap.
    return sentences


def triple_line(triple: Triple, normalization: Normalization) -> str:
    """Returns a triple as a line of the reader's prompt."""
    return repr(triple_key(triple, normalization))


def sentence_line(passage: Passage, index: int) -> str:
    """Returns a sentence, after its passage's title, as a line of the reader's prompt."""
    return f"{passage.title}: {sentences_of(passage)[index].strip()}"


def passage_line(passage: Passage) -> str:
    """Returns a passage as text of the reader's prompt."""
    return f"{passage.title}\n{passage.text}"


def fact_key(fact: Fact, normalization: Normalization) -> Hashable:
    """Returns a key that is equal for equal facts."""
    return triple_key(fact, normalization) if isinstance(fact, Triple) else fact


def location_of(fact: Fact) -> tuple[str | None, int | None]:
    """Returns the passage id and the sentence index of a fact; unknown values are None."""
    match fact:
        case Triple():
            return fact.passage_id, fact.sentence
        case Sentence():
            return fact.passage_id, fact.index
    return fact, None


def best_scores(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """Maps each key to its highest score, in the order in which the keys first occur."""
    best: dict[_Key, float] = {}
    for key, score in pairs:
        best[key] = max(score, best.get(key, score))
    return best


def rank_facts(steps: Sequence[Step], normalization: Normalization) -> tuple[Fact, ...]:
    """Ranks core facts by round, then by score; other candidates follow by their best score.

    The CIRAG paper does not say how it ranks triples for its Table 5; this rule is ours.
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
    """Ranks source sentences by their best fact; ``facts`` are sorted, best first."""
    locations = map(location_of, facts)
    return tuple(dict.fromkeys((p, s) for p, s in locations if p is not None and s is not None))


def rank_passages(facts: Iterable[Fact], steps: Sequence[Step]) -> tuple[str, ...]:
    """Ranks passages by their best fact; passages without facts follow in order of retrieval."""
    sources = [passage for passage, _ in map(location_of, facts) if passage is not None]
    return tuple(dict.fromkeys([*sources, *(p for step in steps for p in step.passages)]))
