"""GRADE's difficulty matrix for answering runs on any dataset with gold passages."""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cirag_jax.commands import backends
from cirag_jax.commands.answer import NOT_ANSWERED, PREDICTIONS
from cirag_jax.commands.comparison import check_names, named_folders
from cirag_jax.commands.judge import FILE as JUDGEMENTS
from cirag_jax.datasets import load
from cirag_jax.datasets.articles import UNITS, Articles
from cirag_jax.datasets.chunks import ChunkSettings, num_words
from cirag_jax.datasets.records import decode, field_error, read_lines
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers, difficulty
from cirag_jax.evaluation.answers import METRICS
from cirag_jax.evaluation.difficulty import AGGREGATES, DifficultyBins
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.io import write_lines
from cirag_jax.reports import difficulty as report
from cirag_jax.retrieval.encoders import Encoder, open_encoder_for, report_truncated
from cirag_jax.types import Config, Dataset, NonEmptyStr, Question

CONFIG = "config.json"
QUESTIONS = "difficulty.jsonl"

_HINT = "set --config.data.dir to the dataset of the run"
_RECORDED = (
    "score", "judgements", "profile", "aggregate", "power", "unit", "retrieved_at",
    "least_in_cell", "bootstrap_samples", "seed",
)  # fmt: skip


class PredictionRow(msgspec.Struct):
    """A line of ``predictions.jsonl``."""

    id: NonEmptyStr
    answer: str
    passages: tuple[str, ...] = ()
    error: str | None = None


class Judgement(msgspec.Struct):
    """A line of ``judgements.jsonl``.

    ``judged`` is the judged text, and ``answer`` the short answer that it contains, if known.
    """

    id: NonEmptyStr
    system: str
    judged: str | None
    answer: str | None = None
    judge: bool | None = None

    def is_about(self, answer: str) -> bool:
        """Returns False if the judged response has a different short answer."""
        own_answer = self.judged if self.answer is None else self.answer
        return self.judged is None or own_answer is None or own_answer.strip() == answer.strip()


class _Data(msgspec.Struct):
    dir: str | None = None


class _RunConfig(msgspec.Struct):
    data: _Data


class PredictedRun(NamedTuple):
    """The predictions of an answering run.

    Attributes:
      name: the name of the run in tables.
      folder: the workdir.
      rows: the predictions of each question id; more than one if the file repeats the id.
    """

    name: str
    folder: pathlib.Path
    rows: Mapping[str, Sequence[PredictionRow]]

    @property
    def retrieves(self) -> bool:
        """Returns whether any question has retrieved passages."""
        return any(row.passages for rows in self.rows.values() for row in rows)


