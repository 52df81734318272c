"""Scores of ranked passages for one question, as computed by trec_eval with binary relevance.

Each is a few lines, so that the package needs neither ir_measures nor its C extension; tests
compare all of them with ir_measures.
"""

import math
from collections.abc import Collection, Hashable, Sequence

from cirag_jax.evaluation.recall import NO_SUBSTITUTES, Substitutes, recall_at

# Score, without @K -> title in tables.
TITLES = {"complete": "all", "ndcg": "nDCG", "map": "MAP", "mrr": "MRR"}


def ranking_scores(
    ranked: Sequence[Hashable],
    gold: Collection[Hashable],
    ks: Sequence[int],
    substitutes: Substitutes = NO_SUBSTITUTES,
) -> dict[str, float]:
    """Returns the scores of one ranking.

    ``ranked`` are retrieved items, best first, and ``gold`` at least one relevant item.
    ``substitutes`` replace gold items; only ``complete@K`` accepts them.

    Returns:
      ``complete@K``: 1 if all gold items are among the first K. ``ndcg@K`` (Järvelin and
      Kekäläinen, 2002). ``map``: average precision, with precision 0 for gold items that are not
      ranked. ``mrr``: 1 / rank of the first gold item, or 0.
    """
    relevant = set(gold)
    # Ranks of the retrieved gold items, from 1.
    ranks = [i for i, item in enumerate(dict.fromkeys(ranked), start=1) if item in relevant]
    return {
        **{f"complete@{k}": float(recall_at(ranked, gold, k, substitutes) == 1) for k in ks},
        **{f"ndcg@{k}": _dcg(ranks, k) / _dcg(range(1, len(relevant) + 1), k) for k in ks},
        "map": sum(found / rank for found, rank in enumerate(ranks, start=1)) / len(relevant),
        "mrr": 1 / ranks[0] if ranks else 0.0,
    }


def _dcg(ranks: Sequence[int], k: int) -> float:
    return sum(1 / math.log2(rank + 1) for rank in ranks if rank <= k)
