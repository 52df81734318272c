"""Runs a method on the questions of a dataset: the command ``launch/answer.py``."""

import collections
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax import cli
from cirag_jax.commands import identity, online, opening, task
from cirag_jax.commands.pool import Pool
from cirag_jax.commands.session import own_question
from cirag_jax.commands.task import Task
from cirag_jax.datasets import load
from cirag_jax.datasets.corpus import WHOLE, build_corpus
from cirag_jax.datasets.documents import read_documents
from cirag_jax.datasets.formats import trec
from cirag_jax.errors import UserError
from cirag_jax.evaluation import cost, hops, metrics
from cirag_jax.evaluation.evidence import recall_per_step
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.io import say, write_lines
from cirag_jax.llm.types import Usage
from cirag_jax.methods.common import extraction
from cirag_jax.methods.registry import find_method, method_block
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.reports import console
from cirag_jax.retrieval.encoders import count_truncated, report_truncated
from cirag_jax.runtime.records import Record, read_passages, read_records
from cirag_jax.runtime.requests import Needs
from cirag_jax.runtime.run import RunResult, run_jobs
from cirag_jax.runtime.scheduler import Job
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import GRANULARITIES, Config, Passage, Prediction, Question

PREDICTIONS = "predictions.jsonl"
TIMINGS = "timings.jsonl"
NOT_ANSWERED = "not answered yet"  # error of an unfinished question


class PlannedRun(NamedTuple):
    """A run whose config and data have been checked, before any model is loaded.

    Attributes:
      config: a config of configs/methods.
      task: the questions and the passages to search.
      jobs: one program per question.
      settings: the identity of the run; a workdir can only be resumed with the same identity.
    """

    config: Config
    task: Task
    jobs: Sequence[Job]
    settings: Mapping[str, Any]


def answer(config: Config, workdir: pathlib.Path, replace: bool = False) -> dict[str, Any]:
    """Plans and executes the run that ``config`` describes; see `execute`."""
    if config.export_prompts is not None:
        return cli.PrintOnly(task.export_prompts(config, task.method_settings(config)))
    started = time.monotonic()
    with Pool() as pool:
        planned = plan_run(config, pool)
        warn_of_training_questions([planned])
        warn_of_untrained_integrators({"": planned})
        return execute(planned, workdir, pool, started, task.deadline(config), replace)


def plan_run(config: Config, pool: Pool) -> PlannedRun:
    """Checks ``config`` and loads its questions; ``pool`` caches the dataset."""
    method, settings = find_method(config.method), task.method_settings(config)
    _scoring(config)
    metrics.check(config.metrics)
    opening.check(config, settings.needs)
    own_prompts = task.read_prompts(config, settings)
    run_task = _task(config, settings.needs, pool)._replace(own_prompts=own_prompts)
    opening.warn_of_own_prompts(config, run_task)
    opening.warn_of_other_inputs(config, run_task)
    jobs = [
        task.job(question, method.program, settings, own_prompts) for question in run_task.questions
    ]
    identity_of_run = identity.of_run(config, method.program.__module__, run_task)
    return PlannedRun(config, run_task, jobs, identity_of_run)


def warn_of_training_questions(runs: Iterable[PlannedRun]) -> None:
    """Warns of models that were trained on questions of the runs, naming each model once."""
    warnings: dict[str, str] = {}
    for run in runs:
        ids = {question.id for question in run.task.questions}
        for spec in _trainable_models(run):
            count = len(ids & (workdir_lib.training_ids(spec) or frozenset()))
            if count:
                warnings[spec] = f"{spec} was trained on {count} of these {len(ids)} questions"
    if warnings:
        say(f"WARNING: {', '.join(warnings.values())}; these scores are not held-out")


