"""Diagnostics of hops: recall, unsupported evidence, bindings of unknowns, and plans.

The hops of a run are the constraints of C2RAG's plan, or the steps of any other method. Annotated
hops come from `datasets.annotations.hops_of`. The papers judge bindings and plans by hand; here,
names and relations are compared by their words, so synonyms count as errors.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cirag_jax.datasets.annotations import Hop, hops_of, names, words
from cirag_jax.evaluation.evidence import gold_in_order, passage_substitutes
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.methods.c2rag.prompts import Constraint
from cirag_jax.methods.common.evidence import location_of
from cirag_jax.types import Prediction, Question, Step

_HOPS = (1, 2, 3, 4)  # MuSiQue has at most four hops; later ones are not measured.
_STEM = 5  # Relations share a word if its first letters agree, as in "directed" and "director".

TITLES = {
    **{f"hop{hop}_recall": f"hop {hop} R" for hop in _HOPS},
    **{f"hop{hop}_unsupported": f"hop {hop} unsupported" for hop in _HOPS},
    "resolved": "resolved",
    "binding_precision": "precision",
    "confident_wrong": "confident, wrong",
    "plan_error": "wrong hops",
    "plan_invalid": "wrong plans",
}


def hop_scores(answered: Sequence[AnsweredQuestion], scoring: Scoring) -> dict[str, Ratio]:
    """Returns the scores of each hop; see `TITLES`.

    ``hopI_recall@K``: recall@K of the I-th gold passage in the final ranking (KiRAG, Figures 3 and
    9). ``hopI_unsupported``: share of the evidence of hop I that is not from gold passages (C2RAG,
    Figure 3c). ``resolved``, ``binding_precision`` and ``confident_wrong``: share of unknowns with
    a binding, share of these bindings that are right, and share of unknowns with a wrong binding
    (C2RAG, Table 7). ``plan_error`` and ``plan_invalid``: share of constraints that do not match an
    annotated hop, and share of plans with such a constraint (C2RAG, Table 8).
    """
    passages = scoring.passages() if any(plan_of(p) for _, p in answered) else {}
    hops = [hops_of(question, passages) for question, _ in answered]
    return {
        **_recall(answered, scoring.recall_at),
        **_unsupported(answered),
        **_bindings(answered, hops),
        **_plans(answered, hops),
    }


def reason(kind: str, answered: Sequence[AnsweredQuestion]) -> str:
    """Returns why the score ``kind`` (without ``@K``) applies to no question."""
    if kind.startswith("hop"):
        if not any(question.supporting for question, _ in answered):
            return "no gold passages"
        return "no question has this hop"
    if not any(plan_of(prediction) for _, prediction in answered):
        return "plans no constraints"
    if kind == "resolved":
        return "plans no unknowns"
    if kind in ("binding_precision", "confident_wrong"):
        annotated = any(q.evidences or q.decomposition or q.supporting for q, _ in answered)
        return "binds no unknown" if annotated else "no annotated hops"
    return "no annotated relations"


# ------------------------------------------------------------------------------ recall and evidence


def _recall(answered: Sequence[AnsweredQuestion], ks: Sequence[int]) -> dict[str, Ratio]:
    golds = [gold_in_order(question) for question, _ in answered]
    return {
        f"hop{hop}_recall@{k}": mean_of(
            [
                recall_at(
                    prediction.passages if prediction else (),
                    gold[hop - 1 : hop],
                    k,
                    passage_substitutes(question),
                )
                if len(gold) >= hop
                else None
                for (question, prediction), gold in zip(answered, golds, strict=True)
            ]
        )
        for hop in _HOPS
        for k in ks
    }


def _unsupported(answered: Sequence[AnsweredQuestion]) -> dict[str, Ratio]:
    """Returns the unsupported share by hop, pooled over the evidence of all questions."""
    count_QH = np.zeros((len(answered), len(_HOPS)))
    wrong_QH = np.zeros_like(count_QH)
    for row, (question, prediction) in enumerate(answered):
        if not question.supporting or prediction is None:
            continue
        places = itertools.chain.from_iterable(question.same_sentences or ())
        gold = {*question.supporting, *(passage_id for passage_id, _ in places)}
        hop_steps = [s for s in prediction.steps if "constraint" in s.notes] or prediction.steps
        for hop, step in enumerate(hop_steps[: len(_HOPS)]):
            evidence = _evidence(step)
            count_QH[row, hop] = len(evidence)
            wrong_QH[row, hop] = sum(passage_id not in gold for passage_id in evidence)
    return {
        f"hop{hop}_unsupported": Ratio(wrong_QH[:, hop - 1], count_QH[:, hop - 1]) for hop in _HOPS
    }


def _evidence(step: Step) -> list[str | None]:
    """Returns the source passage of each evidence item of a step.

    The items are the units that the method kept, if it chose them from candidates; or else the
    passages of the step.
    """
    if step.candidates and "constraint" not in step.notes:
        return [location_of(unit)[0] for unit in step.kept]
    return list(step.passages)


# ------------------------------------------------------------------------------ bindings and plans


def plan_of(prediction: Prediction | None) -> list[Constraint]:
    """Returns the constraints of C2RAG's plan; empty for other methods."""
    steps = prediction.steps if prediction else ()
    rows = [step.notes["constraint"] for step in steps if "constraint" in step.notes]
    return [Constraint(head, relation, tail, tuple(more)) for head, relation, tail, *more in rows]


