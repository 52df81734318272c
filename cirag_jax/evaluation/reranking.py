"""How well a reranker puts gold texts first: MRR and Recall@K beside another's, with intervals."""

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
    """One question's candidates, and which of them are gold: places in ``texts``."""

    query: str
    texts: tuple[str, ...]
    relevant: tuple[int, ...]


def passage_problems(
    dataset: Dataset, questions: Sequence[Question], index: PassageIndex | None, retrieved: int
) -> list[Reranking]:
    """Each question's own context and the passages that ``index`` finds for it; gold ones count.

    Gold passages that are in neither are added, so that every question has all of its own.
    """
    found: list[list[str]] = [[] for _ in questions]
    if index is not None and retrieved:
        row_QK, _ = index.search([question.question for question in questions], retrieved)
        found = [[index.ids[row] for row in rows if row >= 0] for rows in row_QK]
    problems = []
    for question, more in zip(questions, found, strict=True):
        gold = question.supporting or ()
        ids = list(dict.fromkeys([*(question.context or ()), *more, *gold]))
        problems.append(
            Reranking(
                question.question,
                tuple(chains_lib.passage_text(dataset.corpus[pid]) for pid in ids),
                tuple(place for place, pid in enumerate(ids) if pid in gold),
            )
        )
    return [problem for problem in problems if problem.relevant]


def ranks(problem: Reranking, score_C: np.ndarray) -> np.ndarray:
    """Rank of every gold text, best first, from 1; ties are broken against the scorer.

    So constant scores, which say nothing, earn nothing.
    """
    relevant = np.zeros(len(problem.texts), bool)
    relevant[list(problem.relevant)] = True
    gold = np.sort(score_C[relevant])[::-1]
    others = score_C[~relevant]
    return np.array([1 + i + int((others >= score).sum()) for i, score in enumerate(gold)])


def metrics(problems: Sequence[Reranking], scores: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """``mrr`` (of the first gold text) and ``recall@K`` of every problem, float64 arrays."""
    all_ranks = [ranks(p, np.asarray(s)) for p, s in zip(problems, scores, strict=True)]
    result = {"mrr": np.array([1.0 / rank_R[0] for rank_R in all_ranks])}
    for k in KS:
        result[f"recall@{k}"] = np.array([float((rank_R <= k).mean()) for rank_R in all_ranks])
    return result


def compare(
    problems: Sequence[Reranking], ours: Score, baseline: Score, *, samples: int, seed: int
) -> dict[str, Any]:
    """Mean metrics of two scorers and their differences with 95 % intervals.

    Returns:
      ``cross_encoder``, ``bi_encoder``, counts, and ``difference`` (see
      `significance.paired_interval`).
    """
    queries = [problem.query for problem in problems]
    texts = [problem.texts for problem in problems]
    mine = metrics(problems, ours(queries, texts))
    theirs = metrics(problems, baseline(queries, texts))
    return {
        "num_questions": len(problems),
        "candidates_per_question": float(np.mean([len(t) for t in texts])),
        "cross_encoder": {name: float(values.mean()) for name, values in mine.items()},
        "bi_encoder": {name: float(values.mean()) for name, values in theirs.items()},
        "difference": {
            name: paired_interval(mean_of(values), mean_of(theirs[name]), samples, seed)
            for name, values in mine.items()
        },
    }
