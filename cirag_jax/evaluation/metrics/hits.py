"""hit@K: whether an answer stands in one of the first K passages (DPR, Karpukhin et al. 2020).

For questions whose benchmark names no gold passages (NaturalQuestions, WebQuestions, Bamboogle).
Where it does, recall says more, and the question does not count here. FlashRAG calls its own form
of it ``retrieval_recall``.
"""

import functools
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from cirag_jax.datasets.chains import passage_text
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import Answered, Scoring, over
from cirag_jax.types import Prediction

NEEDS_CORPUS = True
TITLES = {"hit": "hit"}


class _Spaced(dict[int, str]):
    """Every character with the spaces that part it from other tokens.

    A token is a run of letters, numbers and marks (an accent of NFD is one), or another character
    that is neither space nor control.
    """

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = unicodedata.category(char)[0]
        self[code] = char if kind in "LNM" else " " if kind in "ZC" else f" {char} "
        return self[code]


_SPACED = _Spaced()


def measure(answered: Sequence[Answered], scoring: Scoring) -> Mapping[str, Ratio]:
    """``hit@K`` over the questions with answers whose gold passages are unknown.

    A passage holds an answer if the answer's tokens follow each other in its title or text. Tokens
    are compared in Unicode's form NFD without regard to case; an answer without any is in no
    passage.
    """
    counted = [bool(q.answers) and q.supporting is None for q, _ in answered]
    texts = scoring.passages() if any(counted) else {}

    @functools.cache
    def tokens_of(passage_id: str) -> str:
        return _tokens(passage_text(texts[passage_id])) if passage_id in texts else ""

    most = max(scoring.recall_at)
    ranks = [
        _first(found, question.answers, tokens_of, most) if counts else None
        for counts, (question, found) in zip(counted, answered, strict=True)
    ]
    return {
        f"hit@{k}": over([None if rank is None else float(rank < k) for rank in ranks])
        for k in scoring.recall_at
    }


def _first(
    found: Prediction | None, answers: Sequence[str], tokens_of: Callable[[str], str], most: int
) -> float:
    """Rank of the first of ``most`` passages that holds an answer, from 0."""
    wanted = [tokens for tokens in map(_tokens, answers) if tokens.strip()]
    for rank, passage_id in enumerate(found.passages[:most] if found else ()):
        held = tokens_of(passage_id)
        if any(tokens in held for tokens in wanted):
            return rank
    return float("inf")


def _tokens(text: str) -> str:
    """A text's tokens, each between two single spaces."""
    spaced = unicodedata.normalize("NFD", text).casefold().translate(_SPACED)
    return f" {' '.join(spaced.split())} "
