"""Evaluates a reader: answers from sufficient evidence, refusals of insufficient evidence."""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec

from cirag_jax.commands import side_by_side
from cirag_jax.errors import check_at_least
from cirag_jax.evaluation import answers
from cirag_jax.evaluation.calibration import calibration
from cirag_jax.evaluation.overlap import Ratio, ratio
from cirag_jax.io import write_lines
from cirag_jax.methods.common import reading_prompts
from cirag_jax.reports import figures
from cirag_jax.reports.tables import captioned, figure, lead, write_table
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.runtime.scheduler import Job
from cirag_jax.training.data import conversations
from cirag_jax.training.data.reading_examples import Reading, messages_of
from cirag_jax.types import Config

FILE = "readings.jsonl"
SCORES = ("em", "f1", "refuses_missing", "refuses_whole")


class Said(TypedDict):
    """A response as the journal holds it; ``confidence`` as `Read` has it."""

    text: str
    truncated: bool
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """What a reader said: its answer, whether it refused, and how probable those words were."""

    answer: str
    refused: bool
    confidence: float | None = None


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Has every model read the questions of ``config.folders``, with whole and with cut evidence.

    Every question is read twice at a granularity drawn by the seed: with all gold evidence, and
    without that of one gold passage. Leaves ``readings.jsonl``, ``table.md``, ``calibration.png``
    and a journal a model in ``workdir``; a run that was stopped goes on from there. ``config`` is
    of configs/reader_eval.py.

    Returns:
      ``systems``: of each model, for ``all`` and every granularity, ``em`` and ``f1`` of answers
      from whole evidence, ``refuses_missing`` and ``refuses_whole`` (shares of cut and of whole
      evidence that it refuses), each with its 95 % interval; ``calibration`` (see
      `evaluation.calibration`), tokens and seconds; ``differences``: student less base;
      ``num_questions``, ``num_trained_on``, ``settings``, ``complete``.
    """
    answers.check_profile(config.profile)
    check_at_least(1, config, "max_tokens", "in_flight", "bootstrap_samples")
    models = side_by_side.models_of(config, "reader")
    described = {k: v for m in models.values() for k, v in m.described.items()}
    how = str(described.get("reader_format", config.evidence.reader_format))
    found = _readings(config)
    num_questions = len(found) // 2
    names = {made.question.id for made in found}
    learnt = side_by_side.student_learnt(models)
    num_trained_on = side_by_side.count_seen(learnt, names, "questions")

    jobs = [job(made, how, config.calibration) for made in found]
    bound = {"prompts": reading_prompts.prompt_digest(how), "max": config.max_tokens}
    asked = ("reader", config.max_tokens)
    told = side_by_side.ask_all(config, workdir, models, bound, asked, jobs, "reading")

    scores: dict[str, dict[str, Ratio]] = {}
    systems: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, (records, usage) in told.items():
        said = [_read(records[one.id]) for one in jobs]
        scores[name] = score(found, said, config.profile)
        systems[name] = {
            **side_by_side.bounded(config, scores[name]),
            "calibration": _calibration(found, said, config.profile),
            **usage,
        }
        rows += [_row(name, r, s, config.profile) for r, s in zip(found, said, strict=True)]
    result = {
        "systems": systems,
        "differences": side_by_side.leads(config, scores),
        "num_questions": num_questions,
        "num_trained_on": num_trained_on,
        "settings": {
            "checkpoint": config.checkpoint,
            "folders": config.folders,
            "split": config.data.split,
            "fold": config.data.fold,
            "reader_format": how,
            "profile": config.profile,
        },
        "complete": len(scores) == len(models),
    }
    write_lines(workdir / FILE, rows)
    write_table(table_of(result), workdir)
    if any(system["calibration"]["bins"] for system in systems.values()):
        figures.save(_draw(systems), workdir, "calibration")
    return result


def _readings(config: Config) -> list[Reading]:
    """Every question with whole evidence, then with cut evidence."""
    found: list[Reading] = []
    for missing in (0.0, 1.0):
        settings = conversations.reading_settings(config, missing=missing, forced=0.0)
        made, _ = conversations.read_folders(config, settings, config.data.split, config.data.fold)
        found += made
    return found


def job(made: Reading, reader_format: str, logprobs: bool = False) -> Job:
    """The program that asks role ``reader`` about a reading; with ``logprobs`` for the
    probabilities of its words, too.
    """
    messages = messages_of(made, reader_format)
    described = [[message.role, message.text] for message in messages]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    kind = "whole" if made.sufficient else "missing"

    def program() -> Program[Said]:
        said: Generated = yield Generate(messages, "reader", logprobs=logprobs)
        return {
            "text": said.text,
            "truncated": said.finish_reason == "length",
            "confidence": _confidence(said),
        }

    return Job(f"{made.question.id}/{kind}/{digest}", described, program)


def _confidence(said: Generated) -> float | None:
    """The probability of the words that are read as the answer, given those before."""
    start = reading_prompts.answer_start(said.text)
    logprobs = [t.logprob for t in said.tokens or () if t.offset >= start and t.logprob is not None]
    return math.exp(min(sum(logprobs), 0.0)) if logprobs else None  # servers round, too


def _read(record: Record) -> Read:
    """A request that failed neither answers nor refuses."""
    said = record.result(Said)
    if said is None:
        return Read("", False)
    answer, sufficient, _ = reading_prompts.parse_answer(said["text"], truncated=said["truncated"])
    return Read(answer, not sufficient, said["confidence"])


def score(found: Sequence[Reading], said: Sequence[Read], profile: str) -> dict[str, Ratio]:
    """``all/em``, ``sentence/f1``, ...: `SCORES`, of all readings and by granularity."""
    scores: dict[str, Ratio] = {}
    ids = {id: place for place, id in enumerate(dict.fromkeys(made.question.id for made in found))}
    groups = [ids[made.question.id] for made in found]  # the bootstrap draws questions
    for kind in ("all", *sorted({made.granularity for made in found})):
        counts = [float(kind in ("all", made.granularity)) for made in found]
        whole = [n * made.sufficient for n, made in zip(counts, found, strict=True)]
        cut = [n * (not made.sufficient) for n, made in zip(counts, found, strict=True)]

        def share(values: Sequence[float], weights: Sequence[float]) -> Ratio:
            tops = [v * w for v, w in zip(values, weights, strict=True)]
            return ratio(tops, weights, groups, len(ids))

        refused = [float(s.refused) for s in said]
        scores[f"{kind}/em"] = share(_against(found, said, answers.exact_match, profile), whole)
        scores[f"{kind}/f1"] = share(_against(found, said, answers.f1, profile), whole)
        scores[f"{kind}/refuses_missing"] = share(refused, cut)
        scores[f"{kind}/refuses_whole"] = share(refused, whole)
    return scores


def _against(found: Sequence[Reading], said: Sequence[Read], scorer: Any, profile: str) -> Any:
    """A refusal is no answer."""
    return [
        0.0 if s.refused else scorer(s.answer, made.question.answers, profile)
        for made, s in zip(found, said, strict=True)
    ]


def _calibration(found: Sequence[Reading], said: Sequence[Read], profile: str) -> dict[str, Any]:
    """Of all answers given, from whole and from cut evidence."""
    right = _against(found, said, answers.exact_match, profile)
    given = [
        (s.confidence, bool(one))
        for s, one in zip(said, right, strict=True)
        if not s.refused and s.confidence is not None
    ]
    return calibration([c for c, _ in given], [one for _, one in given], len(found))


def _draw(systems: Mapping[str, Any]) -> Any:
    """Confidence against accuracy, and accuracy against the share that is answered."""
    drawn, (left, right) = figures.pyplot().subplots(
        1, 2, figsize=(9, 4), layout="constrained", sharey=True
    )
    left.plot([0, 100], [0, 100], color="0.7", linestyle="--")
    for name, system in systems.items():
        bins, coverage = (system["calibration"][field] for field in ("bins", "coverage"))
        if bins:
            error = 100 * system["calibration"]["error"]
            label = f"{name}, error {error:.0f} points"
            x, y = ([100 * one[field] for one in bins] for field in ("confidence", "right"))
            left.scatter(x, y, [10 + 2 * one["count"] for one in bins], alpha=0.8, label=label)
            x, y = ([100 * one[field] for one in coverage] for field in ("answered", "right"))
            right.plot(x, y, marker=".", label=name)
    left.set_xlabel("confidence of the answer, %")
    left.set_ylabel("right, %")
    right.set_xlabel("answered, the most confident first, %")
    for axes in (left, right):
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
        axes.legend()
    return drawn


def _row(name: str, made: Reading, said: Read, profile: str) -> dict[str, Any]:
    return {
        "id": made.question.id,
        "system": name,
        "granularity": made.granularity,
        "sufficient": made.sufficient,
        "question": made.question.question,
        "evidence": made.evidence,
        "answer": said.answer,
        "refused": said.refused,
        "confidence": said.confidence,
        "gold": made.question.answers,
        "f1": answers.f1(said.answer, made.question.answers, profile),
    }


def table_of(result: Mapping[str, Any]) -> str:
    """The figures in per cent, one row a model and granularity."""
    header = ["reader", "evidence", "EM [95 %]", "F1 [95 %]"]
    header += ["refuses, part missing", "refuses, whole"]
    kinds = [
        (name, kind, system[kind])
        for name, system in result["systems"].items()
        for kind in ("all", "triple", "sentence", "passage")
        if kind in system
    ]
    rows = [
        [
            *(name, kind, figure(scores["em"], bounds=True), figure(scores["f1"], bounds=True)),
            *(figure(scores[s]) for s in ("refuses_missing", "refuses_whole")),
        ]
        for name, kind, scores in kinds
    ]
    for name, compared in result["differences"].items():
        rows.append([name, "all", *(lead(compared["all"][s]) for s in SCORES)])
    caption = f"{result['num_questions']} questions of {result['settings']['folders']}"
    return captioned(caption, [header, *rows], result["complete"])