def warn_of_untrained_integrators(runs: Mapping[str, PlannedRun]) -> None:
    """Warns of language models that integrate without an adapter and without examples."""
    for name, run in runs.items():
        block = method_block(run.config)
        if "integrator" not in run.task.needs.roles or run.config.integrator.backend == "openai":
            continue  # A server may have merged an adapter into its model.
        shown = block.get("few_shot") or block.get("prefilled_headers")
        if workdir_lib.trained_spec(run.config.integrator) is None and not shown:
            say(
                f"WARNING: {name}{': ' * bool(name)}config.integrator.adapter is not set, so the "
                "integrator is not distilled (CIRAG's Table 2, w/o TD); train one with "
                "configs/integrator.py"
            )


def _trainable_models(run: PlannedRun) -> Iterator[str]:
    """Yields the encoder, rankers and adapters of a run."""
    config, needs = run.config, run.task.needs
    if task.needs_encoder(config, needs):
        yield config.encoder.model
    if needs.router:
        yield method_block(config)["router"]
    for name in needs.rankers:
        if config.rankers[name].get("model"):
            yield config.rankers[name].model
    for role in needs.roles:
        if spec := workdir_lib.trained_spec(config[role]):
            yield spec


def execute(
    planned: PlannedRun,
    workdir: pathlib.Path,
    pool: Pool,
    started: float,
    until: float | None,
    replace: bool = False,
) -> dict[str, Any]:
    """Answers the questions of a planned run; resumes an interrupted run.

    Writes ``predictions.jsonl``, ``timings.jsonl``, ``run.trec`` and ``qrels.trec`` in the order of
    the questions, and ``journal.sqlite`` during the run. With several processes, each answers a
    share of the questions, and the first process writes all results.

    Args:
      planned: the run.
      workdir: an existing folder.
      pool: models and indexes that several runs share.
      started: `time.monotonic()` at the start of the run.
      until: `time.monotonic()` after which no batch starts; None means no limit.
      replace: whether to drop the answers in ``workdir`` that were made with other settings or
        documents, instead of raising an error.

    Returns:
      The scores of ``config.metrics``, such as ``em`` and ``f1``; ``recall`` (None without a
      corpus); ``unscored``: the scores that apply to no question, with reasons; ``granularities``;
      ``calls`` and token counts, in total and by role (``roles``) and stage (``stages``);
      ``seconds``: wall time of all commands in ``workdir``, with loading; if ``config.question`` is
      set, the time of only this question, without loading; ``truncated_texts``: by role, how many
      texts the encoders of this command cut; ``sees_gold``: whether the method reads
      gold annotations; numbers of questions and ``failures``; and the most frequent ``errors``.
      With ``config.question``, also its ``answer``. The result is empty in all processes except the
      first.
    """
    config, run_task = planned.config, planned.task
    before = count_truncated(*pool.encoders())
    rows = min(config.in_flight, len(planned.jobs))
    open_all = functools.partial(opening.open_handlers, config, run_task, rows=rows, pool=pool)
    limits = config.in_flight, started, until
    run = run_jobs(planned.jobs, open_all, workdir, planned.settings, *limits, replace)
    if run is None:
        return {}
    rows = [_row(question, run.records.get(question.id)) for question in run_task.questions]
    write_lines(workdir / PREDICTIONS, map(_prediction_line, rows))
    write_lines(workdir / TIMINGS, map(_timing_line, rows))
    _write_trec(rows, workdir)
    result = _result(planned, rows, workdir, run)
    result["sees_gold"] = run_task.needs.gold
    if result["truncated"]:
        say(
            f"WARNING: {result['truncated']} prompts did not fit the model's context, and their "
            "evidence was shortened, last passages first."
        )
    result["truncated_texts"] = report_truncated(*pool.encoders(), before=before)
    if config.question is not None:
        _show(rows[0], read_passages(workdir / JOURNAL))
        succeeded = rows[0].record is not None and rows[0].record.has_succeeded
        result["answer"] = rows[0].prediction.answer if rows[0].prediction and succeeded else None
    return {**result, **_extraction(workdir), "load_seconds": run.load_seconds}


