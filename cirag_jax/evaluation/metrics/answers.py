"""Exact match, F1 and accuracy of the short answer; a question that failed answers nothing."""

from collections.abc import Mapping, Sequence

from cirag_jax.evaluation import answers
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import Answered, Scoring, over

METRICS = {"em": answers.exact_match, "f1": answers.f1, "acc": answers.accuracy}
TITLES = {"em": "EM", "f1": "F1", "acc": "Acc"}


def measure(answered: Sequence[Answered], scoring: Scoring) -> Mapping[str, Ratio]:
    """``em``, ``f1`` and ``acc`` over the questions that have a gold answer."""
    texts = [found.answer if found else "" for _, found in answered]
    golds = [question.answers for question, _ in answered]
    return {
        name: over(
            [
                metric(text, gold, scoring.profile) if gold else None
                for text, gold in zip(texts, golds, strict=True)
            ]
        )
        for name, metric in METRICS.items()
    }
