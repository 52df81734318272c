"""The aligner's dev metric: at each step, rank the next unit of a silver chain.

KiRAG's released code selects its checkpoint by MRR over each question's own candidates. Recall@K of
the same ranking is also reported.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from cirag_jax.datasets.chains import Chain, Unit, UnitKind, query_text

Embed = Callable[[Sequence[str], Literal["query", "passage"]], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class NextUnit:
    """A ranking problem: ``relevant`` are the candidates that extend the chain in ``query``."""

    step: int
    query: str
    candidates: tuple[str, ...]
    relevant: frozenset[str]


def next_units(
    chains: Sequence[Chain], pools: Sequence[Sequence[Unit]], kind: UnitKind
) -> list[NextUnit]:
    """Returns a problem per step of each chain, whose query has the earlier annotated steps."""
    problems = []
    for chain, pool in zip(chains, pools, strict=True):
        texts = [step.text for step in chain.steps]
        for length in range(len(texts)):
            chain_texts = texts[:length]
            following = (texts[step] for step in chain.next_steps(range(length)))
            relevant = [text for text in following if text not in chain_texts]
            if not relevant:  # The chain repeats a text.
                continue
            candidates = dict.fromkeys([*(unit.text for unit in pool), *relevant])
            for text in chain_texts:
                candidates.pop(text, None)
            query = query_text(chain.question, chain_texts, kind)
            problems.append(NextUnit(length, query, tuple(candidates), frozenset(relevant)))
    return problems


def evaluate_next_unit(
    problems: Sequence[NextUnit], embed: Embed, ks: Sequence[int] = (1, 3, 5)
) -> dict[str, float]:
    """Returns MRR and Recall@K, over all steps and by step (``step1/mrr``).

    A step's Recall@K is 1 if a relevant unit is among the first K, else 0. All steps have the same
    weight. Ties count against the model, so constant scores give the worst ranks.
    """
    texts = list(dict.fromkeys(t for problem in problems for t in problem.candidates))
    row = {text: index for index, text in enumerate(texts)}
    unit_ND = embed(texts, "passage")
    query_BD = embed([problem.query for problem in problems], "query")
    ranks: dict[str, list[int]] = collections.defaultdict(list)
    for problem, query_D in zip(problems, query_BD, strict=True):
        scores_C = unit_ND[[row[text] for text in problem.candidates]] @ query_D
        relevant_C = np.array([text in problem.relevant for text in problem.candidates])
        rank = 1 + int((scores_C[~relevant_C] >= scores_C[relevant_C].max()).sum())
        ranks[""].append(rank)
        ranks[f"step{problem.step + 1}/"].append(rank)
    metrics = {}
    for prefix, values in ranks.items():
        rank_B = np.array(values)
        metrics[f"{prefix}mrr"] = float((1.0 / rank_B).mean())
        for k in ks:
            metrics[f"{prefix}recall@{k}"] = float((rank_B <= k).mean())
    return metrics