def _bindings(
    answered: Sequence[AnsweredQuestion], hops: Sequence[Sequence[Hop]]
) -> dict[str, Ratio]:
    """Compares each unknown's best name with the values of all annotated hops."""
    rows = []
    for (question, prediction), question_hops in zip(answered, hops, strict=True):
        unknowns = {v for constraint in plan_of(prediction) for v in constraint.variables}
        steps = prediction.steps if prediction else ()
        bound = {v: n[0] for s in steps for v, n in s.notes.get("names", {}).items() if n}
        values = _values(question, question_hops)
        right = sum(words(bound[v]) in values for v in unknowns & bound.keys())
        resolved = len(unknowns & bound.keys())
        annotated = bool(values)
        rows.append(
            (
                len(unknowns),
                resolved,
                right,
                resolved * annotated,
                (resolved - right) * annotated,
                len(unknowns) * annotated,
            )
        )
    unknown, resolved, right, checked, wrong, checkable = (
        np.array(rows, np.float64).reshape(-1, 6).T
    )
    return {
        "resolved": Ratio(resolved, unknown),
        "binding_precision": Ratio(right, checked),
        "confident_wrong": Ratio(wrong, checkable),
    }


def _values(question: Question, hops: Iterable[Hop]) -> set[frozenset[str]]:
    """Returns the words of each value that an unknown of the question may have."""
    texts = [answer for hop in hops for answer in hop.answers]
    texts += [h.triple[0] for h in hops if h.triple and not names(question.question, h.triple[0])]
    return {words(text) for text in texts}


def _plans(answered: Sequence[AnsweredQuestion], hops: Sequence[Sequence[Hop]]) -> dict[str, Ratio]:
    plans = [plan_of(prediction) for _, prediction in answered]
    wrong = [
        # HotpotQA and questions without annotations have no relations to compare with.
        wrong_constraints(plan, own) if p and (q.evidences or q.decomposition) else None
        for plan, own, (q, p) in zip(plans, hops, answered, strict=True)
    ]
    if not any(plans):
        wrong = [None] * len(plans)  # The method plans nothing.
    counts = [0 if w is None else len(plan) for plan, w in zip(plans, wrong, strict=True)]
    return {
        "plan_error": Ratio(
            np.array([len(w or ()) for w in wrong], np.float64), np.array(counts, np.float64)
        ),
        "plan_invalid": mean_of(
            [
                None if w is None else float(bool(w) or not plan)
                for plan, w in zip(plans, wrong, strict=True)
            ]
        ),
    }


def wrong_constraints(plan: Sequence[Constraint], hops: Sequence[Hop]) -> set[int]:
    """Returns the indices of the constraints with a wrong relation or a wrong unknown.

    Each constraint is matched with the first free hop whose wording has a word of its relation and
    names its ends. Constraints without a match are wrong. So is the later one of two constraints
    that share an unknown although their hops are about different entities, or that share none
    although one hop needs the answer of the other.
    """
    hop_of: dict[int, int] = {}
    for i, constraint in enumerate(plan):
        free = (j for j in range(len(hops)) if j not in hop_of.values())
        match = next((j for j in free if _matches(constraint, hops[j])), None)
        if match is not None:
            hop_of[i] = match
    wrong = set(range(len(plan))) - hop_of.keys()
    for (i, j), (other, k) in itertools.combinations(hop_of.items(), 2):
        first, second = hops[j], hops[k]
        depends = j in second.parents or k in first.parents
        same = bool(set(first.parents) & set(second.parents)) or (
            {words(a) for a in first.answers} & {words(a) for a in second.answers}
        )
        shares = bool(set(plan[i].variables) & set(plan[other].variables))
        if (depends and not shares) or (shares and not depends and not same):
            wrong.add(max(i, other))
    return wrong


def _matches(constraint: Constraint, hop: Hop) -> bool:
    wording = " ".join((hop.keywords, hop.sub_question, hop.noun))
    ends = " ".join((wording, hop.about, *hop.answers, *(hop.triple or ())))
    relation = _stems(" ".join(constraint.relations))
    return bool(relation & _stems(wording)) and all(names(ends, e) for e in constraint.entities)


def _stems(text: str) -> set[str]:
    return {word[:_STEM] for word in words(text)}


# -------------------------------------------------------------------------- histograms and graphs


def histograms(
    predictions: Sequence[Prediction], num_queries: Sequence[int]
) -> dict[str, dict[str, int]]:
    """Counts questions by number of ``steps`` and of retrieval ``queries`` (DualRAG, Fig. 3, 4)."""
    steps = collections.Counter(len(prediction.steps) for prediction in predictions)
    queries = collections.Counter(num_queries)
    return {
        name: {str(number): counts[number] for number in sorted(counts)}
        for name, counts in (("steps", steps), ("queries", queries))
    }


def graph_statistics(predictions: Iterable[Prediction]) -> Mapping[str, Any]:
    """Sums passages, entities, relations and triples of the questions' graphs (C2RAG, Table 4).

    Returns a ``reason`` instead if the method builds no graph per question.
    """
    totals = collections.Counter[str]()
    for prediction in predictions:
        for step in prediction.steps:
            if graph := step.notes.get("graph"):
                totals.update({"questions": 1, **graph})
    return dict(totals) if totals else {"reason": "builds no graph per question"}
