"""Builds reasoning chains with TRACE, KiRAG's training data for the aligner.

The command is ``launch/distill.py --config=configs/chains.py``.
"""

import collections
import functools
import pathlib
import sys
import time
from typing import Any

from cirag_jax.commands import identity, opening, task
from cirag_jax.commands.distill import warn_of_held_out
from cirag_jax.datasets import load
from cirag_jax.datasets.chain_files import FILE, ChainRecord, write_chains
from cirag_jax.errors import UserError
from cirag_jax.evaluation import answers
from cirag_jax.llm.types import Usage
from cirag_jax.methods.baselines.trace import TraceConfig, trace
from cirag_jax.runtime.run import run_jobs
from cirag_jax.types import Config, Prediction, Question


def build(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Builds chains for the questions of ``config``; resumes an interrupted run.

    Writes ``chains.jsonl`` in the order of the questions. A question's line is its most probable
    chain from which the reader, without other evidence, answers correctly (KiRAG, Appendix B.2).
    ``config`` comes from configs/chains.py.

    Returns:
      ``num_questions``, ``without_annotations`` (questions without gold passages or answers, which
      are left out), ``without_triples`` (questions whose gold passages have none),
      ``without_chain`` (other questions for which TRACE built no chain), ``built`` (all chains that
      the reader read), ``kept`` (questions with a correct chain), ``dropped``
      (questions without one), ``kept_by_length`` and ``kept_by_rank`` (numbers of kept chains),
      ``held_out``, ``parse_errors``, ``failures``, ``errors``, tokens, ``seconds`` and
      ``complete``. The result is empty in all processes except the first.
    """
    started = time.monotonic()
    settings = _check(config)
    opening.check(config, settings.needs)
    dataset = load.load_dataset(config.data, on_request=not task.loads_triples(config))
    run_task = task.select(dataset, config.data, "train", settings.needs)
    questions = [q for q in run_task.questions if q.supporting and q.answers]
    if not questions:
        raise UserError(
            f"none of the {len(run_task.questions)} questions of {dataset.name} has gold passages "
            "(supporting) and answers, which chains need."
        )
    held_out = warn_of_held_out(questions)
    jobs = [task.job(question, trace, settings) for question in questions]
    run_settings = identity.of_run(config, trace.__module__, run_task)
    rows = min(config.in_flight, len(jobs))
    open_all = functools.partial(opening.open_handlers, config, run_task, rows=rows)
    until = task.deadline(config)
    run = run_jobs(jobs, open_all, workdir, run_settings, config.in_flight, started, until)
    if run is None:
        return {}
    records = [record for q in questions if (record := run.records.get(q.id))]
    predictions = {r.id: p for r in records if (p := r.result(Prediction)) is not None}
    kept = [
        chain
        for question in questions
        if (prediction := predictions.get(question.id))
        and (chain := first_correct(question, prediction, config.profile))
    ]
    write_chains(workdir / FILE, kept)
    lengths = collections.Counter(len(chain.steps) for chain in kept)
    ranks = collections.Counter(chain.rank for chain in kept)
    found = [p for p in predictions.values() if p.triples]
    without_triples = sum(not _has_triples(p) for p in predictions.values())
    malformed = collections.Counter[str]()
    for prediction in predictions.values():
        malformed.update(prediction.parse_errors)
    errors = collections.Counter(record.error for record in records if record.error)
    result = {
        "num_questions": len(questions),
        "without_annotations": len(run_task.questions) - len(questions),
        "without_triples": without_triples,
        "without_chain": len(predictions) - len(found) - without_triples,
        "built": sum(len(p.steps) for p in found),
        "kept": len(kept),
        "dropped": len(found) - len(kept),
        "kept_by_length": {str(length): lengths[length] for length in sorted(lengths)},
        "kept_by_rank": {str(rank): ranks[rank] for rank in sorted(ranks)},
        "held_out": held_out,
        "parse_errors": dict(sorted(malformed.items())),
        "failures": errors.total(),
        "errors": dict(errors.most_common(5)),
        **sum((record.usage for record in records), start=Usage()).counts,
        "seconds": run.seconds,
        "complete": run.complete,
    }
    print(
        f"{len(kept)} of {len(questions)} questions have a chain from which the reader answers "
        f"correctly; {result['dropped']} have none among their chains, {result['without_chain']} "
        f"have no chain, {result['without_triples']} have no triples.",
        file=sys.stderr,
    )
    return result


def first_correct(question: Question, prediction: Prediction, profile: str) -> ChainRecord | None:
    """Returns the most probable chain from which the reader answered correctly, or None."""
    golds = answers.golds_of(question, profile)
    attempts = enumerate(zip(prediction.steps, prediction.attempts, strict=False))
    for rank, (step, attempt) in attempts:
        if answers.exact_match(attempt.answer, golds, profile):
            return ChainRecord(
                question_id=question.id,
                question=question.question,
                steps=step.kept,
                rank=rank,
                probability=step.scores[0],
                answer=attempt.answer,
            )
    return None


def _has_triples(prediction: Prediction) -> bool:
    counts = prediction.parse_errors
    missing = counts.get("passage_without_triples", 0) + counts.get("passage_not_extracted", 0)
    return missing < len(prediction.steps[0].passages)


def _check(config: Config) -> TraceConfig:
    settings = task.method_settings(config)
    for name, value in (("passages", "gold"), ("evidence", "each")):
        if getattr(settings, name) != value:
            raise UserError(
                f"config.trace.{name}={getattr(settings, name)} is not supported: training chains "
                f"need {value}."
            )
    answers.check_profile(config.profile)
    return settings