class RunErrors(NamedTuple):
    """The errors of a run on the graded questions.

    Attributes:
      errors: 1 - score of each question, with denominator 0 if the prediction is ignored.
      causes: the cause of each error, one of `difficulty.CAUSES`; None without retrieval.
      left_out: number of ignored predictions by reason.
    """

    errors: Ratio
    causes: Sequence[str] | None
    left_out: Mapping[str, int]


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Computes the errors of ``config.runs`` by hops and retrieval difficulty D_r.

    Writes ``table.md``, ``matrix.png`` and, for several runs, ``difference.png`` (figures also as
    SVG), and ``difficulty.jsonl`` with each question's hops, D_r, quartile, errors and causes.
    ``config`` comes from configs/difficulty.py.

    Returns:
      ``num_questions``: the number of graded questions. ``left_out``: the number of other
      questions, by reason.
      ``hops``: for each number of hops, ``num_questions`` and ``edges``, the quartiles of D_r.
      ``systems``: for each run, ``error`` (see `difficulty.error_rate`) and ``left_out``;
      ``by_hops``: the error for each number of hops; ``matrix``: the errors of the four quartiles
      for each number of hops; both with ``errors`` (see `difficulty.errors_by_cause`) if the run
      retrieves; ``failures`` (see `difficulty.error_rates_by_cause`); ``correlations`` for each
      aggregate (see `difficulty.correlations`); ``strongest``: the aggregates with the highest mean
      correlation.
      ``differences``: for each pair FIRST-SECOND, the ``error``, ``by_hops`` and ``matrix`` of the
      first run minus those of the second.
      ``settings``: settings of the evaluation.
      Undefined values are null and have a ``reason``.
    """
    _check(config)
    chunks = ChunkSettings(**config.chunks)
    runs = [_read(name, folder) for name, folder in named_folders(config.runs)]
    check_names([run.name for run in runs])
    judgements = None if config.judgements is None else _judgements(config.judgements, runs)
    dataset = _dataset(config, runs)
    answered = [q for q in dataset.questions if any(q.id in run.rows for run in runs)]
    if not answered:
        raise UserError(f"{dataset.name} has no question of {runs[0].folder}; {_HINT}.")
    questions, left_out = _gradable(answered)
    if not questions:
        reasons = ", ".join(f"{count} have {reason}" for reason, count in left_out.items())
        raise UserError(f"no question of {dataset.name} can be graded: {reasons}.")
    encoder = open_encoder_for(config.encoder)
    articles = Articles(dataset.corpus)
    bins = _bins(config, articles, questions, encoder, chunks)
    ids = {question.id for question in dataset.questions}
    errors = {run.name: _errors(config, run, ids, articles, questions, judgements) for run in runs}
    chosen = bins[config.aggregate]
    result = {
        "num_questions": len(questions),
        "left_out": left_out,
        "truncated_texts": report_truncated(encoder),
        "hops": {hops: _quartiles(chosen, hops) for hops in chosen.hops},
        "systems": {name: _system(config, one, bins) for name, one in errors.items()},
        "differences": _differences(config, errors, chosen),
        "settings": {
            "runs": {run.name: run.folder for run in runs},
            "data": dataset.name,
            "encoder": encoder.identity,
            "chunks": dataclasses.asdict(chunks),
            **{name: config[name] for name in _RECORDED},
        },
    }
    write_lines(workdir / QUESTIONS, _question_rows(questions, bins, config.aggregate, errors))
    report.write(result, workdir)
    return result


def _check(config: Config) -> None:
    check_at_least(1, config, "bootstrap_samples", "least_in_cell")
    check_at_least(0, config, "retrieved_at")
    answers.check_profile(config.profile)
    options = {"score": METRICS, "aggregate": AGGREGATES, "unit": UNITS}
    for name, known in options.items():
        check_choice(f"config.{name}", config[name], known)
    if not config.power:
        raise UserError("config.power must not be 0.")


# ------------------------------------------------------------------------------ runs and questions


def _read(name: str, folder: pathlib.Path) -> PredictedRun:
    file = folder / PREDICTIONS
    if not file.is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{PREDICTIONS}"))
        hint = f"; set config.runs to folders in it: {', '.join(inside)}" if inside else ""
        raise UserError(
            f"{folder} is not a workdir of launch/answer.py: it has no {PREDICTIONS}{hint}."
        )
    rows: dict[str, list[PredictionRow]] = {}
    for _, row in read_lines(file, PredictionRow):
        rows.setdefault(row.id, []).append(row)
    return PredictedRun(name, folder, rows)


def _judgements(folder: str, runs: Sequence[PredictedRun]) -> dict[tuple[str, str], Judgement]:
    """Reads the verdicts of a judge, by run and question."""
    file = pathlib.Path(folder).expanduser() / JUDGEMENTS
    if not file.is_file():
        raise UserError(f"{folder} is not a workdir of configs/judge.py: it has no {JUDGEMENTS}.")
    judgements: dict[tuple[str, str], Judgement] = {}
    for place, row in read_lines(file, Judgement):
        if (row.system, row.id) in judgements:
            problem = f"repeats the verdict about {row.id!r} of the run {row.system!r}"
            raise field_error(place, "id", problem)
        judgements[row.system, row.id] = row
    judged_runs = {system for system, _ in judgements}
    for run in runs:
        if run.name not in judged_runs:
            raise UserError(
                f"{file} has no verdicts about the run {run.name}; name the runs as in this file: "
                f"{', '.join(sorted(judged_runs))}."
            )
    return judgements


def _dataset(config: Config, runs: Sequence[PredictedRun]) -> Dataset:
    """Loads the dataset, which must be the same for all runs."""
    if config.data.dir is not None:
        return load.load_dataset(config.data)
    (folder, data), *others = [(run.folder, _data_of(run)) for run in runs]
    for other_folder, other in others:
        if other.dir != data.dir:
            raise UserError(
                f"{other_folder} answered questions of {other.dir or 'the built-in dataset'}, but "
                f"{folder} of {data.dir or 'the built-in dataset'}."
            )
    if data.dir and not pathlib.Path(data.dir).is_dir():
        raise UserError(f"{folder / CONFIG}: the dataset {data.dir} does not exist; {_HINT}.")
    return load.load_dataset(data)


def _data_of(run: PredictedRun) -> _Data:
    file = run.folder / CONFIG
    if not file.is_file():
        raise UserError(f"{file} does not exist; {_HINT}.")
    folder = decode(str(file), file.read_bytes(), _RunConfig).data.dir
    return _Data(folder and str(pathlib.Path(folder).expanduser().resolve()))


def _gradable(questions: Sequence[Question]) -> tuple[list[Question], dict[str, int]]:
    """Returns the questions with gold annotations, and counts the other questions by reason."""
    left_out: collections.Counter[str] = collections.Counter()
    gradable = []
    for question in questions:
        if not question.supporting:
            left_out["no gold passages"] += 1
        elif question.hops is None:
            left_out["no number of hops"] += 1
        elif not question.answers:
            left_out["no gold answer"] += 1
        else:
            gradable.append(question)
    return gradable, dict(left_out)


def _bins(
    config: Config,
    articles: Articles,
    questions: Sequence[Question],
    encoder: Encoder,
    chunks: ChunkSettings,
) -> dict[str, DifficultyBins]:
    """Returns the questions binned by hops and D_r, for each aggregate."""
    size = backends.size_of_text(chunks) if config.unit == "chunk" else num_words
    gold = [articles.gold_texts(q, config.unit, chunks, size) for q in questions]
    similarities = difficulty.similarities([q.question for q in questions], gold, encoder.encode)
    hops = [question.hops or 0 for question in questions]
    return {
        how: difficulty.bin_questions(
            hops, [difficulty.retrieval_difficulty(s, how, config.power) for s in similarities]
        )
        for how in AGGREGATES
    }


# ------------------------------------------------------------------------------------- the figures


def _errors(
    config: Config,
    run: PredictedRun,
    ids: Collection[str],
    articles: Articles,
    questions: Sequence[Question],
    judgements: Mapping[tuple[str, str], Judgement] | None,
) -> RunErrors:
    """Scores a run; ``ids`` are the ids of all questions in the dataset."""
    left_out: collections.Counter[str] = collections.Counter(
        {"question unknown": sum(len(rows) for i, rows in run.rows.items() if i not in ids)}
    )
    errors: list[float | None] = []
    causes = []
    for question in questions:
        rows = run.rows.get(question.id, ())
        reason, verdict = _reason_to_ignore(rows), None
        if reason is None and judgements is not None:
            verdict, reason = _verdict(rows[0], judgements.get((run.name, question.id)))
        if reason:
            left_out[reason] += 1
            errors.append(None)
            causes.append("unanswered")
        else:
            errors.append(1 - _score(config, rows[0], question, verdict))
            causes.append(_cause(config, rows[0], question, articles))
    counts = {reason: count for reason, count in left_out.items() if count}
    return RunErrors(mean_of(errors), causes if run.retrieves else None, counts)


def _reason_to_ignore(rows: Sequence[PredictionRow]) -> str | None:
    if not rows:
        return "no prediction"
    if len(rows) > 1:
        return "more than one prediction"
    return NOT_ANSWERED if rows[0].error == NOT_ANSWERED else None


def _verdict(row: PredictionRow, judgement: Judgement | None) -> tuple[bool | None, str | None]:
    """Returns the verdict on a prediction, and the reason to ignore the prediction.

    A failed question needs no verdict.
    """
    if row.error is not None:
        return None, None
    if judgement is not None and not judgement.is_about(row.answer):
        return None, "another answer was judged"
    if judgement is None or judgement.judge is None:
        return None, "no verdict"
    return judgement.judge, None


def _score(config: Config, row: PredictionRow, question: Question, verdict: bool | None) -> float:
    if row.error is not None:
        return 0.0
    if verdict is not None:
        return float(verdict)
    return METRICS[config.score](
        row.answer, answers.golds_of(question, config.profile), config.profile
    )


def _cause(config: Config, row: PredictionRow, question: Question, articles: Articles) -> str:
    if row.error is not None:
        return "unanswered"
    retrieved = row.passages[: config.retrieved_at or None]
    return "reader" if articles.cover_gold(question, retrieved) else "retriever"


def _quartiles(bins: DifficultyBins, hops: int) -> dict[str, Any]:
    count = len(bins.cell(hops))
    if hops in bins.reasons:
        return {"num_questions": count, "edges": None, "reason": bins.reasons[hops]}
    return {"num_questions": count, "edges": bins.edges[hops]}


def _system(config: Config, run: RunErrors, bins: Mapping[str, DifficultyBins]) -> dict[str, Any]:
    chosen, bootstrap = bins[config.aggregate], (config.bootstrap_samples, config.seed)

    def measure(rows: np.ndarray) -> dict[str, Any]:
        values = difficulty.error_rate(run.errors, rows, *bootstrap)
        if run.causes is not None:
            values["errors"] = difficulty.errors_by_cause(run.errors, run.causes, rows)
        return values

    failures: dict[str, Any] = {"reason": "the run retrieved nothing"}
    if run.causes is not None:
        failures = difficulty.error_rates_by_cause(run.errors, run.causes, *bootstrap)
    correlations = {
        aggregate: difficulty.correlations(one, run.errors, config.least_in_cell)
        for aggregate, one in bins.items()
    }
    return {
        "error": difficulty.error_rate(run.errors, np.arange(len(chosen.hops_Q)), *bootstrap),
        "left_out": run.left_out,
        "by_hops": {hops: measure(chosen.cell(hops)) for hops in chosen.hops},
        "matrix": difficulty.matrix(chosen, measure, config.least_in_cell),
        "failures": failures,
        "correlations": correlations,
        "strongest": difficulty.strongest(
            {aggregate: values["mean"]["value"] for aggregate, values in correlations.items()}
        ),
    }


def _differences(
    config: Config, errors: Mapping[str, RunErrors], bins: DifficultyBins
) -> dict[str, Any]:
    differences, bootstrap = {}, (config.bootstrap_samples, config.seed)
    for (first, a), (second, b) in itertools.combinations(errors.items(), 2):

        def measure(rows: np.ndarray, a: Ratio = a.errors, b: Ratio = b.errors) -> dict[str, Any]:
            return difficulty.error_difference(a, b, rows, *bootstrap)

        differences[f"{first}-{second}"] = {
            "error": measure(np.arange(len(bins.hops_Q))),
            "by_hops": {hops: measure(bins.cell(hops)) for hops in bins.hops},
            "matrix": difficulty.matrix(bins, measure, config.least_in_cell),
        }
    return differences


def _question_rows(
    questions: Sequence[Question],
    bins: Mapping[str, DifficultyBins],
    aggregate: str,
    runs: Mapping[str, RunErrors],
) -> Iterator[dict[str, Any]]:
    """Yields lines of ``difficulty.jsonl``; ``quartile`` is 1 to 4, or null without quartiles."""
    for i, question in enumerate(questions):
        quartile = int(bins[aggregate].bin_Q[i])
        yield {
            "id": question.id,
            "hops": question.hops,
            "difficulty": {how: float(one.difficulty_Q[i]) for how, one in bins.items()},
            "quartile": quartile + 1 if quartile >= 0 else None,
            "errors": {
                name: float(run.errors.top_Q[i]) if run.errors.bottom_Q[i] else None
                for name, run in runs.items()
            },
            "whose": {
                name: run.causes[i] if run.causes and run.errors.top_Q[i] else None
                for name, run in runs.items()
            },
        }
