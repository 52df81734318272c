"""Collects a teacher's trajectories over a dataset: the command ``launch/distill.py``."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from cirag_jax import cli
from cirag_jax.commands import backends, identity, opening, task
from cirag_jax.datasets import load
from cirag_jax.distill import teachers, trajectories
from cirag_jax.distill.oracle import AnyGold
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers
from cirag_jax.io import say, write_json
from cirag_jax.llm.types import Usage
from cirag_jax.methods.cirag.method import cirag, construct_and_integrate
from cirag_jax.methods.cirag.settings import PROMPT_FIELDS, CiragConfig
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Extract, Needs, Retrieve
from cirag_jax.runtime.run import run_jobs
from cirag_jax.runtime.scheduler import Handler
from cirag_jax.runtime.store import Journal
from cirag_jax.types import Config, Dataset, Prediction, Question, Trajectory, Triple

# Splits and folds that evaluations report on.
_HELD_OUT = {"split": ("dev", "test"), "fold": ("tune", "test")}


def distill(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Collects trajectories for the questions of ``config``; resumes an interrupted run.

    Writes ``trajectories.jsonl`` in the order of the questions, the sidecar ``trajectories.json``
    and, during the run, ``journal.sqlite``. ``config`` comes from configs/trajectories.py.

    Returns:
      The statistics of the written trajectories (`trajectories.statistics`); ``num_questions``,
      ``without_annotations``, ``unstated_questions`` (the number of annotated questions with a hop
      that no extracted triple of its gold passages supports; None for sentences), ``inserted``
      (with triples, the number of facts inserted by `teachers.missing_facts`; with sentences, the
      number of rounds with a passage inserted by `teachers.gold_passages`), ``sees_gold`` (whether
      the teacher reads gold annotations), ``failures``, ``errors``, ``dropped`` (number of
      trajectories by reason), tokens, ``seconds`` and ``complete``. The result is empty in all
      processes except the first.
    """
    started = time.monotonic()
    settings = _check(config)
    if config.export_prompts is not None:
        return cli.PrintOnly(task.export_prompts(config, settings))
    opening.check(config, settings.needs)
    dataset = load.load_dataset(config.data, on_request=not task.loads_triples(config))
    run_task = task.select(dataset, config.data, "train", settings.needs)
    selected = run_task.questions
    golds: dict[str, Any] = dict(teachers.read_golds(config, dataset, selected, settings))
    by_annotations = config.teacher.kind == "annotations"
    questions = [q for q in selected if not by_annotations or q.id in golds]
    if not questions:
        fields = "supporting_sentences"
        if settings.units != "sentence":
            fields = f"evidences, decomposition, {fields} or supporting"
        raise UserError(
            f"none of the {len(selected)} questions of {dataset.name} has annotations for the "
            f"teacher ({fields})."
        )
    held_out = warn_of_held_out(questions)
    unstated = None
    if settings.units == "triple" and config.data.triples != ONLINE:
        unstated = sum(bool(teachers.unstated_hops(gold)) for gold in golds.values())
    inserted = _InsertedEvidence({}, {}, frozenset())
    if by_annotations:
        inserted, golds = _missing_evidence(questions, golds, dataset, settings)
    needs, config = _prepared(config, settings)
    # The cascade shows whether a language model's trajectory leads to the right answer.
    program = cirag if config.answer and not by_annotations else construct_and_integrate
    own_prompts = task.read_prompts(config, settings)
    run_task = run_task._replace(needs=needs, own_prompts=own_prompts)
    opening.warn_of_own_prompts(config, run_task)
    jobs = [task.job(q, program, settings, own_prompts) for q in questions]
    run_settings = _run_settings(config, run_task)

    def open_all(stack: contextlib.ExitStack, journal: Journal) -> Mapping[type | str, Handler]:
        rows = min(config.in_flight, len(jobs))
        handlers = opening.open_handlers(config, run_task, stack, journal, rows=rows)
        teacher = {"integrator": teachers.AnnotationTeacher(golds)} if by_annotations else {}
        return {**inserted.add_to(handlers), **teacher}

    until = task.deadline(config)
    run = run_jobs(jobs, open_all, workdir, run_settings, config.in_flight, started, until)
    if run is None:
        return {}
    records = list(run.records.values())
    collected = [
        _trajectory(prediction, q, golds.get(q.id), config)
        for q in questions
        if (record := run.records.get(q.id)) and (prediction := record.result(Prediction))
    ]
    kept = trajectories.select(collected, config.keep, config.seed, config.limit, config.min_steps)
    trajectories.write_trajectories(workdir / trajectories.FILE, kept)
    sidecar = _sidecar(config, settings, dataset, run_settings, kept, held_out)
    write_json(workdir / trajectories.SIDECAR, sidecar)
    errors = collections.Counter(record.error for record in records if record.error)
    result = {
        **trajectories.statistics(kept, golds),
        "num_questions": len(questions),
        "without_annotations": len(selected) - len(questions),
        "unstated_questions": unstated,
        "held_out": held_out,
        "inserted": inserted.count(kept, settings),
        "sees_gold": by_annotations,
        "dropped": _dropped(collected, kept, config.keep, config.min_steps),
        "failures": errors.total(),
        "errors": dict(errors.most_common(5)),
        **sum((record.usage for record in records), start=Usage()).counts,
        "seconds": run.seconds,
        "complete": run.complete,
    }
    print(trajectories.table(result), file=sys.stderr)
    return result


