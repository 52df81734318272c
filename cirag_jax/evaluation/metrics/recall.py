"""Recall@K of the evidence behind an answer: passages, sentences and triples (CIRAG, Table 5).

Recall@K = |top-K and gold| / |gold|, the mean over the questions that annotate the granularity. A
question that failed or found nothing earns 0 and stays in the mean (KiRAG's code skips it). Where a
run ranks nothing of a granularity for any question, as NativeRAG ranks no triples, it has no score.
"""

from collections.abc import Mapping, Sequence

from cirag_jax.evaluation.evidence import GRANULARITIES
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.recall import recall_at
from cirag_jax.evaluation.scoring import Answered, Scoring, over

# Granularity -> its scores' names, before @K.
SCORES = {"passage": "recall", "sentence": "sentence_recall", "triple": "triple_recall"}
NEEDS_CORPUS = True
TITLES = {"recall": "R", "sentence_recall": "sentence R", "triple_recall": "triple R"}


def measure(answered: Sequence[Answered], scoring: Scoring) -> Mapping[str, Ratio]:
    """``recall@K`` of passages, ``sentence_recall@K`` and ``triple_recall@K``."""
    scores: dict[str, Ratio] = {}
    for granularity, (found_of, gold_of, elsewhere_of) in GRANULARITIES.items():
        ranked = [list(found_of(found)) if found else [] for _, found in answered]
        ranks_any = any(ranked)
        golds = [gold_of(question) if ranks_any else None for question, _ in answered]
        elsewhere = [elsewhere_of(question) for question, _ in answered]
        for k in scoring.recall_at:
            scores[f"{SCORES[granularity]}@{k}"] = over(
                [
                    recall_at(row, gold, k, other) if gold else None
                    for row, gold, other in zip(ranked, golds, elsewhere, strict=True)
                ]
            )
    return scores
