"""GRADE's difficulty matrix of answering runs, over any data that knows its gold passages."""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cirag_jax.commands.answer import NOT_ANSWERED, PREDICTIONS
from cirag_jax.commands.comparison import named_folders
from cirag_jax.commands.judge import FILE as JUDGEMENTS
from cirag_jax.datasets import load
from cirag_jax.datasets.articles import UNITS, Articles
from cirag_jax.datasets.chunks import ChunkSettings
from cirag_jax.datasets.records import decode, field_error, read_lines
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers, difficulty
from cirag_jax.evaluation.answers import METRICS
from cirag_jax.evaluation.difficulty import AGGREGATES, DifficultyBins
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.io import say, write_lines
from cirag_jax.reports import difficulty as report
from cirag_jax.retrieval.encoders import Encoder, open_encoder_for
from cirag_jax.types import Config, Dataset, NonEmptyStr, Question

CONFIG = "config.json"
QUESTIONS = "difficulty.jsonl"

_GIVE = "name the run's dataset by --config.data.dir=FOLDER"
_RECORDED = (
    "score", "judgements", "profile", "aggregate", "power", "unit", "retrieved_at",
    "least_in_cell", "bootstrap_samples", "seed",
)  # fmt: skip

HowOften = tuple[int, int]


class Row(msgspec.Struct):
    """What is used of a line of ``predictions.jsonl``."""

    id: NonEmptyStr
    answer: str
    passages: tuple[str, ...] = ()
    error: str | None = None


class Judgement(msgspec.Struct):
    """What is used of a line of ``judgements.jsonl``.

    ``judged`` is the text; ``answer`` the short one, where that was read from the text.
    """

    id: NonEmptyStr
    system: str
    judged: str | None
    answer: str | None = None
    judge: bool | None = None

    def is_about(self, answer: str) -> bool:
        """Whether it judges the response that gave this short answer, if anything."""
        own = self.judged if self.answer is None else self.answer
        return self.judged is None or own is None or own.strip() == answer.strip()


class _Data(msgspec.Struct):
    dir: str | None = None


class _Settings(msgspec.Struct):
    data: _Data


class Run(NamedTuple):
    """An answering run.

    Attributes:
      name: how tables call it.
      folder: where it lies.
      rows: its predictions by question id, each as often as it is there.
    """

    name: str
    folder: pathlib.Path
    rows: Mapping[str, Sequence[Row]]

    @property
    def retrieves(self) -> bool:
        """Whether it found a passage for any question."""
        return any(row.passages for rows in self.rows.values() for row in rows)


class Judged(NamedTuple):
    """A run over the graded questions.

    Attributes:
      errors: of each question 1 - its score, over 1; over 0 where it does not count.
      whose: cause of each question's error, see `difficulty.CAUSES`; None without retrieval.
      left_out: predictions that do not count, by reason.
    """

    errors: Ratio
    whose: Sequence[str] | None
    left_out: Mapping[str, int]


