"""Compares two text forms of triples by how well a ranker finds the triple that states a hop.

    python experiments/triple_text.py [--config.encoder.model=W] [--config.data.dir=DIR ...]

Candidates are all triples of the question's own passages. Each hop is searched with the question,
as in CIRAG's first round (first and later hops are reported separately), and with its sub-question,
the ideal query of an integrator. Results: experiments/RESULTS.md.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cirag_jax.config_files import load_config
from cirag_jax.datasets import annotations, chains, load
from cirag_jax.evaluation.overlap import mean_of
from cirag_jax.evaluation.significance import paired_interval
from cirag_jax.io import standard_streams
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.rankers import BiEncoderRanker, TripleText, text_of
from cirag_jax.types import Dataset, Question, Triple

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GROUPS = ("first hop by the question", "later hops by the question", "any hop by its sub-question")
# A query, its candidates, and the indices of the candidates that state the hop.
Problem = tuple[str, tuple[Triple, ...], frozenset[int]]


def problems(dataset: Dataset, questions: Sequence[Question]) -> dict[str, list[Problem]]:
    """Returns the ranking problems of every group."""
    groups: dict[str, list[Problem]] = {name: [] for name in _GROUPS}
    first, later, sub_questions = _GROUPS
    for question in questions:
        ids = dict.fromkeys(question.context or question.supporting or ())
        pool = {chains.triple_text(t): t for i in ids for t in dataset.triples.get(i, ())}
        hops = annotations.hops_of(question, dataset.corpus)
        answers = {i: hop.answers[0] for i, hop in enumerate(hops) if hop.answers}
        for index, hop in enumerate(hops):
            units = chains.units_of_hop(dataset, hop, index, answers, "triple")
            texts = {unit.text for unit in units}
            gold = frozenset(i for i, text in enumerate(pool) if text in texts)
            if not gold:
                continue
            triples = tuple(pool.values())
            groups[later if hop.parents else first].append((question.question, triples, gold))
            if hop.sub_question:
                sub_question = annotations.fill(hop.sub_question, answers)
                groups[sub_questions].append((sub_question, triples, gold))
    return groups


def metrics(ranker: BiEncoderRanker, group: Sequence[Problem]) -> dict[str, np.ndarray]:
    """Returns MRR of the first triple that states the hop, and recall of all such triples."""
    scores = ranker.score([p[0] for p in group], [p[1] for p in group])
    values: dict[str, list[float]] = {"MRR": [], "R@3": [], "R@10": []}
    for score_N, (_, _, gold) in zip(scores, group, strict=True):
        order = np.argsort(-score_N, kind="stable")
        ranks = [rank for rank, place in enumerate(order) if int(place) in gold]
        values["MRR"].append(1 / (1 + ranks[0]))
        for k in (3, 10):
            values[f"R@{k}"].append(sum(rank < k for rank in ranks) / len(gold))
    return {name: np.array(of_metric) for name, of_metric in values.items()}


def main(overrides: Sequence[str]) -> None:
    """Prints the comparison."""
    config = load_config(str(_ROOT / "configs/methods/cirag.py"), list(overrides))
    dataset = load.load_dataset(config.data)
    groups = problems(dataset, load.select_questions(dataset, config.data))
    encoder = open_encoder_for(config.encoder)

    def ranker(form: Any) -> BiEncoderRanker:
        write = TripleText(form)
        return BiEncoderRanker(encoder, lambda text: text_of(text, write))

    angle, tuples = ranker("angle"), ranker("tuple")
    for name, group in groups.items():
        if not group:
            continue
        a, b = metrics(angle, group), metrics(tuples, group)
        for metric in a:
            bounds = paired_interval(mean_of(a[metric]), mean_of(b[metric]))
            low, high = 100 * bounds["low"], 100 * bounds["high"]
            print(
                f"{name:<28}{len(group):>5}  {metric:<5} angle {100 * a[metric].mean():5.1f}  "
                f"tuple {100 * b[metric].mean():5.1f}  {100 * bounds['difference']:+5.1f} "
                f"[{low:+.1f}, {high:+.1f}]"
            )


if __name__ == "__main__":
    with standard_streams():
        main(sys.argv[1:])
