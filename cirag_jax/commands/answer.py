"""A method over a data set: what ``launch/answer.py`` runs."""

import collections
import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.commands import identity, online, opening, task
from cirag_jax.commands.pool import Pool
from cirag_jax.commands.session import own_question
from cirag_jax.commands.task import Task
from cirag_jax.datasets import load
from cirag_jax.datasets.corpus import WHOLE, build_corpus
from cirag_jax.datasets.documents import read_documents
from cirag_jax.errors import UserError
from cirag_jax.evaluation import cost, metrics
from cirag_jax.evaluation.evidence import recall_per_step
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.io import say, write_lines
from cirag_jax.llm.types import Usage
from cirag_jax.methods.common import extraction
from cirag_jax.methods.registry import find_method
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.runtime.records import Record, read_passages, read_records
from cirag_jax.runtime.requests import Needs
from cirag_jax.runtime.run import RunResult, run_jobs
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import JOURNAL, Journal
from cirag_jax.types import GRANULARITIES, Config, Passage, Prediction, Question

PREDICTIONS = "predictions.jsonl"
TIMINGS = "timings.jsonl"
NOT_ANSWERED = "not answered yet"  # The error of a question that is left.


class Plan(NamedTuple):
    """A run that may begin: whatever can be wrong with it before anything is opened is not.

    Attributes:
      config: of configs/methods.
      task: what is asked, and over what.
      jobs: a program a question.
      settings: what decides the answers; binds a workdir.
    """

    config: Config
    task: Task
    jobs: Sequence[Job]
    settings: Mapping[str, Any]