def _task(config: Config, needs: Needs, pool: Pool) -> Task:
    """Returns the dataset, the questions and the passages to search."""
    question = None if config.question is None else own_question(config.question)
    if config.get("documents"):
        if question is None:
            raise UserError("config.documents needs a question: --config.question='...'.")
        dataset = read_documents(config.documents)
        dataset = load.with_triples(dataset, config.data, on_request=True)
    else:
        parts = {"corpus": needs.corpus, "questions": question is None or needs.demonstrations}
        parts["on_request"] = not task.loads_triples(config)
        key = [config.data.dir, config.data.triples, parts]
        dataset = pool.get("data sets", key, lambda: load.load_dataset(config.data, **parts))
    if question is None:
        return task.select(dataset, config.data, "test", needs)
    return Task(needs, dataset, (question,), build_corpus(dataset, (), WHOLE))


# ---------------------------------------------------------------------------------- the results


class _Row(NamedTuple):
    """A question, its record if it has started, and its prediction, which may be partial."""

    question: Question
    record: Record | None
    prediction: Prediction | None


def _row(question: Question, record: Record | None) -> _Row:
    return _Row(question, record, record.result(Prediction, partial=True) if record else None)


def _prediction_line(row: _Row) -> dict[str, Any]:
    """Returns a line of ``predictions.jsonl``, without wall times, which differ between runs."""
    question, record, prediction = row
    error = record.error if record and record.has_ended else NOT_ANSWERED
    return {
        "id": question.id,
        "answer": prediction.answer if prediction else "",
        "granularity": prediction.granularity if prediction and error is None else None,
        "passages": prediction.passages if prediction else [],
        "sentences": prediction.sentences if prediction else [],
        "triples": [triple[:3] for triple in prediction.triples] if prediction else [],
        "calls": dict(record.calls) if record else {},
        "tokens": {
            "prompt": record.usage.prompt_tokens if record else 0,
            "generated": record.usage.generated_tokens if record else 0,
        },
        "error": error,
    }


def _write_trec(rows: Sequence[_Row], workdir: pathlib.Path) -> None:
    """Writes the rankings and the gold passages of the questions that have ended.

    Without gold passages, or without rankings, a file is not written.
    """
    ended = [row for row in rows if row.record is not None and row.record.has_ended]
    rankings = {q.id: p.passages for q, _, p in ended if p is not None and p.passages}
    gold = [row.question for row in ended if row.question.supporting]
    if rankings:
        trec.write_run(workdir / trec.RUN, rankings, "cirag_jax")
    if gold:
        trec.write_qrels(workdir / trec.QRELS, gold)


def _timing_line(row: _Row) -> dict[str, Any]:
    record = row.record
    return {
        "id": row.question.id,
        "seconds": record.seconds if record else None,  # while other questions run concurrently
        "cached_tokens": record.usage.cached_tokens if record else 0,
    }


