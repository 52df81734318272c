"""Comparison of a reranker with a baseline by MRR and Recall@K, with confidence intervals."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cirag_jax.datasets import chains as chains_lib
from cirag_jax.evaluation.overlap import mean_of
from cirag_jax.evaluation.significance import paired_interval
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.types import Dataset, Question

KS = (1, 2, 3, 5, 10)

Score = Callable[[Sequence[str], Sequence[Sequence[str]]], Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True)
class Reranking:
    """A question's candidate texts; ``relevant`` are the indices of the gold texts."""

    query: str
    texts: tuple[str, ...]
    relevant: tuple[int, ...]


def passage_problems(
    dataset: Dataset, questions: Sequence[Question], index: PassageIndex | None, retrieved: int
) -> list[Reranking]:
    """Returns a reranking problem for each question with gold passages.

    The candidates are the question's context, the first ``retrieved`` passages of ``index``, and
    the gold passages.
    """
    retrieved_ids: list[list[str]] = [[] for _ in questions]
    if index is not None and retrieved:
        row_QK, _ = index.search([question.question for question in questions], retrieved)
        retrieved_ids = [[index.ids[row] for row in rows if row >= 0] for rows in row_QK]
    problems = []
    for question, more in zip(questions, retrieved_ids, strict=True):
        gold = question.supporting or ()
        # By text, because several ids may have the same text.
        text_of = {
            pid: chains_lib.passage_text(dataset.corpus[pid])
            for pid in (*(question.context or ()), *more, *gold)
        }
        texts, gold_texts = tuple(dict.fromkeys(text_of.values())), {text_of[pid] for pid in gold}
        relevant = tuple(place for place, text in enumerate(texts) if text in gold_texts)
        problems.append(Reranking(question.question, texts, relevant))
    return [problem for problem in problems if problem.relevant]


def ranks(problem: Reranking, score_C: np.ndarray) -> np.ndarray:
    """Returns the rank of each gold text, best first, from 1.

    Ties count against the scorer, so constant scores give the worst ranks.
    """
    relevant = np.zeros(len(problem.texts), bool)
    relevant[list(problem.relevant)] = True
    gold = np.sort(score_C[relevant])[::-1]
    others = score_C[~relevant]
    return np.array([1 + i + int((others >= score).sum()) for i, score in enumerate(gold)])


def metrics(problems: Sequence[Reranking], scores: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns ``mrr`` (of the first gold text) and ``recall@K`` of every problem, float64."""
    all_ranks = [ranks(p, np.asarray(s)) for p, s in zip(problems, scores, strict=True)]
    result = {"mrr": np.array([1.0 / rank_R[0] for rank_R in all_ranks])}
    for k in KS:
        result[f"recall@{k}"] = np.array([float((rank_R <= k).mean()) for rank_R in all_ranks])
    return result


def compare(
    problems: Sequence[Reranking], ours: Score, baseline: Score, *, samples: int, seed: int
) -> dict[str, Any]:
    """Returns mean metrics of two scorers, and their ``difference`` with 95 % intervals.

    The result has ``ours`` as ``cross_encoder`` and ``baseline`` as ``bi_encoder``.
    """
    queries = [problem.query for problem in problems]
    texts = [problem.texts for problem in problems]
    our_metrics = metrics(problems, ours(queries, texts))
    baseline_metrics = metrics(problems, baseline(queries, texts))
    return {
        "num_questions": len(problems),
        "candidates_per_question": float(np.mean([len(t) for t in texts])),
        "cross_encoder": {name: float(values.mean()) for name, values in our_metrics.items()},
        "bi_encoder": {name: float(values.mean()) for name, values in baseline_metrics.items()},
        "difference": {
            name: paired_interval(mean_of(values), mean_of(baseline_metrics[name]), samples, seed)
            for name, values in our_metrics.items()
        },
    }
