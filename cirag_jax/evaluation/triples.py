"""How well extracted triples and entities meet reference ones, exactly and softly.

None of the papers defines a soft score of triples (KiRAG accepts a generated triple as a candidate
from a token F1 of 0.6 on, which we follow in comparing triples by token F1). Ours: the similarity
of two triples is the token F1 (SQuAD's, over multisets) of their texts, head, relation and tail
one after the other, normalised; predictions and references are matched one to one so that the sum
of similarities is largest (the assignment problem, Kuhn 1955); that sum takes the place of the
number of matches in precision, recall and F1.
"""

import collections
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import optimize

from cirag_jax.evaluation.overlap import Overlap
from cirag_jax.triples.normalization import Normalization, normalise, triple_key
from cirag_jax.types import Triple

Key = tuple[str, str, str]


def exact_overlap(
    predicted: Iterable[Triple], reference: Iterable[Triple], normalization: Normalization = "ascii"
) -> Overlap:
    """Triples that are equal after normalisation; each counts once."""
    mine, gold = set(_keys(predicted, normalization)), set(_keys(reference, normalization))
    return Overlap(len(mine & gold), len(mine), len(gold))


def soft_overlap(
    predicted: Iterable[Triple], reference: Iterable[Triple], normalization: Normalization = "ascii"
) -> Overlap:
    """The best one-to-one matching by token F1, see the module; ``matched`` is its sum."""
    mine, gold = _keys(predicted, normalization), _keys(reference, normalization)
    if not mine or not gold:
        return Overlap(0.0, len(mine), len(gold))
    similarity_PR = similarities([" ".join(k) for k in mine], [" ".join(k) for k in gold])
    rows, columns = optimize.linear_sum_assignment(similarity_PR, maximize=True)
    return Overlap(float(similarity_PR[rows, columns].sum()), len(mine), len(gold))


def similarities(predicted: Sequence[str], reference: Sequence[str]) -> np.ndarray:
    """Token F1 of every pair of texts: float64 [P, R]; two texts without tokens have 0."""
    mine = [collections.Counter(text.split()) for text in predicted]
    gold = [collections.Counter(text.split()) for text in reference]
    similarity_PR = np.zeros((len(mine), len(gold)))
    for row, a in enumerate(mine):
        for column, b in enumerate(gold):
            shared = (a & b).total()
            if shared:
                similarity_PR[row, column] = 2 * shared / (a.total() + b.total())
    return similarity_PR


def entity_overlap(
    predicted: Iterable[str], reference: Iterable[str], normalization: Normalization = "ascii"
) -> Overlap:
    """Names that are equal after normalisation; each counts once."""
    mine, gold = _names(predicted, normalization), _names(reference, normalization)
    return Overlap(len(mine & gold), len(mine), len(gold))


def _keys(triples: Iterable[Triple], normalization: Normalization) -> list[Key]:
    return list(dict.fromkeys(triple_key(triple, normalization) for triple in triples))


def _names(names: Iterable[str], normalization: Normalization) -> set[str]:
    found = (
        normalise(name, normalization) or normalise(name, "unicode") or name.strip()
        for name in names
    )
    return {name for name in found if name}