def _result(
    planned: PlannedRun, rows: Sequence[_Row], workdir: pathlib.Path, run: RunResult
) -> dict[str, Any]:
    """Returns the command's result over the questions that have ended, including failed ones."""
    ended = [(q, r, p) for q, r, p in rows if r is not None and r.has_ended]
    questions, records = [q for q, _, _ in ended], [r for _, r, _ in ended]
    succeeded = [(p, r) for _, r, p in ended if p is not None and r.has_succeeded]
    predictions, queries = [p for p, _ in succeeded], [r.calls["retrieve"] for _, r in succeeded]
    answered = [AnsweredQuestion(question, prediction) for question, _, prediction in ended]
    config, corpus = planned.config, planned.task.needs.corpus
    scoring = _scoring(config, lambda: read_passages(workdir / JOURNAL))
    measured = metrics.measure(answered, scoring, config.metrics, corpus=corpus)
    granularities = collections.Counter(p.granularity for p in predictions)
    errors = collections.Counter(record.error for record in records if record.error)
    seconds, count = run.seconds, run.num_ended  # earlier questions in the workdir included
    if config.question is not None:
        seconds, count = sum(record.seconds for record in records), len(records)
    return {
        **_scores(measured, corpus),
        "unscored": {
            name: metrics.reason(name, answered, corpus=corpus)
            for name, ratio in measured.items()
            if not ratio.bottom_Q.any()
        },
        "profile": config.profile,
        "recall_per_step": recall_per_step([p for *_, p in ended], questions, config.recall_at),
        "granularities": {name: granularities[name] for name in GRANULARITIES},
        "answer_calls": _mean([sum(bool(a.evidence) for a in p.attempts) for p in predictions]),
        "steps": _mean([len(p.steps) for p in predictions]),
        "histograms": hops.histograms(predictions, queries),
        "graphs": hops.graph_statistics(predictions),
        "parse_errors": _total(p.parse_errors for p in predictions),
        "calls": _total(record.calls for record in records),
        **sum((record.usage for record in records), start=Usage()).counts,
        **cost.summarize(cost.spent_by_role(records)),
        "seconds": seconds,
        "seconds_per_question": seconds / count if count else None,
        "num_questions": len(rows),
        "answered": len(predictions),
        "failures": len(ended) - len(predictions),
        "errors": dict(errors.most_common(5)),
        "complete": run.complete and len(ended) == len(rows),
    }


def _scoring(config: Config, passages: Callable[[], Mapping[str, Passage]] = dict) -> Scoring:
    return Scoring(config.profile, tuple(config.recall_at), passages)


def _scores(measured: Mapping[str, Ratio], corpus: bool) -> dict[str, Any]:
    """Returns the scores; ``recall`` is nested by granularity, and None without a corpus.

    Each granularity has ``num_questions``, the number of questions with gold evidence of this kind.
    The scores of ranked passages are next to their recall.
    """
    granularity_of = {name: granularity for granularity, name in metrics.RECALLS.items()}
    granularity_of |= dict.fromkeys(metrics.RANKING_TITLES, "passage")
    scores: dict[str, Any] = {}
    recalls: dict[str, Any] = dict.fromkeys(metrics.RECALLS)
    for name, ratio in measured.items():
        kind, _, k = name.partition("@")
        count = int(ratio.bottom_Q.sum())
        if kind not in granularity_of:
            scores[name] = ratio.value
        elif count:
            granularity = granularity_of[kind]
            others = recalls[granularity] or {"num_questions": count}
            key = f"recall@{k}" if kind in metrics.RECALLS.values() else name
            recalls[granularity] = {key: ratio.value, **others}
    return {**scores, "recall": recalls if corpus else None}


def _extraction(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns the cost of online extraction, over all questions."""
    paths = sorted(workdir.glob(f"{online.NAME}*.sqlite"))  # one per process
    if not paths:
        return {}
    records = [record for path in paths for record in read_records(path)]
    usage = sum((record.usage for record in records), start=Usage())
    outcomes = [r.result(extraction.EncodedExtraction) for r in records if r.has_ended]
    return {
        "extraction": {
            "passages": len(outcomes),
            "failures": sum(o is None or o.status == "failed" for o in outcomes),
            "prompt_tokens": usage.prompt_tokens,
            "generated_tokens": usage.generated_tokens,
        }
    }


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    empty: collections.Counter[str] = collections.Counter()
    return dict(sum(map(collections.Counter, counts), start=empty))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _show(row: _Row, passages: Mapping[str, Any]) -> None:
    """Prints an answer with its evidence to standard error."""
    if row.record is None:
        return
    if row.prediction is None or not row.record.has_succeeded:
        print(f"failed: {row.record.error}", file=sys.stderr)
        return
    print(console.render(row.prediction, passages), file=sys.stderr)
