r"""What each addition to the search along links gives: heads of one aligner under changed settings.

    python experiments/linked.py --checkpoint W --data A B C [--fold dev_tune] \
        [--change held_out=0 --change "corpus=own held_out=0" ...] [--pools] \
        [--stops 0.2 0.5]

For every ``--change`` (settings of ``config.head``, parted by spaces) and for none, a head is
trained on the aligner of W as configs/aligner.py:linked does, and searches for the questions of the
fold (of HotpotQA only those of setting distractor) among all passages of their folder. Vectors are
kept in ``--vectors``: only the first run embeds. A table has recall in per cent with its 95 %
bootstrap interval; ``found`` is the share of the gold passages that any step had among its
candidates: what else is missed was ranked low. With ``--pools`` a question searches its own context
alone as well, as Beam Retriever and Q-RAG do. ``--stops`` tells, on standard error, what a search
reads that leaves out what is needed with less probability, beside the first 2 to 5 passages of
every ranking. Figures and their reading: experiments/RESULTS.md.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.overlap import mean_of
from cirag_jax.evaluation.recall import SetScores, mean_scores, recall_at, set_scores
from cirag_jax.evaluation.significance import interval
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.models.link_head import LinkHead
from cirag_jax.retrieval.candidates import Candidates
from cirag_jax.retrieval.encoders import CachedEncoder, Encoder, FlaxEncoder, RememberingEncoder
from cirag_jax.retrieval.linked import Found
from cirag_jax.retrieval.stopping import needed
from cirag_jax.training import link_head
from cirag_jax.training.data.splits import Questions, split_questions
from cirag_jax.types import Config, Question

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_KS = (2, 3, 5, 10)
_FIRST = (2, 3, 4, 5)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--checkpoint", required=True, help="a workdir of configs/aligner.py:linked"
    )
    parser.add_argument("--data", nargs="+", required=True, help="the folders it was trained on")
    parser.add_argument("--fold", default="dev_tune")
    parser.add_argument("--held_out", type=int, default=50, help="training questions of each set")
    parser.add_argument("--change", action="append", default=[], help="settings of config.head")
    parser.add_argument("--pools", action="store_true", help="a question's own context, too")
    parser.add_argument("--stops", nargs="*", type=float, default=[], help="probabilities")
    parser.add_argument("--vectors", default="runs/vectors", help="a folder, made where needed")
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # As training does.

    overrides = [f"--config.data.dir={tuple(options.data)!r}"]
    overrides += [f"--config.dev.questions={options.held_out}"]
    config = load_config(str(_ROOT / "configs/aligner.py:linked"), overrides)
    sets = [split_questions(dataset, config) for dataset in load.load_datasets(config.data)]
    encoder, _ = open_encoder(options.checkpoint)
    limits = {
        "query_max_length": config.query_max_length,
        "passage_max_length": config.unit_max_length,
    }
    remembers = RememberingEncoder(FlaxEncoder(encoder, **limits))
    embeds = CachedEncoder(remembers, pathlib.Path(options.vectors))
    print("| head | data | questions |", " | ".join(f"R@{k}" for k in _KS), "| found |")
    print("|", " | ".join(["---"] * (len(_KS) + 4)), "|")
    trainer = Trainer(config, sets, embeds)
    for change in ["", *options.change]:
        changed = [f"--config.head.{setting}" for setting in change.split()]
        head_config = load_config(str(_ROOT / "configs/aligner.py:linked"), changed).head
        link_head.check_settings(head_config)
        head, searched = trainer.train(head_config)
        for one, task in zip(sets, searched, strict=True):
            asked = [q for q in one.dataset.questions if q.fold == options.fold and q.supporting]
            asked = [q for q in asked if q.setting in (None, "distractor")]
            if not asked:
                continue
            for in_pools in (False, True)[: 1 + options.pools]:
                found, candidates = searched_for(task, head, asked, in_pools)
                name = f"{change or 'as configured'}{', own context' if in_pools else ''}"
                print("|", name, "|", *row(one, task, asked, found, candidates), flush=True)
                for where, scores in stopped(task, head, asked, found, options.stops):
                    told = f"read {scores.read:.2f}, recall {100 * scores.recall:.1f}, "
                    told += f"exact {100 * scores.exact:.1f}, F1 {100 * scores.f1:.1f}"
                    print(f"{one.dataset.name}, {name}, {where}: {told}", file=sys.stderr)


class Trainer:
    """Trains heads on one aligner; what they search is indexed once."""

    def __init__(self, config: Config, sets: Sequence[Questions], embeds: Encoder):
        self._config, self._sets, self._embeds = config, sets, embeds
        self._tasks: dict[tuple[str, int], list[link_head.Task]] = {}

    def train(self, head_config: Config) -> tuple[LinkHead, list[link_head.Task]]:
        """A head, and for each of the sets a search among all of its passages."""
        kind, searched = self._config.data.units, self._searched(head_config)
        head, _ = link_head.train_link_head(head_config, searched, kind, self._config.seed)
        everywhere = head_config.copy_and_resolve_references()
        everywhere.corpus = "all"
        return head, self._searched(everywhere)

    def _searched(self, head_config: Config) -> list[link_head.Task]:
        key = (head_config.corpus, head_config.steps)
        if key not in self._tasks:
            kind = self._config.data.units
            self._tasks[key] = [
                link_head.make_task(*one, kind, self._embeds, head_config) for one in self._sets
            ]
        return self._tasks[key]


def searched_for(
    task: link_head.Task, head: LinkHead, asked: Sequence[Question], in_pools: bool
) -> tuple[list[Found], list[set[int]]]:
    """What is found, and the candidates of all steps."""
    candidates: list[set[int]] = [set() for _ in asked]

    def watch(step: Candidates) -> None:
        candidates[step.question].update(step.row_R.tolist())

    allowed = None
    if in_pools:
        row = {id: place for place, id in enumerate(task.ids)}
        allowed = [np.array(sorted({row[id] for id in q.context or ()}), np.int32) for q in asked]
    texts = [question.question for question in asked]
    return task.index.explore(texts, head.score, allowed, watch), candidates


def row(
    one: Questions,
    task: link_head.Task,
    asked: Sequence[Question],
    found: Sequence[Found],
    candidates: Sequence[set[int]],
) -> list[Any]:
    """A line of the table."""
    ranked = [searched.rows for searched in found]
    cells: list[Any] = [one.dataset.name, "|", len(asked), "|"]
    for k in _KS:
        told = interval(mean_of(_recalls(task, asked, ranked, k)))
        value, low, high = (100 * told[name] for name in ("value", "low", "high"))
        cells += [f"{value:.1f} [{low:.1f}, {high:.1f}]", "|"]
    pools = [list(rows) for rows in candidates]
    most = max(map(len, pools))
    return [*cells, f"{100 * _recalls(task, asked, pools, most).mean():.1f}", "|"]


def stopped(
    task: link_head.Task,
    head: LinkHead,
    asked: Sequence[Question],
    found: Sequence[Found],
    stops: Sequence[float],
) -> Iterator[tuple[str, SetScores]]:
    """What is read and how much of it is gold, where a search stops, or after so many passages."""
    if not stops:
        return
    assert head.stop is not None
    sets = {f"the first {k}": [one.rows[:k] for one in found] for k in _FIRST}
    likely = [head.stop.probability(one.seen_KF) for one in found]
    for stop in stops:
        pairs = zip(found, likely, strict=True)
        sets[f"stops below {stop:g}"] = [
            needed(one.rows, likely_K, stop) for one, likely_K in pairs
        ]
    for name, rows in sets.items():
        ids = [[task.ids[place] for place in chosen] for chosen in rows]
        scores = [
            set_scores(chosen, q.supporting or (), passage_substitutes(q))
            for chosen, q in zip(ids, asked, strict=True)
        ]
        yield name, mean_scores(scores)


def _recalls(
    task: link_head.Task, asked: Sequence[Question], ranked: Sequence[Sequence[int]], k: int
) -> np.ndarray:
    return np.array(
        [
            recall_at([task.ids[r] for r in rows], q.supporting or (), k, passage_substitutes(q))
            for q, rows in zip(asked, ranked, strict=True)
        ]
    )


if __name__ == "__main__":
    main()
