"""EM and F1 of the answers that each stage of the cascade gave (CIRAG, Figure 4).

A question counts at the granularity from which it was answered; ``default`` are those that every
stage refused. The stages see other questions, so that a difference between them is no comparison
of granularities: for that, run each alone (``cirag.granularities``) and compare the runs.
"""

from collections.abc import Mapping, Sequence

from cirag_jax.evaluation.metrics.answers import METRICS
from cirag_jax.evaluation.metrics.answers import TITLES as OF_ANSWERS
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import Answered, Scoring, over
from cirag_jax.types import GRANULARITIES

SCORES = ("em", "f1")
TITLES = {f"{g}_{name}": f"{g} {OF_ANSWERS[name]}" for g in GRANULARITIES for name in SCORES}


def measure(answered: Sequence[Answered], scoring: Scoring) -> Mapping[str, Ratio]:
    """``triple_em``, ``triple_f1``, ``sentence_em`` and so on, over the questions with a gold
    answer that were answered there; one that failed was answered nowhere.
    """
    return {
        f"{granularity}_{name}": over(
            [
                METRICS[name](found.answer, question.answers, scoring.profile)
                if found and found.granularity == granularity and question.answers
                else None
                for question, found in answered
            ]
        )
        for granularity in GRANULARITIES
        for name in SCORES
    }
