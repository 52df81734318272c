"""Evaluates a reader: answers from complete evidence, refusals of incomplete evidence."""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec

from cirag_jax.commands import evaluation
from cirag_jax.errors import check_at_least
from cirag_jax.evaluation import answers
from cirag_jax.evaluation.calibration import calibration
from cirag_jax.evaluation.overlap import Ratio, ratio
from cirag_jax.methods.common import reading_prompts
from cirag_jax.reports import figures
from cirag_jax.reports.tables import Column, captioned, percent_with_bounds
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.training.data import conversations
from cirag_jax.training.data.reading_examples import Reading, messages_of
from cirag_jax.types import Config

FILE = "readings.jsonl"
COLUMNS = (
    Column("EM [95 %]", "em", percent_with_bounds),
    Column("F1 [95 %]", "f1", percent_with_bounds),
    Column("refuses, part missing", "refuses_missing"),
    Column("refuses, whole", "refuses_whole"),
)


class ReaderResponse(TypedDict):
    """A response in the journal; for ``confidence``, see `ReaderAnswer`."""

    text: str
    truncated: bool
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


@dataclasses.dataclass(frozen=True, slots=True)
class ReaderAnswer:
    """An answer, the probability of its tokens, and whether it is a refusal."""

    answer: str
    refused: bool
    confidence: float | None = None


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Lets each model answer the questions of ``config.folders`` and scores the answers.

    Each model answers each question twice, with evidence of a random granularity: with all gold
    evidence, and without one gold triple or the evidence of one gold passage. Writes
    ``readings.jsonl``, ``table.md``, ``calibration.png`` and a journal per model. ``config`` comes
    from configs/reader_eval.py.

    Returns:
      The result of `evaluation.report`. Each system has, for ``all`` and each granularity, ``em``
      and ``f1`` of answers from complete evidence, and ``refuses_missing`` and ``refuses_whole``,
      the shares of incomplete and complete evidence that it refuses. ``calibration``: see
      `evaluation.calibration`.
    """
    answers.check_profile(config.profile)
    check_at_least(1, config, "max_tokens", "in_flight", "bootstrap_samples")
    models = evaluation.models_of(config, "reader")
    prompt_settings = {k: v for model in models.values() for k, v in model.prompt_settings.items()}
    reader_format = str(prompt_settings.get("reader_format", config.evidence.reader_format))
    readings = _readings(config)
    ids = {reading.question.id for reading in readings}
    num_trained_on = evaluation.count_trained_on(config.checkpoint, ids, "questions")

    jobs = [job(reading, reader_format, config.calibration) for reading in readings]
    identity = {"prompts": reading_prompts.prompt_digest(reader_format), "max": config.max_tokens}
    roles = {"reader": config.max_tokens}
    results = evaluation.ask_models(
        config, workdir, models, roles, lambda _: (jobs, identity), "reading"
    )
    systems: dict[str, evaluation.System] = {}
    for name, (records, usage) in results.items():
        if records is None:
            continue  # stopped by the time limit or a budget
        responses = [_read(records[job.id]) for job in jobs]
        systems[name] = evaluation.System(
            score(readings, responses, config.profile),
            {"calibration": _calibration(readings, responses, config.profile), **usage},
            [_row(name, *pair, config.profile) for pair in zip(readings, responses, strict=True)],
        )
    extra = {
        "num_questions": len(readings) // 2,
        "num_trained_on": num_trained_on,
        "settings": {
            "checkpoint": config.checkpoint,
            "folders": config.folders,
            "split": config.data.split,
            "fold": config.data.fold,
            "reader_format": reader_format,
            "profile": config.profile,
        },
        "complete": len(systems) == len(models),
    }
    result = evaluation.report(config, workdir, systems, extra, table_of, FILE)
    if any(system["calibration"]["bins"] for system in result["systems"].values()):
        figures.save(_draw(result["systems"]), workdir, "calibration")
    return result


def _readings(config: Config) -> list[Reading]:
    """Returns all questions with complete evidence, then all with incomplete evidence."""
    readings: list[Reading] = []
    part = config.data.split, config.data.fold
    for missing in (0.0, 1.0):
        settings = conversations.reading_settings(config, missing=missing, forced=0.0)
        sets, _ = conversations.read_folders(config, settings, *part)
        readings += [reading for folder_readings in sets for reading in folder_readings]
    return readings


def job(reading: Reading, reader_format: str, logprobs: bool = False) -> Job:
    """Returns the job that calls the role ``reader`` for a reading: a question with evidence.

    With ``logprobs``, the job also requests the probabilities of tokens.
    """
    messages = messages_of(reading, reader_format)
    turns = [[message.role, message.text] for message in messages]
    digest = hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16]
    kind = "whole" if reading.sufficient else "missing"

    def program() -> Program[ReaderResponse]:
        response: Generated = yield Generate(messages, "reader", logprobs=logprobs)
        return {
            "text": response.text,
            "truncated": response.finish_reason == "length",
            "confidence": _confidence(response),
        }

    return Job(f"{reading.question.id}/{kind}/{digest}", turns, program)


def _confidence(response: Generated) -> float | None:
    """Returns the probability of the answer given the preceding text, if known."""
    start = reading_prompts.answer_start(response.text)
    tokens = [token for token in response.tokens or () if token.offset >= start]
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    return math.exp(min(sum(logprobs), 0.0)) if logprobs else None  # a rounded sum may be above 0


def _read(record: Record) -> ReaderAnswer:
    """Parses a response; a failed request is an empty answer and no refusal."""
    response = record.result(ReaderResponse)
    if response is None:
        return ReaderAnswer("", False)
    answer, sufficient, _ = reading_prompts.parse_answer(
        response["text"], truncated=response["truncated"]
    )
    return ReaderAnswer(answer, not sufficient, response["confidence"])


def score(
    readings: Sequence[Reading], responses: Sequence[ReaderAnswer], profile: str
) -> dict[str, Ratio]:
    """Returns scores in total and by granularity, such as ``all/em`` or ``sentence/f1``."""
    scores: dict[str, Ratio] = {}
    names = dict.fromkeys(reading.question.id for reading in readings)
    ids = {id: index for index, id in enumerate(names)}
    groups = [ids[reading.question.id] for reading in readings]  # the bootstrap resamples questions
    refused = [float(response.refused) for response in responses]
    exact = _correct(readings, responses, answers.exact_match, profile)
    f1 = _correct(readings, responses, answers.f1, profile)
    for kind in ("all", *sorted({reading.granularity for reading in readings})):
        counts = [float(kind in ("all", reading.granularity)) for reading in readings]
        whole = [n * reading.sufficient for n, reading in zip(counts, readings, strict=True)]
        cut = [n * (not reading.sufficient) for n, reading in zip(counts, readings, strict=True)]

        def share(values: Sequence[float], weights: Sequence[float]) -> Ratio:
            tops = [v * w for v, w in zip(values, weights, strict=True)]
            return ratio(tops, weights, groups, len(ids))

        scores[f"{kind}/em"] = share(exact, whole)
        scores[f"{kind}/f1"] = share(f1, whole)
        scores[f"{kind}/refuses_missing"] = share(refused, cut)
        scores[f"{kind}/refuses_whole"] = share(refused, whole)
    return scores


def _correct(
    readings: Sequence[Reading], responses: Sequence[ReaderAnswer], metric: Any, profile: str
) -> list[float]:
    """Scores each answer by a metric; refusals score 0."""
    return [
        0.0 if response.refused else metric(response.answer, reading.question.answers, profile)
        for reading, response in zip(readings, responses, strict=True)
    ]


def _calibration(
    readings: Sequence[Reading], responses: Sequence[ReaderAnswer], profile: str
) -> dict[str, Any]:
    """Returns the calibration of all answers that are not refusals."""
    exact = _correct(readings, responses, answers.exact_match, profile)
    pairs = [
        (response.confidence, bool(correct))
        for response, correct in zip(responses, exact, strict=True)
        if not response.refused and response.confidence is not None
    ]
    return calibration([c for c, _ in pairs], [correct for _, correct in pairs], len(readings))


def _draw(systems: Mapping[str, Any]) -> Any:
    """Draws accuracy by confidence, and accuracy by the share of answered questions."""
    figure, (left, right) = figures.pyplot().subplots(
        1, 2, figsize=(9, 4), layout="constrained", sharey=True
    )
    left.plot([0, 100], [0, 100], color="0.7", linestyle="--")
    for name, system in systems.items():
        bins, coverage = (system["calibration"][field] for field in ("bins", "coverage"))
        if bins:
            error = 100 * system["calibration"]["error"]
            label = f"{name}, error {error:.0f} points"
            x, y = ([100 * point[field] for point in bins] for field in ("confidence", "right"))
            left.scatter(x, y, [10 + 2 * point["count"] for point in bins], alpha=0.8, label=label)
            x, y = ([100 * point[field] for point in coverage] for field in ("answered", "right"))
            right.plot(x, y, marker=".", label=name)
    left.set_xlabel("confidence of the answer, %")
    left.set_ylabel("right, %")
    right.set_xlabel("answered, the most confident first, %")
    for axes in (left, right):
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _row(name: str, reading: Reading, response: ReaderAnswer, profile: str) -> dict[str, Any]:
    return {
        "id": reading.question.id,
        "system": name,
        "granularity": reading.granularity,
        "sufficient": reading.sufficient,
        "question": reading.question.question,
        "evidence": reading.evidence,
        "answer": response.answer,
        "refused": response.refused,
        "confidence": response.confidence,
        "gold": reading.question.answers,
        "f1": answers.f1(response.answer, answers.golds_of(reading.question, profile), profile),
    }


def table_of(result: Mapping[str, Any]) -> str:
    """Returns a table of scores in per cent, one row per model and granularity."""
    rows = [["reader", "evidence", *(column.title for column in COLUMNS)]]
    for name, system in result["systems"].items():
        for kind in ("all", "triple", "sentence", "passage"):
            if kind in system:
                rows.append([name, kind, *(column.of_system(system[kind]) for column in COLUMNS)])
    for name, scores in result["differences"].items():
        rows.append([name, "all", *(column.of_difference(scores["all"]) for column in COLUMNS)])
    caption = f"{result['num_questions']} questions of {result['settings']['folders']}"
    return captioned(caption, rows, result["complete"])