class _How(NamedTuple):
    """How the figures are made.

    Attributes:
      aggregate: of the columns.
      least: questions of a cell that is no n/a.
      often: resamples and seed of the intervals.
    """

    aggregate: str
    least: int
    often: HowOften


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Errors of ``config.runs`` by hops and retrieval difficulty.

    Leaves ``table.md``, ``matrix.png``, of several runs ``difference.png`` (both as SVG, too) and
    ``difficulty.jsonl``: of every question its hops, D_r by aggregate, quartile and errors.

    Args:
      config: of configs/difficulty.py.
      workdir: an existing folder.

    Returns:
      ``num_questions`` (graded) and ``left_out``: the others, by reason.
      ``hops``: of each hop ``num_questions``, ``edges`` (quartiles of D_r) or the ``reason`` why
      there are none.
      ``systems``: of every run ``error`` (as `difficulty.error_rate`), ``left_out``; ``by_hops``
      and ``matrix``: hop -> the error, or those of the four cells, each with ``errors`` (as
      `difficulty.errors_by_cause`, if the run retrieves); ``failures`` (as
      `difficulty.error_rates_by_cause`, or a ``reason``); ``correlations``: aggregate -> as
      `difficulty.correlations`; ``strongest``: the aggregates of the highest mean correlation.
      ``differences``: FIRST-SECOND -> ``error``, ``by_hops`` and ``matrix`` of first less second.
      ``settings``. What cannot be said is null beside its ``reason``.
    """
    _check(config)
    chunks = ChunkSettings(**config.chunks)
    runs = [_read(name, folder) for name, folder in named_folders(config.runs)]
    twice = [n for n, c in collections.Counter(run.name for run in runs).items() if c > 1]
    if twice:
        raise UserError(f"config.runs has two runs of the name {twice[0]}; name them NAME=W.")
    judgements = None if config.judgements is None else _judgements(config.judgements, runs)
    dataset = _dataset(config, runs)
    asked = [q for q in dataset.questions if any(q.id in run.rows for run in runs)]
    if not asked:
        raise UserError(f"no question of {runs[0].folder} is one of {dataset.name}; {_GIVE}.")
    questions, left_out = _gradable(asked)
    if not questions:
        reasons = ", ".join(f"{count} have {reason}" for reason, count in left_out.items())
        raise UserError(f"no question of {dataset.name} can be graded: {reasons}.")
    encoder = open_encoder_for(config.encoder)
    articles = Articles(dataset.corpus)
    graded = _graded(config, articles, questions, encoder, chunks)
    known = {question.id for question in dataset.questions}
    judged = {
        run.name: _judged(config, run, known, articles, questions, judgements) for run in runs
    }
    how = _How(config.aggregate, config.least_in_cell, (config.bootstrap_samples, config.seed))
    result = {
        "num_questions": len(questions),
        "left_out": left_out,
        "hops": {hop: _hop(graded[how.aggregate], hop) for hop in graded[how.aggregate].hops},
        "systems": {name: _system(one, graded, how) for name, one in judged.items()},
        "differences": _differences(judged, graded[how.aggregate], how),
        "settings": {
            "runs": {run.name: run.folder for run in runs},
            "data": dataset.name,
            "encoder": encoder.identity,
            "chunks": dataclasses.asdict(chunks),
            **{name: config[name] for name in _RECORDED},
        },
    }
    write_lines(workdir / QUESTIONS, _question_rows(questions, graded, config.aggregate, judged))
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


def _read(name: str, folder: pathlib.Path) -> Run:
    file = folder / PREDICTIONS
    if not file.is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{PREDICTIONS}"))
        hint = f"; name its runs: {', '.join(inside)}" if inside else ""
        raise UserError(f"{folder} is no run of launch/answer.py: it has no {PREDICTIONS}{hint}.")
    rows: dict[str, list[Row]] = {}
    for _, row in read_lines(file, Row):
        rows.setdefault(row.id, []).append(row)
    return Run(name, folder, rows)


def _judgements(folder: str, runs: Sequence[Run]) -> dict[tuple[str, str], Judgement]:
    """What the judge said, by run and question."""
    file = pathlib.Path(folder).expanduser() / JUDGEMENTS
    if not file.is_file():
        raise UserError(f"{folder} is no workdir of configs/judge.py: it has no {JUDGEMENTS}.")
    found: dict[tuple[str, str], Judgement] = {}
    for place, row in read_lines(file, Judgement):
        if (row.system, row.id) in found:
            told = f"repeats the verdict about {row.id!r} of the run {row.system!r}"
            raise field_error(place, "id", told)
        found[row.system, row.id] = row
    judged = {system for system, _ in found}
    for run in runs:
        if run.name not in judged:
            known = ", ".join(sorted(judged))
            raise UserError(f"{file} judges no run {run.name}; name the runs as it does: {known}.")
    return found


def _dataset(config: Config, runs: Sequence[Run]) -> Dataset:
    """The one dataset of all runs."""
    if config.data.dir is not None:
        return load.load_dataset(config.data)
    first, *others = [(run.folder, _data_of(run)) for run in runs]
    for folder, data in others:
        if data.dir != first[1].dir:
            raise UserError(
                f"{folder} answered questions of {data.dir or 'the built-in dataset'}, {first[0]} "
                f"of {first[1].dir or 'the built-in dataset'}."
            )
    folder, data = first
    if data.dir and not pathlib.Path(data.dir).is_dir():
        raise UserError(f"{folder / CONFIG} names the dataset {data.dir}, which is gone; {_GIVE}.")
    return load.load_dataset(data)


def _data_of(run: Run) -> _Data:
    file = run.folder / CONFIG
    if not file.is_file():
        raise UserError(f"{file} does not exist; {_GIVE}.")
    folder = decode(str(file), file.read_bytes(), _Settings).data.dir
    return _Data(folder and str(pathlib.Path(folder).expanduser().resolve()))


def _gradable(questions: Sequence[Question]) -> tuple[list[Question], dict[str, int]]:
    """The questions with gold, and how many others there are, by reason."""
    left_out: collections.Counter[str] = collections.Counter()
    kept = []
    for question in questions:
        if not question.supporting:
            left_out["no gold passages"] += 1
        elif question.hops is None:
            left_out["no number of hops"] += 1
        elif not question.answers:
            left_out["no gold answer"] += 1
        else:
            kept.append(question)
    return kept, dict(left_out)


def _graded(
    config: Config,
    articles: Articles,
    questions: Sequence[Question],
    encoder: Encoder,
    chunks: ChunkSettings,
) -> dict[str, DifficultyBins]:
    """The questions on the axes, by aggregate."""
    gold = [articles.gold_texts(q, config.unit, chunks) for q in questions]
    _warn_of_long_texts(gold, config.encoder.passage_max_length)
    found = difficulty.similarities([q.question for q in questions], gold, encoder.encode)
    hops = [question.hops or 0 for question in questions]
    return {
        how: difficulty.bin_questions(
            hops, [difficulty.retrieval_difficulty(s, how, config.power) for s in found]
        )
        for how in AGGREGATES
    }


def _warn_of_long_texts(gold: Sequence[Sequence[Sequence[str]]], limit: int) -> None:
    """Says how many texts the encoder surely cuts: a word has at least one token."""
    texts = {text for things in gold for thing in things for text in thing}
    count = sum(len(text.split()) > limit for text in texts)
    if count:
        say(
            f"WARNING: of {len(texts)} texts at least {count} are longer than the "
            f"{limit} tokens that are read of each (config.encoder.passage_max_length)"
        )


# ------------------------------------------------------------------------------------- the figures


def _judged(
    config: Config,
    run: Run,
    known: Collection[str],
    articles: Articles,
    questions: Sequence[Question],
    judgements: Mapping[tuple[str, str], Judgement] | None,
) -> Judged:
    """``known``: ids of all questions of the dataset; ``judgements``: as `_judgements`."""
    left_out: collections.Counter[str] = collections.Counter(
        {"question unknown": sum(len(rows) for i, rows in run.rows.items() if i not in known)}
    )
    errors: list[float | None] = []
    whose = []
    for question in questions:
        rows = run.rows.get(question.id, ())
        reason, verdict = _why_not(rows), None
        if reason is None and judgements is not None:
            verdict, reason = _verdict(rows[0], judgements.get((run.name, question.id)))
        if reason:
            left_out[reason] += 1
        errors.append(None if reason else 1 - _score(config, rows[0], question, verdict))
        found = "unanswered" if reason else _whose(config, rows[0], question, articles)
        whose.append(found)
    counts = {reason: count for reason, count in left_out.items() if count}
    return Judged(mean_of(errors), whose if run.retrieves else None, counts)


def _why_not(rows: Sequence[Row]) -> str | None:
    """Why a question does not count."""
    if not rows:
        return "no prediction"
    if len(rows) > 1:
        return "more than one prediction"
    return NOT_ANSWERED if rows[0].error == NOT_ANSWERED else None


def _verdict(row: Row, found: Judgement | None) -> tuple[bool | None, str | None]:
    """What the judge said of a prediction, or why it does not count; what failed needs none."""
    if row.error is not None:
        return None, None
    if found is not None and not found.is_about(row.answer):
        return None, "another answer was judged"
    if found is None or found.judge is None:
        return None, "no verdict"
    return found.judge, None


def _score(config: Config, row: Row, question: Question, verdict: bool | None) -> float:
    """A question that failed earns 0, whatever it left as an answer."""
    if row.error is not None:
        return 0.0
    if verdict is not None:
        return float(verdict)
    return METRICS[config.score](row.answer, question.answers, config.profile)


def _whose(config: Config, row: Row, question: Question, articles: Articles) -> str:
    if row.error is not None:
        return "unanswered"
    found = row.passages[: config.retrieved_at or None]
    return "reader" if articles.cover_gold(question, found) else "retriever"


def _hop(graded: DifficultyBins, hop: int) -> dict[str, Any]:
    count = len(graded.cell(hop))
    if hop in graded.reasons:
        return {"num_questions": count, "edges": None, "reason": graded.reasons[hop]}
    return {"num_questions": count, "edges": graded.edges[hop]}


def _system(one: Judged, graded: Mapping[str, DifficultyBins], how: _How) -> dict[str, Any]:
    axes = graded[how.aggregate]

    def measure(rows: np.ndarray) -> dict[str, Any]:
        found = difficulty.error_rate(one.errors, rows, *how.often)
        if one.whose is not None:
            found["errors"] = difficulty.errors_by_cause(one.errors, one.whose, rows)
        return found

    correlations = {
        name: difficulty.correlations(own, one.errors, how.least) for name, own in graded.items()
    }
    everyone = np.arange(len(axes.hops_Q))
    return {
        "error": difficulty.error_rate(one.errors, everyone, *how.often),
        "left_out": one.left_out,
        "by_hops": {hop: measure(axes.cell(hop)) for hop in axes.hops},
        "matrix": difficulty.matrix(axes, measure, how.least),
        "failures": _failures(one, how.often),
        "correlations": correlations,
        "strongest": difficulty.strongest(
            {name: own["mean"]["value"] for name, own in correlations.items()}
        ),
    }


def _failures(one: Judged, how_often: HowOften) -> dict[str, Any]:
    if one.whose is None:
        return {"reason": "the run retrieved nothing"}
    return difficulty.error_rates_by_cause(one.errors, one.whose, *how_often)


def _differences(judged: Mapping[str, Judged], graded: DifficultyBins, how: _How) -> dict[str, Any]:
    found = {}
    for (first, a), (second, b) in itertools.combinations(judged.items(), 2):

        def measure(rows: np.ndarray, a: Judged = a, b: Judged = b) -> dict[str, Any]:
            return difficulty.error_difference(a.errors, b.errors, rows, *how.often)

        found[f"{first}-{second}"] = {
            "error": measure(np.arange(len(graded.hops_Q))),
            "by_hops": {hop: measure(graded.cell(hop)) for hop in graded.hops},
            "matrix": difficulty.matrix(graded, measure, how.least),
        }
    return found


def _question_rows(
    questions: Sequence[Question],
    graded: Mapping[str, DifficultyBins],
    chosen: str,
    judged: Mapping[str, Judged],
) -> list[dict[str, Any]]:
    """Lines of ``difficulty.jsonl``; ``quartile`` counts from 1, null where the hop has none."""
    rows = []
    for place, question in enumerate(questions):
        column = int(graded[chosen].bin_Q[place])
        rows.append(
            {
                "id": question.id,
                "hops": question.hops,
                "difficulty": {how: float(g.difficulty_Q[place]) for how, g in graded.items()},
                "quartile": column + 1 if column >= 0 else None,
                "errors": {
                    name: float(one.errors.top_Q[place]) if one.errors.bottom_Q[place] else None
                    for name, one in judged.items()
                },
                "whose": {
                    name: one.whose[place] if one.whose and one.errors.top_Q[place] else None
                    for name, one in judged.items()
                },
            }
        )
    return rows
