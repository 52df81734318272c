"""The evidence behind an answer and its gold, at three granularities: passage, sentence, triple.

Passages are compared by id, sentences by (passage id, index), triples by their `endpoints`: an
extracted relation is worded freely ("was directed by") and may point the other way, an annotated
one comes from a fixed list ("director"), so that the relation is not compared. A triple therefore
counts when it joins the right two entities; two gold facts about one pair of entities count as one.
Spelling must agree after normalisation ("12 May 1920" is not "May 12, 1920"), so recall of triples
is a lower bound.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Prediction, Question, Triple


def endpoints(head: str, tail: str) -> tuple[str, ...]:
    """Head and tail of a triple, normalised and in alphabetical order."""
    head, _, tail = triple_key(Triple(head, "", tail), "unicode")
    return tuple(sorted((head, tail)))


# What was found, best first, and the gold of a question, empty where it is not annotated.
GRANULARITIES: Mapping[
    str,
    tuple[
        Callable[[Prediction], Sequence[Hashable]],
        Callable[[Question], Sequence[Hashable]],
    ],
] = {
    "passage": (lambda p: p.passages, lambda q: q.supporting or ()),
    "sentence": (lambda p: p.sentences, lambda q: q.supporting_sentences or ()),
    "triple": (
        lambda p: [endpoints(triple.head, triple.tail) for triple in p.triples],
        lambda q: [endpoints(head, tail) for head, _, tail in q.evidences or ()],
    ),
}
