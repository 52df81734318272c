"""Retrieved and gold evidence at three granularities: passages, sentences and triples.

Passages are compared by id, and sentences by (passage id, index). If passages overlap, a gold
sentence may come from any passage that contains it, and a gold passage counts as retrieved if all
its gold sentences are retrieved (`sentence_substitutes`, `passage_substitutes`).

Triples are compared by their `endpoints`, without the relation. Extracted relations have free
wording ("was directed by") and either direction, but annotated ones come from a fixed list
("director"). A triple is therefore correct if it joins the right two entities, and two gold facts
about the same entities count as one. Names must be equal after normalization ("12 May 1920" is not
"May 12, 1920"), so recall of triples is a lower bound.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.evaluation.recall import NO_SUBSTITUTES, Substitutes, recall_at, recall_by_step
from cirag_jax.triples.normalization import triple_key
from cirag_jax.types import Prediction, Question, Triple


def recall_per_step(
    predictions: Sequence[Prediction | None], questions: Sequence[Question], ks: Sequence[int]
) -> dict[str, Any] | None:
    """Returns the recall of gold passages by step and by hop; None without steps.

    A prediction is None if the method failed before it read evidence. Questions without
    ``supporting`` are ignored.

    Returns:
      ``found``: for each step i, the mean share of gold passages that steps 1 to i retrieved.
      ``hops``: for each i, the ``recall@K`` of the i-th gold passage in the final ranking, and
      ``num_questions`` with at least i gold passages (KiRAG, Figures 3 and 9).
      ``num_questions``: the number of questions with gold passages.
    """
    rows = [
        (p, gold_in_order(q), passage_substitutes(q))
        for p, q in zip(predictions, questions, strict=True)
        if q.supporting
    ]
    num_steps = max((len(p.steps) for p, *_ in rows if p), default=0)
    if not num_steps:
        return None
    recall_QS = [
        recall_by_step([step.passages for step in p.steps] if p else [], gold, num_steps, others)
        for p, gold, others in rows
    ]
    hops = []
    for hop in range(max(len(gold) for _, gold, _ in rows)):
        hop_rows = [
            (p.passages if p else (), gold[hop : hop + 1], others)
            for p, gold, others in rows
            if hop < len(gold)
        ]
        means = {
            f"recall@{k}": float(np.mean([recall_at(r, g, k, other) for r, g, other in hop_rows]))
            for k in ks
        }
        hops.append({**means, "num_questions": len(hop_rows)})
    mean_S = np.mean(recall_QS, axis=0).tolist()
    return {"found": mean_S, "hops": hops, "num_questions": len(rows)}


def gold_in_order(question: Question) -> tuple[str, ...]:
    """Returns the gold passages, in reasoning order if it is annotated."""
    decomposed = [step.supporting for step in question.decomposition or () if step.supporting]
    return tuple(dict.fromkeys([*decomposed, *(question.supporting or ())]))


def sentence_substitutes(question: Question) -> Substitutes:
    """Maps each gold sentence that occurs in several passages to all its places."""
    return {place: [places] for places in question.same_sentences or () for place in places}


def passage_substitutes(question: Question) -> Substitutes:
    """Maps each gold passage to the passages that contain each of its gold sentences."""
    if not question.same_sentences:
        return NO_SUBSTITUTES
    same = {place: places for places in question.same_sentences for place in places}
    substitutes: dict[Hashable, list[Collection[Hashable]]] = {}
    for place in question.supporting_sentences or ():
        passage_ids = {passage_id for passage_id, _ in same.get(place, (place,))}
        substitutes.setdefault(place[0], []).append(passage_ids)
    return substitutes


def endpoints(head: str, tail: str) -> tuple[str, ...]:
    """Returns the head and tail of a triple, normalized and in alphabetical order."""
    head, _, tail = triple_key(Triple(head, "", tail), "unicode")
    return tuple(sorted((head, tail)))


# Granularity -> functions that return the retrieved items (best first), the gold items (empty
# without annotations), and the substitutes of gold items.
GRANULARITIES: Mapping[
    str,
    tuple[
        Callable[[Prediction], Sequence[Hashable]],
        Callable[[Question], Sequence[Hashable]],
        Callable[[Question], Substitutes],
    ],
] = {
    "passage": (lambda p: p.passages, lambda q: q.supporting or (), passage_substitutes),
    "sentence": (
        lambda p: p.sentences,
        lambda q: q.supporting_sentences or (),
        sentence_substitutes,
    ),
    "triple": (
        lambda p: [endpoints(triple.head, triple.tail) for triple in p.triples],
        lambda q: [endpoints(head, tail) for head, _, tail in q.evidences or ()],
        lambda q: NO_SUBSTITUTES,
    ),
}
