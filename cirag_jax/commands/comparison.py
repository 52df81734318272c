"""Compares the answers of several runs of launch/answer.py to the same questions."""

import collections
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
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import cost, hops, metrics
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.parsing import parse_rate
from cirag_jax.evaluation.recall import recall_by_step
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.evaluation.significance import (
    interval,
    intervals,
    paired_interval,
    pairwise_scores,
)
from cirag_jax.identity import differences, without
from cirag_jax.methods.registry import block_name, find_method
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.reports import comparison as report
from cirag_jax.reports.comparison_tables import OUTCOMES
from cirag_jax.retrieval.token_vectors import token_vectors
from cirag_jax.runtime import records as records_lib
from cirag_jax.runtime.records import JournalReader, Record
from cirag_jax.runtime.requests import Needs
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import GRANULARITIES, Config, Prediction, Question

# Folders in a run's workdir: repeats with other seeds, and a run with one question at a time.
REPEAT, LATENCY = "repeat-", "alone"
# A run is compared with others only if its parse rate is above this. At exactly one half, a method
# of two calls per question may never have made its first step, so its scores are rather those of
# its substitutes for malformed responses.
MIN_PARSE_RATE = 0.5


class FinishedRun(NamedTuple):
    """The answers in a workdir of launch/answer.py.

    Attributes:
      name: the name of the run in tables.
      folder: the workdir.
      settings: the settings that determine the answers; method settings are ``method.FIELD``.
      repeats: for each seed, the records of all questions by id.
      seconds: wall time per question, without loading.
      seconds_alone: wall time of each question in the run that answers one question at a time.
    """

    name: str
    folder: str
    settings: Mapping[str, Any]
    repeats: Sequence[Mapping[str, Record]]
    seconds: float
    seconds_alone: Sequence[float]

    @property
    def records(self) -> Mapping[str, Record]:
        """The records of the first seed."""
        return self.repeats[0]

    @property
    def journals(self) -> list[pathlib.Path]:
        """The journals of all seeds."""
        return [next(iter(records.values())).file for records in self.repeats]

    @property
    def corruption(self) -> tuple[str, float] | None:
        """Kind and ratio of the corruption of the run's triple store; None if it has none."""
        kind = self.settings.get("triples.corruption")
        return (kind, float(self.settings["triples.ratio"])) if kind else None

    @property
    def needs(self) -> Needs:
        """The method's needs; empty if this version lacks the method or one of its settings."""
        method_settings = {
            name.removeprefix("method."): tuple(value) if isinstance(value, list) else value
            for name, value in self.settings.items()
            if name.startswith("method.")
        }
        try:
            return find_method(self.settings["method"]).config(**method_settings).needs
        except (KeyError, TypeError, UserError):
            return Needs()


def compare(config: Config, workdir: pathlib.Path, show: bool = True) -> dict[str, Any]:
    """Compares the runs of ``config.runs``; see `compare_runs`."""
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
    """Scores and compares runs, and writes the report; returns the result of `measure_runs`.

    The figures and their papers are in `reports.comparison_figures`.

    Args:
      config: has ``profile``, ``metrics``, ``recall_at``, ``bootstrap_samples``, ``seed``, and
        possibly ``baseline``, the run that all others are compared with.
      folders: name and workdir of each run.
      workdir: an existing folder.
      allow_different: whether the settings of the runs may differ.
      repeats: see `read_runs`.
      show: whether to print the tables to standard error.
    """
    _, result = measure_runs(config, folders, allow_different, repeats)
    report.write(result, workdir, show)
    return result