# -------------------------------------------------------------------------------- missing evidence


class _InsertedEvidence(NamedTuple):
    """Gold evidence that is added to the retrieved evidence in the annotation teacher's input.

    Attributes:
      facts: facts by passage id.
      passages: passages by question id and query.
      questions: ids of the questions whose evidence is completed.
    """

    facts: Mapping[str, Sequence[Triple]]
    passages: teachers.GoldPassages
    questions: Set[str]

    def add_to(self, handlers: Mapping[type | str, Handler]) -> Mapping[type | str, Handler]:
        """Returns ``handlers`` with the inserted evidence in their responses."""
        if self.facts:
            insert = functools.partial(teachers.insert_facts, self.facts, self.questions)
            handlers = {**handlers, Extract: teachers.InsertingHandler(handlers[Extract], insert)}
        if self.passages:
            insert = functools.partial(teachers.insert_passage, self.passages)
            handlers = {**handlers, Retrieve: teachers.InsertingHandler(handlers[Retrieve], insert)}
        return handlers

    def count(self, kept: Sequence[Trajectory], settings: CiragConfig) -> int:
        """Counts the facts, and the rounds whose query did not retrieve the inserted passage."""
        return sum(map(len, self.facts.values())) + sum(
            passage.id in step.passages[settings.num_passages :]
            for trajectory in kept
            for step in trajectory.steps
            if (passage := self.passages.get(trajectory.question_id, {}).get(step.query))
        )


def _missing_evidence(
    questions: Sequence[Question],
    golds: dict[str, Any],
    dataset: Dataset,
    settings: CiragConfig,
) -> tuple[_InsertedEvidence, dict[str, Any]]:
    """Returns the evidence to insert, and the annotations with the inserted facts.

    Nothing is inserted for held-out questions.
    """
    training = {
        q.id: golds[q.id]
        for q in questions
        if all(getattr(q, k) not in names for k, names in _HELD_OUT.items())
    }
    if settings.units == "sentence":
        passages = teachers.gold_passages(training, dataset.corpus)
        return _InsertedEvidence({}, passages, training.keys()), golds
    facts = teachers.missing_facts(training)
    extended = {
        key: teachers.with_facts(gold, facts, settings.normalization)
        for key, gold in training.items()
    }
    return _InsertedEvidence(facts, {}, training.keys()), golds | extended


# ------------------------------------------------------------------------------------- the config


def _check(config: Config) -> CiragConfig:
    """Returns CIRAG's settings; raises `UserError` for settings that teachers do not support."""
    settings = CiragConfig(**task.plain(config.cirag))
    kind = config.teacher.kind
    check_choice("config.teacher.kind", kind, teachers.KINDS)
    if config.prompt_file is not None and kind == "annotations":
        raise UserError(
            "config.prompt_file is not used with config.teacher.kind=annotations, which has no "
            "language model; unset it."
        )
    if settings.prefilled_headers:
        raise UserError(
            "config.cirag.prefilled_headers=true is not supported: teachers respond in one message."
        )
    if settings.integrator != "model":
        raise UserError(
            f"config.cirag.integrator={settings.integrator} is not supported; set config.teacher."
        )
    check_at_least(0, config, "limit")
    check_at_least(1, config, "cirag.max_steps", "min_steps")  # each round is a decision
    answers.check_profile(config.profile)
    trajectories.check_keep(config.keep)
    if config.keep == "correct_only" and kind != "annotations" and not config.answer:
        raise UserError(
            "config.keep=correct_only needs config.answer=true, because a language model's "
            "trajectory is kept only if its answer is correct."
        )
    if kind == "annotations":
        if settings.units == "triple" and settings.prompt_format != "multi_turn":
            raise UserError(
                f"config.cirag.prompt_format={settings.prompt_format!r} is not supported: the "
                "annotation teacher needs multi_turn for triples; students may use another format."
            )
        if settings.needs.triples and config.triples == ONLINE:
            raise UserError(
                "config.triples=online is not supported: the annotation teacher needs all triples "
                "in advance; extract them first (launch/extract.py)."
            )
    return settings