def answer(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Answers the questions that ``config`` selects; resumes what ``workdir`` holds.

    Args:
      config: of configs/methods.
      workdir: an existing folder.

    Returns:
      As `carry_out`.
    """
    started = time.monotonic()
    with Pool() as pool:
        planned = plan(config, pool)
        warn_of_seen([planned])
        return carry_out(planned, workdir, pool, started, task.deadline(config))


def plan(config: Config, pool: Pool) -> Plan:
    """What ``config`` asks for; ``pool`` keeps the data set."""
    method, settings = find_method(config.method), task.method_settings(config)
    _scoring(config)
    metrics.check(config.metrics)
    opening.check(config, settings.needs)
    asked = _task(config, settings.needs, pool)
    jobs = [task.job(question, method.program, settings) for question in asked.questions]
    return Plan(config, asked, jobs, identity.of_run(config, method.program.__module__, asked))


def warn_of_seen(plans: Iterable[Plan]) -> None:
    """Says of every model of some runs, once, how many of their questions it was trained on."""
    counts: dict[str, str] = {}
    for plan in plans:
        ids = {question.id for question in plan.task.questions}
        for spec in _students(plan):
            seen = len(ids & (workdir_lib.trained_on(spec) or frozenset()))
            if seen:
                counts[spec] = f"{spec} was trained on {seen} of these {len(ids)} questions"
    if counts:
        say(f"WARNING: {', '.join(counts.values())}; the figures say nothing about others")


def _students(plan: Plan) -> Iterable[str]:
    """What a run uses and may have trained on questions."""
    config, needs = plan.config, plan.task.needs
    if task.needs_encoder(config, needs):
        yield config.encoder.model
    for name in needs.rankers:
        if config.rankers[name].get("model"):
            yield config.rankers[name].model
    for role in needs.roles:
        if config[role].adapter and config[role].backend != "openai":
            yield config[role].adapter


def carry_out(
    plan: Plan, workdir: pathlib.Path, pool: Pool, started: float, until: float | None
) -> dict[str, Any]:
    """Answers the questions of a plan; resumes what ``workdir`` holds.

    Writes ``predictions.jsonl`` and ``timings.jsonl``, in the order of the questions, and while it
    runs ``journal.sqlite``. Several processes answer a share each; the first writes for all.

    Args:
      plan: the run.
      workdir: an existing folder.
      pool: what is open already, and what this run opens.
      started: `time.monotonic()` at its start.
      until: `time.monotonic()` after which no batch is begun; None: never.

    Returns:
      ``em``, ``f1``, ``acc`` and the other scores of ``config.metrics``, ``recall`` (None without a
      corpus), ``unscored`` (why a score is of no question, and then NaN or left out),
      ``granularities``, ``calls``, tokens, ``roles`` and ``stages`` (calls and tokens of each),
      ``seconds``, ``sees_gold`` (whether the method did) and the other fields of the command's
      contract; the ``answer`` to a question of the config.
    """
    config, asked = plan.config, plan.task

    def open_all(stack: contextlib.ExitStack, book: Journal) -> Mapping[type | str, Handler]:
        at_once = min(config.in_flight, len(plan.jobs))
        return opening.open_handlers(config, asked, book, stack, rows=at_once, pool=pool)

    limits = config.in_flight, started, until
    run = run_jobs(plan.jobs, open_all, workdir, plan.settings, *limits)
    if run is None:
        return {}
    rows = [_row(question, run.records.get(question.id)) for question in asked.questions]
    write_lines(workdir / PREDICTIONS, map(_prediction_row, rows))
    write_lines(workdir / TIMINGS, map(_timing_row, rows))
    result = _result(plan, rows, workdir, run)
    result["sees_gold"] = asked.needs.gold
    if config.question is not None:
        _show(rows[0], read_passages(workdir / JOURNAL))
        result["answer"] = rows[0].found.answer if rows[0].found else None
    return {**result, **_extraction(workdir), "load_seconds": run.load_seconds}


# ------------------------------------------------------------------------------------- the task


def _task(config: Config, needs: Needs, pool: Pool) -> Task:
    """Data set, selected questions and the passages they may find."""
    own = config.question is not None
    if config.get("documents"):
        return _task_of_documents(config, needs)
    questions = not own or needs.demonstrations
    wanted = {"corpus": needs.corpus, "questions": questions}
    dataset = pool.get(
        "data sets",
        [config.data.dir, wanted],
        lambda: load.load_dataset(config.data, **wanted),
    )
    if own:
        question = own_question(config.question)
        return Task(needs, dataset, (question,), build_corpus(dataset, (), WHOLE))
    return task.select(dataset, config.data, "test", needs)


def _task_of_documents(config: Config, needs: Needs) -> Task:
    if config.question is None:
        raise UserError("config.documents needs a question: --config.question='...'.")
    question, dataset = own_question(config.question), read_documents(config.documents)
    return Task(needs, dataset, (question,), build_corpus(dataset, (), WHOLE))


# ---------------------------------------------------------------------------------- the results


class QuestionRecord(NamedTuple):
    """A question, what the journal knows of it once it was begun, and its prediction."""

    question: Question
    record: Record | None
    found: Prediction | None


def _row(question: Question, record: Record | None) -> QuestionRecord:
    return QuestionRecord(question, record, record.result(Prediction) if record else None)


def _prediction_row(row: QuestionRecord) -> dict[str, Any]:
    """A line of ``predictions.jsonl``; equal for equal answers, whatever they cost in time."""
    question, record, found = row
    error = record.error if record and record.has_ended else NOT_ANSWERED
    return {
        "id": question.id,
        "answer": found.answer if found else "",
        "granularity": found.granularity if found else None,
        "passages": found.passages if found else [],
        "sentences": found.sentences if found else [],
        "triples": [triple[:3] for triple in found.triples] if found else [],
        "calls": dict(record.calls) if record else {},
        "tokens": {
            "prompt": record.usage.prompt_tokens if record else 0,
            "generated": record.usage.generated_tokens if record else 0,
        },
        "error": error,
    }


def _timing_row(row: QuestionRecord) -> dict[str, Any]:
    record = row.record
    usage = record.usage if record else None
    return {
        "id": row.question.id,
        "seconds": record.seconds if record else None,  # from its start to its end, others beside
        "cached_tokens": usage.cached_tokens if usage else 0,
    }


def _result(
    plan: Plan, rows: Sequence[QuestionRecord], workdir: pathlib.Path, run: RunResult
) -> dict[str, Any]:
    """The command's result, over the questions that ended; a failed one answers nothing."""
    ended = [(q, r, p) for q, r, p in rows if r is not None and r.has_ended]
    found = [prediction for *_, prediction in ended]
    answered = [AnsweredQuestion(question, prediction) for question, _, prediction in ended]
    config, corpus = plan.config, plan.task.needs.corpus
    scoring = _scoring(config, lambda: read_passages(workdir / JOURNAL))
    measured = metrics.measure(answered, scoring, config.metrics, corpus=corpus)
    usages = [record.usage for _, record, _ in ended]
    return {
        **_scores(measured, corpus),
        "unscored": {
            name: metrics.reason(name, answered, corpus=corpus)
            for name, ratio in measured.items()
            if not ratio.bottom_Q.any()
        },
        "profile": config.profile,
        "recall_per_step": recall_per_step(found, [q for q, *_ in ended], config.recall_at),
        "granularities": _granularities(found),
        "answer_calls": _mean(sum(bool(a.evidence) for a in p.attempts) for p in found if p),
        "steps": _mean(len(p.steps) for p in found if p),
        "parse_errors": dict(
            sum((collections.Counter(p.parse_errors) for p in found if p), start=_EMPTY)
        ),
        "calls": dict(sum((collections.Counter(r.calls) for _, r, _ in ended), start=_EMPTY)),
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "generated_tokens": sum(usage.generated_tokens for usage in usages),
        **cost.summarize(cost.spent_by_role(record for _, record, _ in ended)),
        "seconds": run.seconds,
        "seconds_per_question": run.seconds / len(ended) if ended else None,
        "num_questions": len(rows),
        "answered": sum(p is not None for p in found),
        "failures": sum(p is None for p in found),
        "errors": _most_common(r.error for _, r, _ in ended if r.error),
        "complete": run.complete and len(ended) == len(rows),
    }


def _scoring(config: Config, passages: Callable[[], Mapping[str, Passage]] = dict) -> Scoring:
    return Scoring(config.profile, tuple(config.recall_at), passages)


def _scores(measured: Mapping[str, Ratio], corpus: bool) -> dict[str, Any]:
    """The scores as the result has them: recall by granularity, with how many were averaged; None
    without a corpus.
    """
    granularity_of = {name: granularity for granularity, name in metrics.RECALLS.items()}
    found: dict[str, Any] = {}
    of_evidence: dict[str, Any] = dict.fromkeys(metrics.RECALLS)
    for name, ratio in measured.items():
        kind, _, k = name.partition("@")
        count = int(ratio.bottom_Q.sum())
        if kind not in granularity_of:
            found[name] = ratio.value
        elif count:
            granularity = granularity_of[kind]
            scores = of_evidence[granularity] or {"num_questions": count}
            of_evidence[granularity] = {f"recall@{k}": ratio.value, **scores}
    return {**found, "recall": of_evidence if corpus else None}


_EMPTY: collections.Counter[str] = collections.Counter()


def _extraction(workdir: pathlib.Path) -> dict[str, Any]:
    """What extraction online took, which no single question is charged for."""
    paths = sorted(workdir.glob(f"{online.NAME}*.sqlite"))  # one for each process
    if not paths:
        return {}
    records = [record for path in paths for record in read_records(path)]
    usage = sum((record.usage for record in records), start=Usage())
    extracted = [r.result(extraction.EncodedExtraction) for r in records if r.has_ended]
    told = {
        "passages": len(extracted),
        "failures": sum(kept is None or kept.status == "failed" for kept in extracted),
        "prompt_tokens": usage.prompt_tokens,
        "generated_tokens": usage.generated_tokens,
    }
    return {"extraction": told}


def _granularities(found: Iterable[Prediction | None]) -> dict[str, int]:
    counts = collections.Counter(p.granularity for p in found if p)
    return {granularity: counts[granularity] for granularity in GRANULARITIES}


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _most_common(errors: Iterable[str]) -> Mapping[str, int]:
    return dict(collections.Counter(errors).most_common(5))


def _show(row: QuestionRecord, passages: Mapping[str, Any]) -> None:
    """One answer with its evidence, for a person."""
    if row.record is None:
        return
    if row.found is None:
        print(f"failed: {row.record.error}", file=sys.stderr)
        return
    from cirag_jax.reports import console

    print(console.render(row.found, passages), file=sys.stderr)
