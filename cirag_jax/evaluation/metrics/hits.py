"""hit@K: whether an answer stands in one of the first K passages (DPR, Karpukhin et al. 2020).

For questions whose benchmark names no gold passages (NaturalQuestions, WebQuestions, Bamboogle).
Where it does, recall says more, and the question does not count here. FlashRAG calls its own form
of it ``retrieval_recall``.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.chains import passage_text
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import Answered, Scoring, over
from cirag_jax.types import Passage, Prediction

NEEDS_CORPUS = True
TITLES = {"hit": "hit"}

# Runs of letters, digits and marks, or one other character that is no space.
_TOKENS = re.compile(r"\w+|[^\w\s]")


def measure(answered: Sequence[Answered], scoring: Scoring) -> Mapping[str, Ratio]:
    """``hit@K`` over the questions with answers whose gold passages are unknown."""
    counted = [bool(q.answers) and q.supporting is None for q, _ in answered]
    texts = scoring.passages() if any(counted) else {}
    ranks = [
        _first(found, question.answers, texts) if counts else None
        for counts, (question, found) in zip(counted, answered, strict=True)
    ]
    return {
        f"hit@{k}": over([None if rank is None else float(rank < k) for rank in ranks])
        for k in scoring.recall_at
    }


def holds(passage: Passage, answer: str) -> bool:
    """Whether the tokens of ``answer`` follow each other in title or text of a passage.

    Tokens are compared in Unicode's form NFD without regard to case; an answer without any is in no
    passage.
    """
    wanted = _tokens(answer)
    return bool(wanted) and f" {wanted} " in f" {_tokens(passage_text(passage))} "


def _first(found: Prediction | None, answers: Sequence[str], texts: Mapping[str, Passage]) -> float:
    """Rank of the first passage that holds an answer, from 0."""
    ranked = found.passages if found else ()
    for rank, passage_id in enumerate(ranked):
        passage = texts.get(passage_id)
        if passage is not None and any(holds(passage, answer) for answer in answers):
            return rank
    return float("inf")


def _tokens(text: str) -> str:
    return " ".join(_TOKENS.findall(unicodedata.normalize("NFD", text).casefold()))