def measure_runs(
    config: Config,
    folders: Sequence[tuple[str, pathlib.Path]],
    allow_different: bool,
    repeats: int | None = None,
) -> tuple[list[FinishedRun], dict[str, Any]]:
    """Reads and scores runs; writes nothing.

    Returns:
      The runs, and a result with these keys.
      ``systems``: for each run the scores of `metrics.measure` with bootstrap intervals over
      questions (NaN and a ``reason`` if it applies to no question), ``repeats``,
      ``granularities``, ``recall_by_step``, ``histograms``, ``graphs``, ``outcomes`` (shares of
      questions), ``parse_rate`` with its interval, ``is_ranked`` (see `MIN_PARSE_RATE`),
      ``failures``, ``seconds_alone``, ``sees_gold``, and means per question of ``parse_errors``,
      ``calls``, ``generated_tokens``, ``seconds``, and of calls and tokens by role (``roles``) and
      stage (``stages``). ``stages``: see `_stages`. ``robustness``: see `_robustness`.
      ``scores``: the names of the scores. ``differences``: the differences between each pair of
      ranked runs, or from the baseline; see `pairwise_scores`. ``num_questions``,
      ``num_annotated`` (questions with gold passages), ``settings``. ``different``: for each run,
      the settings that differ from the first run.
    """
    check_at_least(1, config, "bootstrap_samples")
    bertscore, baseline = config.get("bertscore"), config.get("baseline")
    check_choice("config.baseline", baseline, (None, *(name for name, _ in folders)))
    metrics.check(config.metrics, bertscore)
    scoring = Scoring(config.profile, tuple(config.recall_at))
    if "bertscore" in config.metrics:
        vectors = functools.partial(token_vectors, open_encoder(bertscore)[0])
        scoring = dataclasses.replace(scoring, token_vectors=vectors)
    runs = read_runs(folders, repeats)
    different = {run.name: _different(runs[0], run) for run in runs[1:]}
    for run in runs[1:]:
        if different[run.name] and not allow_different:
            field, (first, other) = next(iter(different[run.name].items()))
            others = len(different[run.name]) - 1
            raise UserError(
                f"{run.folder} has {field}={json.dumps(other)}, but {runs[0].folder} has "
                f"{json.dumps(first)}{f', and {others} other settings differ' if others else ''}; "
                "set --config.allow_different=true to compare the runs and list the differences."
            )
    ids = list(runs[0].records)
    bootstrap = (config.bootstrap_samples, config.seed)
    scores = {run.name: _scores(run, ids, config.metrics, scoring) for run in runs}
    names = list(dict.fromkeys(name for seeds in scores.values() for name in seeds[0]))
    pooled = {name: _pooled(seeds) for name, seeds in scores.items()}
    systems = {
        run.name: {
            **_with_intervals(run, ids, names, pooled[run.name], bootstrap),
            "repeats": _repeats(scores[run.name]),
            **_statistics(run, ids, bootstrap),
        }
        for run in runs
    }
    ranked = {name: pooled[name] for name in pooled if systems[name]["is_ranked"]}
    result: dict[str, Any] = {
        "systems": systems,
        "differences": pairwise_scores(ranked, *bootstrap, baseline=baseline),
        "stages": _stages(runs, ids, scoring, bootstrap),
        "robustness": _robustness(runs),
        "scores": names,
        "num_questions": len(ids),
        "num_annotated": sum(bool(r.input.get("supporting")) for r in runs[0].records.values()),
        "settings": {
            "runs": {run.name: run.folder for run in runs},
            "profile": config.profile,
            "metrics": tuple(config.metrics),
            "recall_at": tuple(config.recall_at),
            "bertscore": bertscore,
            "baseline": baseline,
            "bootstrap_samples": config.bootstrap_samples,
        },
        "different": different,
    }
    _add_reasons(result)
    return runs, result


# --------------------------------------------------------------------------------------- the runs


def named_folders(specs: Any) -> list[tuple[str, pathlib.Path]]:
    """Parses ``config.runs``, each ``NAME=W`` or ``W``, into names and workdirs."""
    texts = config_files.texts_of(specs)
    if not texts:
        raise UserError(
            "config.runs is required: workdirs of launch/answer.py, as in \"('NAME=W1', 'W2')\"."
        )
    folders = []
    for spec in texts:
        # The name of a folder may contain an equals sign.
        name, _, folder = ("", "", spec) if pathlib.Path(spec).is_dir() else spec.partition("=")
        path = pathlib.Path(folder or name).expanduser()
        folders.append((name if folder and name else path.name, path))
    return folders


def check_names(names: Sequence[str]) -> None:
    """Raises `UserError` if two runs have the same name."""
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise UserError(f"config.runs has two runs named {name}; rename one, as in NAME=W.")


def read_runs(
    folders: Sequence[tuple[str, pathlib.Path]], repeats: int | None = None
) -> list[FinishedRun]:
    """Reads runs, which must have the same questions and passages.

    Args:
      folders: name and workdir of each run.
      repeats: maximum number of seeds to read per run; None reads all complete seeds.
    """
    paths = [folder.resolve() for _, folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"config.runs names {path} twice.")
    runs = [_run(name, folder, repeats) for name, folder in folders]
    check_names([run.name for run in runs])
    first = runs[0]
    for run in runs[1:]:
        unshared = set(first.records) ^ set(run.records)
        if unshared:
            raise UserError(
                f"{run.folder} answered different questions from {first.folder}: {len(unshared)} "
                f"are in only one of them, such as {min(unshared)}."
            )
        changed = [i for i, record in run.records.items() if record.input != first.records[i].input]
        if changed:
            raise UserError(
                f"{run.folder} and {first.folder} have different data for question {changed[0]}."
            )
        hashes = {r.settings["passages"] for r in (run, first) if "passages" in r.settings}
        if len(hashes) > 1:
            raise UserError(f"{run.folder} searched different passages from {first.folder}.")
    return runs


