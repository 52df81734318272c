"""Methods side by side: the answers of several runs of launch/answer.py to the same questions."""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax import config_files
from cirag_jax.commands import online
from cirag_jax.errors import UserError
from cirag_jax.evaluation import cost, metrics
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.recall import recall_by_step
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.evaluation.significance import interval, intervals, pairwise_scores
from cirag_jax.identity import differences, without
from cirag_jax.methods.registry import block_name, find_method
from cirag_jax.reports import comparison as report
from cirag_jax.runtime.records import (
    JournalReader,
    Record,
    read_passages,
    read_records,
    read_settings,
)
from cirag_jax.runtime.requests import Needs
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import GRANULARITIES, Config, Prediction, Question

# Folders of a run's workdir: runs with other seeds, and a sample of questions one by one.
REPEAT, ALONE = "repeat-", "alone"


class Run(NamedTuple):
    """What a workdir of launch/answer.py holds.

    Attributes:
      name: how tables call it.
      folder: the workdir.
      settings: what decided its answers; of the method's own as ``method.FIELD``.
      repeats: records of its questions, by id, of every seed; all have ended.
      seconds: a question, all together, without loading.
      seconds_alone: of the questions that were asked one by one.
    """

    name: str
    folder: str
    settings: Mapping[str, Any]
    repeats: Sequence[Mapping[str, Record]]
    seconds: float
    seconds_alone: Sequence[float]

    @property
    def records(self) -> Mapping[str, Record]:
        """Of the first seed."""
        return self.repeats[0]

    @property
    def journals(self) -> list[pathlib.Path]:
        """Of every seed."""
        return [next(iter(records.values())).file for records in self.repeats]

    @property
    def needs(self) -> Needs:
        """Of its method with its settings, as far as this version of the program knows them."""
        own = {
            name.removeprefix("method."): tuple(value) if isinstance(value, list) else value
            for name, value in self.settings.items()
            if name.startswith("method.")
        }
        try:
            return find_method(self.settings["method"]).config(**own).needs
        except (KeyError, TypeError, UserError):
            return Needs()


def compare(config: Config, workdir: pathlib.Path, show: bool = True) -> dict[str, Any]:
    """Scores the runs that ``config.runs`` names; see `compare_runs`."""
    folders = named_folders(config.runs)
    return compare_runs(config, folders, workdir, config.allow_different, show=show)


