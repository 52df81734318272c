r"""Ablations of the link head: trains heads for one aligner with different settings.

    python experiments/linked.py --checkpoint W --data A B C [--fold dev_tune] \
        [--change held_out=0 --change "corpus=own held_out=0" ...] [--pools] \
        [--stops 0.2 0.5]

One head is trained with the default settings, and one for every ``--change`` (space-separated
settings of ``config.head``), for the aligner in workdir W, as configs/aligner.py:linked does. Each
head is evaluated on the questions of the fold (HotpotQA: only setting distractor), and searches all
passages of their dataset folder. Vectors are cached in ``--vectors``, so only the first run embeds
texts.

The table shows recall in percent with 95 % bootstrap intervals. ``found`` is the share of gold
passages that were candidates in any step. ``--pools`` also searches each question's own context, as
Beam Retriever and Q-RAG do. ``--stops`` prints scores of sets of passages on standard error: the
passages that searches with these stopping probabilities keep, and the first 2 to 5 passages.
Results: experiments/RESULTS.md.
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
from cirag_jax.io import standard_streams
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.models.link_head import LinkHead
from cirag_jax.retrieval.candidates import StepCandidates
from cirag_jax.retrieval.encoders import CachedEncoder, Encoder, FlaxEncoder, MemoizingEncoder
from cirag_jax.retrieval.linked import SearchResult
from cirag_jax.retrieval.stopping import needed_rows
from cirag_jax.training import link_head
from cirag_jax.training.data.splits import Questions, split_questions
from cirag_jax.types import Config, Question

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_KS = (2, 3, 5, 10)
_FIRST = (2, 3, 4, 5)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--checkpoint", required=True, help="a workdir of configs/aligner.py:linked"
    )
    parser.add_argument(
        "--data", nargs="+", required=True, help="folders that the checkpoint was trained on"
    )
    parser.add_argument("--fold", default="dev_tune")
    parser.add_argument(
        "--held_out", type=int, default=50, help="training questions to hold out per dataset"
    )
    parser.add_argument(
        "--change", action="append", default=[], help="settings of config.head; repeatable"
    )
    parser.add_argument(
        "--pools", action="store_true", help="also search each question's own context"
    )
    parser.add_argument("--stops", nargs="*", type=float, default=[], help="stopping probabilities")
    parser.add_argument("--vectors", default="runs/vectors", help="cache folder")
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # same as in training

    overrides = [f"--config.data.dir={tuple(options.data)!r}"]
    overrides += [f"--config.dev.questions={options.held_out}"]
    config = load_config(str(_ROOT / "configs/aligner.py:linked"), overrides)
    sets = [split_questions(dataset, config) for dataset in load.load_datasets(config.data)]
    encoder, _ = open_encoder(options.checkpoint)
    limits = {
        "query_max_length": config.query_max_length,
        "passage_max_length": config.unit_max_length,
    }
    remembers = MemoizingEncoder(FlaxEncoder(encoder, **limits))
    embeds = CachedEncoder(remembers, pathlib.Path(options.vectors))
    print("| head | data | questions |", " | ".join(f"R@{k}" for k in _KS), "| found |")
    print("|", " | ".join(["---"] * (len(_KS) + 4)), "|")
    trainer = Trainer(config, sets, embeds)
    for change in ["", *options.change]:
        changed = [f"--config.head.{setting}" for setting in change.split()]
        head_config = load_config(str(_ROOT / "configs/aligner.py:linked"), changed).head
        link_head.check_settings(head_config)
        head, tasks = trainer.train(head_config)
        for one, task in zip(sets, tasks, strict=True):
            questions = [
                q for q in one.dataset.questions if q.fold == options.fold and q.supporting
            ]
            questions = [q for q in questions if q.setting in (None, "distractor")]
            if not questions:
                continue
            for own_context in (False, True)[: 1 + options.pools]:
                found, candidates = search(task, head, questions, own_context)
                name = f"{change or 'as configured'}{', own context' if own_context else ''}"
                print("|", name, "|", *row(one, task, questions, found, candidates), flush=True)
                for where, scores in stopped(task, head, questions, found, options.stops):
                    line = f"read {scores.read:.2f}, recall {100 * scores.recall:.1f}, "
                    line += f"exact {100 * scores.exact:.1f}, F1 {100 * scores.f1:.1f}"
                    print(f"{one.dataset.name}, {name}, {where}: {line}", file=sys.stderr)


class Trainer:
    """Trains heads for one aligner and reuses the indexes that they search."""

    def __init__(self, config: Config, sets: Sequence[Questions], embeds: Encoder):
        self._config, self._sets, self._embeds = config, sets, embeds
        self._tasks: dict[tuple[str, int], list[link_head.Task]] = {}

    def train(self, head_config: Config) -> tuple[LinkHead, list[link_head.Task]]:
        """Returns a head, and for each dataset a search task over all of its passages."""
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


def search(
    task: link_head.Task, head: LinkHead, questions: Sequence[Question], own_context: bool
) -> tuple[list[SearchResult], list[set[int]]]:
    """Returns the search results of the questions, and the candidates of all steps."""
    candidates: list[set[int]] = [set() for _ in questions]

    def watch(step: StepCandidates) -> None:
        candidates[step.question].update(step.row_R.tolist())

    allowed = None
    if own_context:
        row = {id: place for place, id in enumerate(task.ids)}
        allowed = [
            np.array(sorted({row[id] for id in q.context or ()}), np.int32) for q in questions
        ]
    texts = [question.question for question in questions]
    return task.index.explore(texts, head.score, allowed, watch), candidates


def row(
    one: Questions,
    task: link_head.Task,
    questions: Sequence[Question],
    found: Sequence[SearchResult],
    candidates: Sequence[set[int]],
) -> list[Any]:
    """Returns the cells of a table row."""
    ranked = [searched.rows for searched in found]
    cells: list[Any] = [one.dataset.name, "|", len(questions), "|"]
    for k in _KS:
        bounds = interval(mean_of(_recalls(task, questions, ranked, k)))
        value, low, high = (100 * bounds[name] for name in ("value", "low", "high"))
        cells += [f"{value:.1f} [{low:.1f}, {high:.1f}]", "|"]
    pools = [list(rows) for rows in candidates]
    most = max(map(len, pools))
    return [*cells, f"{100 * _recalls(task, questions, pools, most).mean():.1f}", "|"]


def stopped(
    task: link_head.Task,
    head: LinkHead,
    questions: Sequence[Question],
    found: Sequence[SearchResult],
    stops: Sequence[float],
) -> Iterator[tuple[str, SetScores]]:
    """Yields scores of the passages kept, for fixed numbers and for each stopping probability."""
    if not stops:
        return
    assert head.stop is not None
    sets = {f"the first {k}": [one.rows[:k] for one in found] for k in _FIRST}
    likely = [head.stop.probability(one.stop_KF) for one in found]
    for stop in stops:
        pairs = zip(found, likely, strict=True)
        sets[f"stops below {stop:g}"] = [
            needed_rows(one.rows, likely_K, stop) for one, likely_K in pairs
        ]
    for name, rows in sets.items():
        ids = [[task.ids[place] for place in chosen] for chosen in rows]
        scores = [
            set_scores(chosen, q.supporting or (), passage_substitutes(q))
            for chosen, q in zip(ids, questions, strict=True)
        ]
        yield name, mean_scores(scores)


def _recalls(
    task: link_head.Task, questions: Sequence[Question], ranked: Sequence[Sequence[int]], k: int
) -> np.ndarray:
    return np.array(
        [
            recall_at([task.ids[r] for r in rows], q.supporting or (), k, passage_substitutes(q))
            for q, rows in zip(questions, ranked, strict=True)
        ]
    )


if __name__ == "__main__":
    with standard_streams():
        main()