def _run(name: str, folder: pathlib.Path, num_seeds: int | None) -> FinishedRun:
    file = folder / JOURNAL
    if not file.is_file():
        raise UserError(f"{folder} is not a workdir of launch/answer.py: it has no {JOURNAL}.")
    settings = records_lib.read_settings(file)
    records = _records(file)
    if "method" not in settings or not records:
        raise UserError(f"{folder} has no answers.")
    num_pending = sum(not record.has_ended for record in records.values())
    if num_pending:
        raise UserError(
            f"{folder} is not complete: {num_pending} of {len(records)} questions remain; run its "
            "command again first."
        )
    predictions = (record.result(Prediction) for record in records.values())
    if "teacher.kind" in settings and not any(p.attempts for p in predictions if p):
        raise UserError(
            f"{folder} is a run of launch/distill.py without answers; set config.answer=true."
        )
    prefix = f"{block_name(settings['method'])}."
    settings = {
        f"method.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: value
        for name, value in settings.items()
    }
    repeats = [records]
    for path in sorted(folder.glob(f"{REPEAT}*/{JOURNAL}")):
        if num_seeds is None or path.parent.name in {
            f"{REPEAT}{n}" for n in range(2, num_seeds + 1)
        }:
            other = _records(path)
            if other.keys() == records.keys() and all(r.has_ended for r in other.values()):
                repeats.append(other)
    with JournalReader(file) as journal:
        seconds = (journal.seconds - journal.load_seconds) / len(records)
    latency = folder / LATENCY / JOURNAL
    timed = _records(latency).values() if latency.is_file() else ()
    seconds_alone = [record.seconds for record in timed if record.has_succeeded]
    return FinishedRun(name, str(folder), settings, repeats, seconds, seconds_alone)


def _records(file: pathlib.Path) -> dict[str, Record]:
    return {record.id: record for record in records_lib.read_records(file)}


def _different(first: FinishedRun, other: FinishedRun) -> dict[str, tuple[Any, Any]]:
    """Returns each setting that both runs have with different values, and the two values.

    The name and code of the method are ignored if the methods differ. A package's
    version is compared only if both runs use the package.
    """
    may_differ = ("code", "method") if first.settings["method"] != other.settings["method"] else ()
    shared = first.settings.keys() & other.settings.keys()
    old, new = ({k: r.settings[k] for k in r.settings if k in shared} for r in (first, other))
    different = differences(without(old, may_differ), without(new, may_differ))
    return {
        name: pair
        for name, pair in different.items()
        if None not in pair or "packages" not in name.split(".")
    }


# ------------------------------------------------------------------------------------- the scores


def _scores(
    run: FinishedRun, ids: Sequence[str], names: Sequence[str], scoring: Scoring
) -> list[dict[str, Ratio]]:
    """Returns the scores of each seed; a failed question has no answer."""
    seeds = []
    for records, file in zip(run.repeats, run.journals, strict=True):
        own_scoring = dataclasses.replace(
            scoring, passages=functools.partial(records_lib.read_passages, file)
        )
        answered = [answered_of(records[i]) for i in ids]
        seeds.append(metrics.measure(answered, own_scoring, names, corpus=run.needs.corpus))
    return seeds


def answered_of(record: Record) -> AnsweredQuestion:
    """Returns the question of a record and its prediction."""
    return AnsweredQuestion(record.input_as(Question), record.result(Prediction, partial=True))