def compare_runs(
    config: Config,
    folders: Sequence[tuple[str, pathlib.Path]],
    workdir: pathlib.Path,
    allow_different: bool,
    repeats: int | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Scores every run, and the difference of every pair.

    Leaves ``table.md``, ``table.html``, ``granularities.png``, the share of questions answered at
    each one (CIRAG's Figures 3 and 5), of runs of several steps ``recall_by_step.png`` and, of runs
    that were timed alone, ``latency.png``; all as SVG, too.

    Args:
      config: with ``profile``, ``metrics``, ``recall_at``, ``bootstrap_samples`` and ``seed``.
      folders: name and workdir of each run.
      workdir: an existing folder.
      allow_different: whether settings may differ.
      repeats: seeds of each run that count, as `read_runs`.
      show: whether the tables are printed on standard error, too.

    Returns:
      As `measure_runs`.
    """
    _, result = measure_runs(config, folders, allow_different, repeats)
    report.write(result, workdir, show)
    return result


def measure_runs(
    config: Config,
    folders: Sequence[tuple[str, pathlib.Path]],
    allow_different: bool,
    repeats: int | None = None,
) -> tuple[list[Run], dict[str, Any]]:
    """The runs and all that `compare_runs` says of them; writes nothing.

    Returns:
      The runs, and ``systems``: of each the scores of `metrics.measure` with intervals (questions
      resampled), NaN with the ``reason`` where they are of no question, ``repeats``,
      ``granularities``, ``recall_by_step``, ``failures``, means a question of ``calls``,
      ``generated_tokens``, ``seconds`` and by role (``roles``) and stage (``stages``),
      ``seconds_alone``, ``sees_gold``; ``scores``: their names; ``differences``: of each pair and
      score, as `pairwise`; ``num_questions``, ``num_annotated`` (with gold passages),
      ``settings``, ``different``.
    """
    if config.bootstrap_samples < 1:
        raise UserError("config.bootstrap_samples must be at least 1.")
    scoring = Scoring(config.profile, tuple(config.recall_at))
    metrics.check(config.metrics)
    runs = read_runs(folders, repeats)
    different = {run.name: _different(runs[0], run) for run in runs[1:]}
    for run in runs[1:]:
        if different[run.name] and not allow_different:
            field, (first, own) = next(iter(different[run.name].items()))
            raise UserError(
                f"{run.folder} has {field}={json.dumps(own)} where {runs[0].folder} has "
                f"{json.dumps(first)}, and {len(different[run.name]) - 1} other settings that "
                "differ; --config.allow_different=true compares them and prints what differs."
            )
    ids = list(runs[0].records)
    how_often = (config.bootstrap_samples, config.seed)
    scores = {run.name: _scores(run, ids, config.metrics, scoring) for run in runs}
    names = list(dict.fromkeys(name for of in scores.values() for name in of[0]))
    pooled = {name: _pooled(of_seeds) for name, of_seeds in scores.items()}
    result: dict[str, Any] = {
        "systems": {
            run.name: {
                **_bounded(run, ids, names, pooled[run.name], how_often),
                "repeats": _repeats(scores[run.name]),
                **_described(run, ids, how_often),
            }
            for run in runs
        },
        "differences": pairwise_scores(pooled, *how_often),
        "scores": names,
        "num_questions": len(ids),
        "num_annotated": sum(bool(r.input.get("supporting")) for r in runs[0].records.values()),
        "settings": {
            "runs": {run.name: run.folder for run in runs},
            "profile": config.profile,
            "metrics": tuple(config.metrics),
            "recall_at": tuple(config.recall_at),
            "bootstrap_samples": config.bootstrap_samples,
        },
        "different": different,
    }
    _explain(result)
    return runs, result


# --------------------------------------------------------------------------------------- the runs


def named_folders(specs: Any) -> list[tuple[str, pathlib.Path]]:
    """Name and workdir of the runs as ``config.runs`` names them, ``NAME=W`` or ``W``."""
    texts = config_files.texts_of(specs)
    if not texts:
        raise UserError(
            "config.runs is required: workdirs of launch/answer.py, \"('NAME=W1', 'NAME=W2')\"."
        )
    found = []
    for spec in texts:
        # A folder may have an equals sign in its own name.
        name, _, folder = ("", "", spec) if pathlib.Path(spec).is_dir() else spec.partition("=")
        path = pathlib.Path(folder or name).expanduser()
        found.append((name if folder and name else path.name, path))
    return found


def read_runs(folders: Sequence[tuple[str, pathlib.Path]], repeats: int | None = None) -> list[Run]:
    """The runs, all of the same questions and passages.

    Args:
      folders: name and workdir of each.
      repeats: the seeds that count of each, from the first; None: all that have ended.
    """
    places = [folder.resolve() for _, folder in folders]
    for folder in places:
        if places.count(folder) > 1:
            raise UserError(f"config.runs names {folder} twice.")
    runs = [_run(name, folder, repeats) for name, folder in folders]
    first = runs[0]
    for run in runs[1:]:
        if run.name in {other.name for other in runs if other is not run}:
            raise UserError(f"config.runs has two runs of the name {run.name}; name them NAME=W.")
        other = set(first.records) ^ set(run.records)
        if other:
            raise UserError(
                f"{run.folder} is a run of other questions than {first.folder}: {len(other)} are "
                f"in one alone, {min(other)} for one."
            )
        changed = [i for i, record in run.records.items() if record.input != first.records[i].input]
        if changed:
            raise UserError(
                f"{run.folder} and {first.folder} have other texts or annotations of question "
                f"{changed[0]}."
            )
        hashes = {r.settings["passages"] for r in (run, first) if "passages" in r.settings}
        if len(hashes) > 1:
            raise UserError(f"{run.folder} searched other passages than {first.folder}.")
    return runs


def _run(name: str, folder: pathlib.Path, count: int | None) -> Run:
    file = folder / JOURNAL
    if not file.is_file():
        raise UserError(f"{folder} is no workdir of launch/answer.py: it has no {JOURNAL}.")
    settings = read_settings(file)
    records = _records(file)
    if "method" not in settings or not records:
        raise UserError(f"{folder} holds no answers.")
    left = sum(not record.has_ended for record in records.values())
    if left:
        raise UserError(
            f"{folder} has not ended: {left} of {len(records)} questions are left; run its command "
            "again first."
        )
    if "teacher.kind" in settings and not any(
        found.attempts for r in records.values() if (found := r.result(Prediction))
    ):
        raise UserError(f"{folder} is a run of launch/distill.py that answered nothing.")
    prefix = f"{block_name(settings['method'])}."
    settings = {
        f"method.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: value
        for name, value in settings.items()
    }
    found = sorted(folder.glob(f"{REPEAT}*/{JOURNAL}"))
    wanted = None if count is None else {f"{REPEAT}{number}" for number in range(2, count + 1)}
    others = [_records(path) for path in found if wanted is None or path.parent.name in wanted]
    repeats = [
        other
        for other in others
        if other.keys() == records.keys() and all(r.has_ended for r in other.values())
    ]
    with JournalReader(file) as book:
        together = (book.seconds - book.load_seconds) / len(records)
    alone = folder / ALONE / JOURNAL
    timed = _records(alone).values() if alone.is_file() else ()
    seconds_alone = [record.seconds for record in timed if record.outcome is not None]
    return Run(name, str(folder), settings, [records, *repeats], together, seconds_alone)


def _records(file: pathlib.Path) -> dict[str, Record]:
    return {record.id: record for record in read_records(file)}


def _different(first: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Setting -> (first's value, the other's), of settings that both have.

    Two methods differ in name, code and in what only one of them has; that they do is the point.
    """
    may_differ = ("code", "method") if first.settings["method"] != other.settings["method"] else ()
    shared = first.settings.keys() & other.settings.keys()
    old, new = ({k: r.settings[k] for k in r.settings if k in shared} for r in (first, other))
    return differences(without(old, may_differ), without(new, may_differ))


# ------------------------------------------------------------------------------------- the scores


def _scores(
    run: Run, ids: Sequence[str], names: Sequence[str], scoring: Scoring
) -> list[dict[str, Ratio]]:
    """Of every seed, sums over questions; a failed one has answered and found nothing."""
    found = []
    for records, file in zip(run.repeats, run.journals, strict=True):
        own = dataclasses.replace(scoring, passages=functools.partial(read_passages, file))
        answered = [answered_of(records[i]) for i in ids]
        found.append(metrics.measure(answered, own, names, corpus=run.needs.corpus))
    return found


def answered_of(record: Record) -> AnsweredQuestion:
    """The question of a run's record, and its answer."""
    return AnsweredQuestion(record.input_as(Question), record.result(Prediction))


def _pooled(of_seeds: Sequence[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """The mean over seeds, whose answers to one question are drawn together."""
    return {
        name: Ratio(
            np.sum([scores[name].top_Q for scores in of_seeds], axis=0),
            np.sum([scores[name].bottom_Q for scores in of_seeds], axis=0),
        )
        for name in of_seeds[0]
    }


def _bounded(
    run: Run,
    ids: Sequence[str],
    names: Sequence[str],
    ratios: Mapping[str, Ratio],
    how_often: tuple[int, int],
) -> dict[str, Any]:
    """Every score with its interval; one of no question is NaN and has its ``reason``."""
    answered = [answered_of(records[i]) for records in run.repeats for i in ids]
    found: dict[str, Any] = dict(intervals(ratios, *how_often))
    for name in names:
        score = found.setdefault(name, dict.fromkeys(("value", "low", "high"), float("nan")))
        if np.isnan(score["value"]):
            score["reason"] = metrics.reason(name, answered, corpus=run.needs.corpus)
    return found


def _explain(result: Mapping[str, Any]) -> None:
    """A difference that there is not has the ``reason`` of the score that there is not."""
    for (first, one), (second, other) in itertools.combinations(result["systems"].items(), 2):
        for name, difference in result["differences"].get(f"{first}-{second}", {}).items():
            reasons = [score["reason"] for score in (one[name], other[name]) if "reason" in score]
            if reasons:
                difference["reason"] = reasons[0]


def _repeats(of_seeds: Sequence[Mapping[str, Ratio]]) -> dict[str, Any]:
    """How many seeds, and the standard deviation over them of each score that applies."""
    if len(of_seeds) < 2:
        return {"count": 1, "std": {}}
    values = {name: [scores[name].value for scores in of_seeds] for name in of_seeds[0]}
    std = {n: float(np.std(v, ddof=1)) for n, v in values.items() if np.isfinite(v).all()}
    return {"count": len(of_seeds), "std": std}


def _described(run: Run, ids: Sequence[str], how_often: tuple[int, int]) -> dict[str, Any]:
    """What is counted and not tested; of several seeds, over all of them."""
    records = [records[i] for records in run.repeats for i in ids]
    of_seeds = [[answered_of(records[i]) for i in ids] for records in run.repeats]
    found = [a.prediction for seed in of_seeds for a in seed if a.prediction is not None]
    extractions = [p for j in run.journals for p in j.parent.glob(f"{online.NAME}*.sqlite")]
    spent = cost.spent_by_role(
        [*records, *(r for file in extractions for r in _records(file).values())]
    )
    alone = None
    if run.seconds_alone:
        alone = {**interval(mean_of(run.seconds_alone), *how_often)}
        alone["num_questions"] = len(run.seconds_alone)
    return {
        "granularities": {
            granularity: sum(p.granularity == granularity for p in found)
            for granularity in GRANULARITIES
        },
        "recall_by_step": _recall_by_step(of_seeds, how_often),
        "failures": len(records) - len(found),
        "calls": sum(sum(r.calls.values()) for r in records) / len(records),
        "generated_tokens": sum(r.usage.generated_tokens for r in records) / len(records),
        **cost.summarize(spent, len(records)),
        "seconds": run.seconds,
        "seconds_alone": alone,
        "sees_gold": run.needs.gold,
    }


def _recall_by_step(
    of_seeds: Sequence[Sequence[AnsweredQuestion]], how_often: tuple[int, int]
) -> list[dict[str, float]]:
    """Of every step `recall_by_step` with its interval; none of a run that retrieved nothing, or
    whose questions have no gold passages.
    """
    everything = [answered for seed in of_seeds for answered in seed]
    count = max(len(_found(answered)) for answered in everything)
    if not any(any(_found(a)) for a in everything) or not any(q.supporting for q, _ in everything):
        return []

    def measure(seed: Sequence[AnsweredQuestion]) -> dict[str, Ratio]:
        rows = [
            recall_by_step(_found(a), a.question.supporting, count, passage_substitutes(a.question))
            if a.question.supporting
            else [None] * count
            for a in seed
        ]
        return {str(step): mean_of(column) for step, column in enumerate(zip(*rows, strict=True))}

    return list(intervals(_pooled([measure(seed) for seed in of_seeds]), *how_often).values())


def _found(answered: AnsweredQuestion) -> list[tuple[str, ...]]:
    """The passages of every step."""
    return [step.passages for step in answered.prediction.steps] if answered.prediction else []