def _prepared(config: Config, settings: CiragConfig) -> tuple[Needs, Config]:
    """Returns CIRAG's needs with the roles in use, and a config whose integrator is the teacher."""
    roles = () if config.teacher.kind == "annotations" else ("integrator",)
    if roles and config.answer:
        roles = (*roles, "reader")
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.integrator = config.teacher.llm
    return dataclasses.replace(settings.needs, roles=roles), config


def _run_settings(config: Config, run_task: task.Task) -> dict[str, Any]:
    """Returns the identity of a run, with the field names of the user's config."""
    settings = {"teacher.kind": config.teacher.kind, "answer": config.answer}
    for name, value in identity.of_run(config, cirag.__module__, run_task).items():
        prefix, dot, field = name.partition(".")
        settings[f"teacher.llm.{field}" if dot and prefix == "integrator" else name] = value
    return settings


def warn_of_held_out(questions: Sequence[Question]) -> dict[str, int]:
    """Counts the held-out questions, and warns if there are any."""
    counts = {
        f"{field}={name}": sum(getattr(q, field) == name for q in questions)
        for field, names in _HELD_OUT.items()
        for name in names
    }
    counts = {name: count for name, count in counts.items() if count}
    if counts:
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        say(
            f"WARNING: held-out questions become training data ({listed}); do not use them to "
            "evaluate models trained on these trajectories"
        )
    return counts


# ------------------------------------------------------------------------------------ the results


def _trajectory(
    prediction: Prediction, question: Question, gold: AnyGold | None, config: Config
) -> Trajectory:
    steps, solved, teacher = prediction.steps, None, config.teacher.kind
    if teacher == "annotations":
        assert gold is not None
        steps = trajectories.mark_unclear(trajectories.until_second_empty_round(steps), gold)
        solved = gold.is_solved([fact for step in steps for fact in step.kept])
    elif config.answer and question.answers:
        golds = answers.golds_of(question, config.profile)
        solved = bool(answers.exact_match(prediction.answer, golds, config.profile))
    queries, last_query = {step.query for step in steps}, steps[-1].next_query
    end = "stopped"
    if len(steps) < len(prediction.steps):
        end = "in_vain"
    elif last_query is not None:
        is_repeated = config.cirag.on_repeat == "stop" and last_query in queries
        end = "repeat" if is_repeated else "max_steps"
    elif prediction.parse_errors.get("no_decision"):
        end = "no_decision"
    if teacher == "llm":
        teacher = backends.model_name(config.teacher.llm) or config.teacher.llm.backend
    return Trajectory(
        question.id, question.question, teacher, steps, end, solved, prediction.parse_errors
    )


def _dropped(
    collected: Sequence[Trajectory], kept: Sequence[Trajectory], keep: str, min_steps: int
) -> dict[str, int]:
    """Counts the trajectories that are not written, by reason."""
    reasons = collections.Counter(trajectories.drop_reason(t, keep, min_steps) for t in collected)
    num_passed = reasons.pop(None, 0)
    if num_passed > len(kept):
        reasons["limit"] = num_passed - len(kept)
    return dict(sorted((str(reason), count) for reason, count in reasons.items()))


def _sidecar(
    config: Config,
    settings: CiragConfig,
    dataset: Dataset,
    run_settings: Mapping[str, Any],
    kept: Sequence[Trajectory],
    held_out: Mapping[str, int],
) -> dict[str, Any]:
    """Returns the prompt settings and the source of the trajectories."""
    names = (*PROMPT_FIELDS, "num_candidates", "num_passages", "max_steps")
    return {
        **{name: getattr(settings, name) for name in names},
        "encoder": config.encoder.model,
        "triples": " and ".join(opening.extractors_of(config)) or None,
        "dataset": dataset.name,
        "passages": run_settings["passages"],
        "questions": codec.digest(codec.dump([t.question_id for t in kept])),
        "split": config.data.split,
        "fold": config.data.fold,
        "teacher": config.teacher.kind,
        "teachers": sorted({t.teacher for t in kept}),
        "keep": config.keep,
        "min_steps": config.min_steps,
        "seed": config.seed,
        "trajectories": len(kept),
        "held_out": dict(held_out),
    }
