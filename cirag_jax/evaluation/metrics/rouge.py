"""ROUGE of long answers (Lin, 2004), as Google's ``rouge-score`` counts it, without stemming.

DualRAG reports ROUGE-2 and ROUGE-L of long-form answers (its Table 6) and does not name its
implementation. This one knows the letters a to z and digits alone: of an answer in another script
nothing is left, and it earns 0.
"""

from collections.abc import Mapping, Sequence

from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import Answered, Scoring, over

TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def measure(answered: Sequence[Answered], scoring: Scoring) -> Mapping[str, Ratio]:
    """F-measures ``rouge1``, ``rouge2`` and ``rougeL``, each the largest over the gold answers, of
    the questions that have one; a question that failed answers nothing.
    """
    del scoring  # It normalises in its own way.
    from rouge_score.rouge_scorer import RougeScorer  # It imports NLTK, which takes a second.

    scorer = RougeScorer(list(TITLES))
    texts = [found.answer if found else "" for _, found in answered]
    scores = [
        scorer.score_multi(question.answers, text) if question.answers else None
        for (question, _), text in zip(answered, texts, strict=True)
    ]
    return {
        name: over([None if s is None else s[name].fmeasure for s in scores]) for name in TITLES
    }