def _pooled(seeds: Sequence[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """Returns means over seeds; a bootstrap resample draws all answers to a question together."""
    return {
        name: Ratio(
            np.sum([scores[name].top_Q for scores in seeds], axis=0),
            np.sum([scores[name].bottom_Q for scores in seeds], axis=0),
        )
        for name in seeds[0]
    }


def _with_intervals(
    run: FinishedRun,
    ids: Sequence[str],
    names: Sequence[str],
    ratios: Mapping[str, Ratio],
    bootstrap: tuple[int, int],
) -> dict[str, Any]:
    """Returns each score with its interval; NaN and a reason if it applies to no question."""
    answered = [answered_of(records[i]) for records in run.repeats for i in ids]
    scores: dict[str, Any] = dict(intervals(ratios, *bootstrap))
    for name in names:
        score = scores.setdefault(name, dict.fromkeys(("value", "low", "high"), float("nan")))
        if np.isnan(score["value"]):
            score["reason"] = metrics.reason(name, answered, corpus=run.needs.corpus)
    return scores


def _add_reasons(result: Mapping[str, Any]) -> None:
    """Copies the ``reason`` of an undefined score to its differences."""
    for (first, a), (second, b) in itertools.combinations(result["systems"].items(), 2):
        for name, difference in result["differences"].get(f"{first}-{second}", {}).items():
            reasons = [score["reason"] for score in (a[name], b[name]) if "reason" in score]
            if reasons:
                difference["reason"] = reasons[0]


def _repeats(seeds: Sequence[Mapping[str, Ratio]]) -> dict[str, Any]:
    """Returns the number of seeds, and each finite score's standard deviation over the seeds."""
    if len(seeds) < 2:
        return {"count": 1, "std": {}}
    values = {name: [scores[name].value for scores in seeds] for name in seeds[0]}
    std = {n: float(np.std(v, ddof=1)) for n, v in values.items() if np.isfinite(v).all()}
    return {"count": len(seeds), "std": std}


def _statistics(run: FinishedRun, ids: Sequence[str], bootstrap: tuple[int, int]) -> dict[str, Any]:
    """Returns counts, costs and other statistics over all seeds, without significance tests."""
    records = [records[i] for records in run.repeats for i in ids]
    seeds = [[answered_of(records[i]) for i in ids] for records in run.repeats]
    succeeded = [
        (p, records[q.id])
        for seed, records in zip(seeds, run.repeats, strict=True)
        for q, p in seed
        if p is not None and p.error is None
    ]
    predictions = [p for p, _ in succeeded]
    extractions = [p for j in run.journals for p in j.parent.glob(f"{online.NAME}*.sqlite")]
    costs = cost.spent_by_role(
        [*records, *(r for file in extractions for r in _records(file).values())]
    )
    latency = None
    if run.seconds_alone:
        latency = {**interval(mean_of(run.seconds_alone), *bootstrap)}
        latency["num_questions"] = len(run.seconds_alone)
    granularities = collections.Counter(p.granularity for p in predictions)
    outcomes = collections.Counter(
        "answered" if p.answer.strip() else "refused" for p in predictions
    )
    outcomes["failed"] = len(records) - len(predictions)
    parsed = _pooled([{"": _parse_rate(records, ids)} for records in run.repeats])[""]
    errors = sum((collections.Counter(p.parse_errors) for p in predictions), collections.Counter())
    return {
        "granularities": {name: granularities[name] for name in GRANULARITIES},
        "outcomes": {name: outcomes[name] / len(records) for name in OUTCOMES},
        "parse_rate": interval(parsed, *bootstrap),
        "is_ranked": not parsed.value <= MIN_PARSE_RATE,  # NaN without responses
        "parse_errors": {kind: count / len(records) for kind, count in errors.most_common()},
        "recall_by_step": _recall_by_step(seeds, bootstrap),
        "histograms": hops.histograms(predictions, [r.calls["retrieve"] for _, r in succeeded]),
        "graphs": hops.graph_statistics(predictions),
        "failures": len(records) - len(predictions),
        "calls": sum(sum(r.calls.values()) for r in records) / len(records),
        "generated_tokens": sum(r.usage.generated_tokens for r in records) / len(records),
        **cost.summarize(costs, len(records)),
        "seconds": run.seconds,
        "seconds_alone": latency,
        "sees_gold": run.needs.gold,
    }


def _parse_rate(records: Mapping[str, Record], ids: Sequence[str]) -> Ratio:
    """Returns the `parse_rate` of a seed; a question without a result has no responses."""
    results = [(records[i], records[i].result(Prediction)) for i in ids]
    return parse_rate(
        [
            (sum(role.calls for role in record.roles.values()), p.parse_errors) if p else (0, {})
            for record, p in results
        ]
    )


def _stages(
    runs: Sequence[FinishedRun], ids: Sequence[str], scoring: Scoring, bootstrap: tuple[int, int]
) -> list[dict[str, Any]]:
    """Compares each stage of a cascade with the run of this granularity alone (CIRAG, Figure 4).

    Only reads the first seed of each run.

    Returns:
      For each stage with such a run of the same method: the names of the runs (``cascade``,
      ``single``) and the ``stage``; ``num_questions``, the number of questions that the stage
      answers; and, by score, the intervals of the ``cascade`` on these questions, of the
      ``single`` granularity on all questions (``all``) and on these (``same``), and of the
      ``difference`` on these questions.
    """
    answered = {run.name: [answered_of(run.records[i]) for i in ids] for run in runs}
    read = {run.name: list(run.settings.get("method.granularities") or ()) for run in runs}
    rows = []
    for first, other in itertools.permutations(runs, 2):
        (*others, stage) = read[other.name] or (None,)
        if others or len(read[first.name]) < 2 or stage not in read[first.name]:
            continue
        if first.settings["method"] != other.settings["method"]:
            continue
        mask_Q = np.array(
            [p is not None and p.granularity == stage for _, p in answered[first.name]], np.float64
        )
        scores = {}
        for name in metrics.STAGE_SCORES:
            cascade, single = (
                metrics.measure(answered[run.name], scoring, ["answers"])[name]
                for run in (first, other)
            )
            at_stage, same = (
                Ratio(ratio.top_Q * mask_Q, ratio.bottom_Q * mask_Q) for ratio in (cascade, single)
            )
            scores[name] = {
                "cascade": interval(at_stage, *bootstrap),
                "all": interval(single, *bootstrap),
                "same": interval(same, *bootstrap),
                "difference": paired_interval(at_stage, same, *bootstrap),
            }
        rows.append(
            {
                "cascade": first.name,
                "stage": stage,
                "single": other.name,
                "num_questions": int(mask_Q.sum()),
                **scores,
            }
        )
    return rows


def _robustness(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Returns the curves over the ratio of corrupted facts (C2RAG, Figure 3).

    The runs of a curve differ only in the corruption of the same triple store. A run on the store
    itself, or on a copy with ratio 0, belongs to the curves of all kinds.

    Returns:
      For each curve: ``name`` (of the run with the lowest ratio), ``kind`` of corruption, and
      ``points``: the ``run`` and ``ratio`` of each, by increasing ratio.
    """
    groups: list[list[FinishedRun]] = []
    for run in runs:
        for group in groups:
            if _differ_in_corruption(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    curves = []
    for group in groups:
        corruption = {run.name: run.corruption or ("", 0.0) for run in group}
        name = min(corruption, key=lambda run: corruption[run][1])
        for kind in dict.fromkeys(kind for kind, ratio in corruption.values() if ratio):
            points = [
                {"run": run, "ratio": ratio}
                for run, (own, ratio) in corruption.items()
                if own == kind or not ratio
            ]
            points.sort(key=lambda point: point["ratio"])
            if len(points) > 1:
                curves.append({"name": name, "kind": kind, "points": points})
    return curves


def _differ_in_corruption(first: FinishedRun, other: FinishedRun) -> bool:
    stores = [str(r.settings.get("triples.content")).split(" ")[0] for r in (first, other)]
    same = first.settings["method"] == other.settings["method"] and stores[0] == stores[1]
    return same and all(name.split(".")[0] == "triples" for name in _different(first, other))


def _recall_by_step(
    seeds: Sequence[Sequence[AnsweredQuestion]], bootstrap: tuple[int, int]
) -> list[dict[str, float]]:
    """Returns `recall_by_step` with its interval at each step.

    The list is empty if the run retrieved no passages or no question has gold passages.
    """
    pairs = [answered for seed in seeds for answered in seed]
    count = max(len(_retrieved(answered)) for answered in pairs)
    if not any(any(_retrieved(a)) for a in pairs) or not any(q.supporting for q, _ in pairs):
        return []

    def measure(seed: Sequence[AnsweredQuestion]) -> dict[str, Ratio]:
        rows = [
            recall_by_step(_retrieved(a), q.supporting, count, passage_substitutes(q))
            if (q := a.question).supporting
            else [None] * count
            for a in seed
        ]
        return {str(step): mean_of(column) for step, column in enumerate(zip(*rows, strict=True))}

    return list(intervals(_pooled([measure(seed) for seed in seeds]), *bootstrap).values())


def _retrieved(answered: AnsweredQuestion) -> list[tuple[str, ...]]:
    """Returns the passages of each step."""
    return [step.passages for step in answered.prediction.steps] if answered.prediction else []
