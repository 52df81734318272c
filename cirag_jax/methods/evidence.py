"""What a method has collected: triples with their provenance, and the rankings they induce."""

from collections.abc import Iterable, Sequence

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.triples.normalization import Normalization, triple_key
from cirag_jax.types import Passage, Step, Triple


class Evidence:
    """The pools of the cascade: core triples, sentences and passages, in order, each once.

    Args:
      normalization: normalisation by which triples are equal.
    """

    def __init__(self, normalization: Normalization):
        self.normalization: Normalization = normalization
        self._triples: dict[tuple[str, str, str], Triple] = {}
        self._seen: dict[str, Passage] = {}

    def see(self, passages: Iterable[Passage]) -> None:
        """Notes passages that were retrieved."""
        for passage in passages:
            self._seen.setdefault(passage.id, passage)

    def keep(self, triples: Iterable[Triple]) -> None:
        """Adds core triples."""
        for triple in triples:
            self._triples.setdefault(triple_key(triple, self.normalization), triple)

    @property
    def triples(self) -> tuple[Triple, ...]:
        """Core triples (the paper's C)."""
        return tuple(self._triples.values())

    @property
    def sentences(self) -> tuple[tuple[str, int], ...]:
        """Core sentences (S) as (passage id, sentence index)."""
        places = ((t.passage_id, t.sentence) for t in self.triples)
        known = (
            (p, s)
            for p, s in places
            # A store may have been made from other sentence boundaries.
            if p in self._seen and s is not None and s < len(sentences_of(self._seen[p]))
        )
        return tuple(dict.fromkeys(known))

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Core passages (D)."""
        ids = dict.fromkeys(t.passage_id for t in self.triples if t.passage_id is not None)
        return tuple(self._seen[passage_id] for passage_id in ids if passage_id in self._seen)

    @property
    def seen(self) -> tuple[Passage, ...]:
        """Everything retrieved so far, in order."""
        return tuple(self._seen.values())

    def sentence(self, place: tuple[str, int]) -> str:
        """A sentence with its passage's title in front."""
        passage = self._seen[place[0]]
        return f"{passage.title}: {sentences_of(passage)[place[1]].strip()}"


def rank_triples(steps: Sequence[Step], normalization: Normalization) -> tuple[Triple, ...]:
    """Core triples by round, then by the ranker's score; then the other candidates by best score.

    The paper's Table 5 does not say how triples are ranked; this is the rule of our specification.
    """
    ranked: dict[tuple[str, str, str], Triple] = {}
    for step in steps:
        score = dict(zip(step.candidates, step.scores, strict=True))
        for triple in sorted(step.kept, key=lambda t: -score.get(t, float("-inf"))):
            ranked.setdefault(triple_key(triple, normalization), triple)
    rest = [pair for step in steps for pair in zip(step.candidates, step.scores, strict=True)]
    for triple, _ in sorted(rest, key=lambda pair: -pair[1]):
        ranked.setdefault(triple_key(triple, normalization), triple)
    return tuple(ranked.values())


def rank_sentences(triples: Iterable[Triple]) -> tuple[tuple[str, int], ...]:
    """Sentences in the order of their best triple."""
    places = ((t.passage_id, t.sentence) for t in triples)
    return tuple(dict.fromkeys((p, s) for p, s in places if p is not None and s is not None))


def rank_passages(triples: Iterable[Triple], steps: Sequence[Step]) -> tuple[str, ...]:
    """Passages in the order of their best triple, then those without one, as retrieved."""
    first = [t.passage_id for t in triples if t.passage_id is not None]
    return tuple(dict.fromkeys([*first, *(p for step in steps for p in step.passages)]))
