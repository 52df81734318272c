"""Scores of a ranked run against relevance judgements, both dictionaries as in pytrec_eval."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.evaluation.ranking import ranking_scores
from cirag_jax.evaluation.recall import recall_at


def evaluate_retrieval(
    run: Mapping[str, Mapping[str, float]],
    qrels: Mapping[str, Mapping[str, int]],
    ks: Sequence[int] = (3, 5),
) -> dict[str, float]:
    """Averages the scores of ranked documents over queries.

    Args:
      run: score of each retrieved document by query; a higher score is a better rank. Documents
        with equal scores are ranked by id in descending order, as trec_eval does.
      qrels: relevance of documents by query; documents above 0 are gold.
      ks: the K of the scores at K.

    Returns:
      ``queries``, the number of queries with gold documents, over which the scores are averaged. A
      query that ``run`` lacks scores 0. ``without_gold``: the number of other queries of ``run`` or
      ``qrels``, which are left out. ``recall@K``: share of the gold documents among the first K.
      ``complete@K``, ``ndcg@K``, ``map`` and ``mrr``: see `ranking.ranking_scores`; relevance is
      binary.
    """
    _check("run", run)
    _check("qrels", qrels)
    if isinstance(ks, str) or not isinstance(ks, Sequence) or not all(map(_is_positive, ks)):
        raise UserError(f"ks must be a list of whole numbers above 0, not {ascii(ks)[:80]}.")
    gold = {q: [doc for doc, value in docs.items() if value > 0] for q, docs in qrels.items()}
    gold = {query: docs for query, docs in gold.items() if docs}
    if not gold:
        raise UserError("qrels has no query with a document of a relevance above 0.")
    scores = []
    for query, docs in gold.items():
        found = run.get(query, {})
        ranked = sorted(found, key=lambda doc: (found[doc], doc), reverse=True)  # noqa: B023
        recall = {f"recall@{k}": recall_at(ranked, docs, k) for k in ks}
        scores.append(recall | ranking_scores(ranked, docs, ks))
    return {
        "queries": len(gold),
        "without_gold": len((run.keys() | qrels.keys()) - gold.keys()),
        **{name: statistics.fmean(score[name] for score in scores) for name in scores[0]},
    }


def _is_positive(k: Any) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k > 0


def _check(name: str, table: Any) -> None:
    """Raises `UserError` unless ``table`` maps texts to mappings from texts to finite numbers."""
    if not isinstance(table, Mapping):
        raise UserError(f"{name} must map queries to documents, not be {ascii(table)[:80]}.")
    for query, docs in table.items():
        if not isinstance(query, str):
            raise UserError(f"{name}: the id of a query must be a string, not {ascii(query)[:80]}.")
        if not isinstance(docs, Mapping):
            raise UserError(
                f"{name}[{query!a}] must map documents to numbers, not be {ascii(docs)[:80]}."
            )
        for doc, value in docs.items():
            if not isinstance(doc, str):
                raise UserError(
                    f"{name}[{query!a}]: the id of a document must be a string, not "
                    f"{ascii(doc)[:80]}."
                )
            try:
                is_number = not isinstance(value, str | bytes) and math.isfinite(value)
            except (TypeError, ValueError, OverflowError):
                is_number = False
            if not is_number:
                raise UserError(
                    f"{name}[{query!a}][{doc!a}] must be a finite number, not {ascii(value)[:80]}."
                )
