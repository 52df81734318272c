"""The evidence behind an answer and its gold, at three granularities: passage, sentence, triple.

Passages are compared by id, sentences by (passage id, index). Where passages overlap, a gold
sentence may be read in any that holds it, and a gold passage of which every gold sentence is read
counts as found (`sentences_elsewhere`, `passages_elsewhere`).

Triples are compared by their `endpoints`: an extracted relation is worded freely ("was directed
by") and may point the other way, an annotated one comes from a fixed list ("director"), so that the
relation is not compared. A triple therefore counts when it joins the right two entities; two gold
facts about one pair of entities count as one. Spelling must agree after normalisation ("12 May
1920" is not "May 12, 1920"), so recall of triples is a lower bound.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.evaluation.recall import NOWHERE, Elsewhere, recall_at, recall_by_step
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Prediction, Question, Triple


def recall_per_step(
    predictions: Sequence[Prediction | None], questions: Sequence[Question], ks: Sequence[int]
) -> dict[str, Any] | None:
    """How recall of gold passages grows with the steps, and how it falls with the hops.

    Args:
      predictions: one a question, with its steps; None where the question failed.
      questions: with ``supporting`` where annotated.
      ks: the K.

    Returns:
      ``found``: for each step i the mean share of gold passages that steps 1 to i retrieved; a
      question that ended before keeps what it had. ``hops``: for each i, over the questions that
      need so many, whether the i-th gold passage alone is among the first K of the final ranking
      (KiRAG, Figures 3 and 9): ``recall@K`` and ``num_questions``. None where no question has
      gold passages or none took a step.

    Raises:
      ValueError: lengths differ.
    """
    rows = [
        (p, _in_order(q), passages_elsewhere(q))
        for p, q in zip(predictions, questions, strict=True)
        if q.supporting
    ]
    num_steps = max((len(p.steps) for p, *_ in rows if p), default=0)
    if not num_steps:
        return None
    found_QS = [
        recall_by_step([step.passages for step in p.steps] if p else [], gold, num_steps, elsewhere)
        for p, gold, elsewhere in rows
    ]
    hops = []
    for hop in range(max(len(gold) for _, gold, _ in rows)):
        needed = [
            (p.passages if p else (), gold[hop : hop + 1], elsewhere)
            for p, gold, elsewhere in rows
            if hop < len(gold)
        ]
        means = {
            f"recall@{k}": float(np.mean([recall_at(f, g, k, other) for f, g, other in needed]))
            for k in ks
        }
        hops.append({**means, "num_questions": len(needed)})
    found_S = np.mean(found_QS, axis=0).tolist()
    return {"found": found_S, "hops": hops, "num_questions": len(rows)}


def _in_order(question: Question) -> tuple[str, ...]:
    """Gold passages in the order of reasoning, as far as that is annotated."""
    decomposed = [step.supporting for step in question.decomposition or () if step.supporting]
    return tuple(dict.fromkeys([*decomposed, *(question.supporting or ())]))


def sentences_elsewhere(question: Question) -> Elsewhere:
    """Of a gold sentence that several passages hold, the places where it stands."""
    return {place: [places] for places in question.same_sentences or () for place in places}


def passages_elsewhere(question: Question) -> Elsewhere:
    """Of a gold passage, for each of its gold sentences the passages that hold it."""
    if not question.same_sentences:
        return NOWHERE
    same = {place: places for places in question.same_sentences for place in places}
    found: dict[Hashable, list[Collection[Hashable]]] = {}
    for place in question.supporting_sentences or ():
        holding = {passage_id for passage_id, _ in same.get(place, (place,))}
        found.setdefault(place[0], []).append(holding)
    return found


def endpoints(head: str, tail: str) -> tuple[str, ...]:
    """Head and tail of a triple, normalised and in alphabetical order."""
    head, _, tail = triple_key(Triple(head, "", tail), "unicode")
    return tuple(sorted((head, tail)))


# What was found, best first; the gold of a question, empty where it is not annotated; and what
# does as well.
GRANULARITIES: Mapping[
    str,
    tuple[
        Callable[[Prediction], Sequence[Hashable]],
        Callable[[Question], Sequence[Hashable]],
        Callable[[Question], Elsewhere],
    ],
] = {
    "passage": (lambda p: p.passages, lambda q: q.supporting or (), passages_elsewhere),
    "sentence": (
        lambda p: p.sentences,
        lambda q: q.supporting_sentences or (),
        sentences_elsewhere,
    ),
    "triple": (
        lambda p: [endpoints(triple.head, triple.tail) for triple in p.triples],
        lambda q: [endpoints(head, tail) for head, _, tail in q.evidences or ()],
        lambda q: NOWHERE,
    ),
}
