"""Each answer metric as the larger of the raw response and the short answer read from it (DualRAG).

DualRAG's released evaluation extracts a short answer from a long response once more, scores both
and keeps, for every metric by itself, the larger score. That can only help, so that these scores
are not comparable with `answers`.
"""

from collections.abc import Mapping, Sequence

from cirag_jax.evaluation.metrics.answers import METRICS
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import Answered, Scoring, over
from cirag_jax.types import Prediction

TITLES = {f"{name}_max": f"{name.upper()} max" for name in METRICS}


def measure(answered: Sequence[Answered], scoring: Scoring) -> Mapping[str, Ratio]:
    """``em_max``, ``f1_max`` and ``acc_max`` over the questions that have a gold answer."""
    texts = [(raw(found), found.answer) if found else ("",) for _, found in answered]
    golds = [question.answers for question, _ in answered]
    return {
        f"{name}_max": over(
            [
                max(metric(text, gold, scoring.profile) for text in both) if gold else None
                for both, gold in zip(texts, golds, strict=True)
            ]
        )
        for name, metric in METRICS.items()
    }


def raw(found: Prediction) -> str:
    """The response from which the answer was read: the last attempt's that gave it, else the last
    one's; empty where nothing was asked.
    """
    gave = [attempt for attempt in found.attempts if attempt.answer == found.answer]
    last = (gave or list(found.attempts))[-1:]
    return last[0].response if last else ""
