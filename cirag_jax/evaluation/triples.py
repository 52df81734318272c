"""Exact and soft scores of extracted triples and entities against references.

The papers define no soft score, so this one is specific to this project. The similarity of two
triples is the token F1 (SQuAD's, over multisets) of their normalized texts: head, relation and
tail. Predictions and references are matched one to one so that the sum of similarities is largest
(Kuhn, 1955). This sum replaces the number of matches in precision, recall and F1. KiRAG uses the
same token F1 to accept generated triples as candidates, if it is at least 0.6.
"""

import collections
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import optimize

from cirag_jax.evaluation.overlap import Overlap
from cirag_jax.triples.normalization import Normalization, normalize, triple_key
from cirag_jax.types import Triple

Key = tuple[str, str, str]


def exact_overlap(
    predicted: Iterable[Triple], reference: Iterable[Triple], normalization: Normalization = "ascii"
) -> Overlap:
    """Counts distinct triples that are equal after normalization."""
    return Overlap.of(set(_keys(predicted, normalization)), set(_keys(reference, normalization)))


def soft_overlap(
    predicted: Iterable[Triple], reference: Iterable[Triple], normalization: Normalization = "ascii"
) -> Overlap:
    """Matches triples one to one by token F1 (see the module); ``matched`` is the sum of F1."""
    keys, gold = _keys(predicted, normalization), _keys(reference, normalization)
    if not keys or not gold:
        return Overlap(0.0, len(keys), len(gold))
    similarity_PR = similarities([" ".join(key) for key in keys], [" ".join(key) for key in gold])
    rows, columns = optimize.linear_sum_assignment(similarity_PR, maximize=True)
    return Overlap(float(similarity_PR[rows, columns].sum()), len(keys), len(gold))


def similarities(predicted: Sequence[str], reference: Sequence[str]) -> np.ndarray:
    """Returns the token F1 of every pair of texts, float64 [P, R]; 0 without shared tokens."""
    predicted_P = [collections.Counter(text.split()) for text in predicted]
    reference_R = [collections.Counter(text.split()) for text in reference]
    similarity_PR = np.zeros((len(predicted_P), len(reference_R)))
    for row, a in enumerate(predicted_P):
        for column, b in enumerate(reference_R):
            shared = (a & b).total()
            if shared:
                similarity_PR[row, column] = 2 * shared / (a.total() + b.total())
    return similarity_PR


def entity_overlap(
    predicted: Iterable[str], reference: Iterable[str], normalization: Normalization = "ascii"
) -> Overlap:
    """Counts distinct names that are equal after normalization."""
    return Overlap.of(_names(predicted, normalization), _names(reference, normalization))


def _keys(triples: Iterable[Triple], normalization: Normalization) -> list[Key]:
    return list(dict.fromkeys(triple_key(triple, normalization) for triple in triples))


def _names(names: Iterable[str], normalization: Normalization) -> set[str]:
    normalized = (
        normalize(name, normalization) or normalize(name, "unicode") or name.strip()
        for name in names
    )
    return {name for name in normalized if name}
