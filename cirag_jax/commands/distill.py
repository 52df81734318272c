"""Trajectories of a teacher over a data set: what ``launch/distill.py`` runs."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.commands import backends, identity, opening, task
from cirag_jax.datasets import load
from cirag_jax.distill import teachers, trajectories
from cirag_jax.distill.oracle import AnyGold
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.evaluation import answers
from cirag_jax.io import write_json
from cirag_jax.llm.types import Usage
from cirag_jax.methods.cirag.method import cirag, construct_and_integrate
from cirag_jax.methods.cirag.settings import PROMPT_FIELDS, CiragConfig
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.requests import Extract, Needs, Program, Retrieve
from cirag_jax.runtime.run import run_jobs
from cirag_jax.runtime.scheduler import Handler
from cirag_jax.runtime.store import Journal
from cirag_jax.types import Config, Dataset, Prediction, Question, Trajectory, Triple

_HELD_OUT = {"split": ("dev", "test"), "fold": ("tune", "test")}


def distill(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Collects trajectories for the questions that ``config`` (configs/trajectories.py) selects;
    resumes where it stopped.

    Writes ``trajectories.jsonl`` in the order of the questions, the sidecar ``trajectories.json``
    and, while it runs, ``journal.sqlite``.

    Returns:
      The statistics of what was written (`trajectories.statistics`); ``num_questions``,
      ``without_annotations``, ``inserted`` (facts, see `teachers.missing_facts`; of sentences the
      passages that rounds were given, see `teachers.gold_passages`), ``sees_gold``
      (whether a teacher did), ``failures``, ``errors``, ``dropped`` (reason -> trajectories),
      tokens, ``seconds`` and ``complete``; nothing in all processes but the first.
    """
    started = time.monotonic()
    settings = _check(config)
    opening.check(config, settings.needs)
    dataset = load.load_dataset(config.data)
    chosen = task.select(dataset, config.data, "train", settings.needs)
    selected = chosen.questions
    golds: dict[str, Any] = dict(teachers.read_golds(config, dataset, selected, settings))
    kind, share = config.teacher.kind, config.teacher.share
    teacher_of = {
        q.id: teachers.assign(q, q.id in golds, kind, share, config.seed) for q in selected
    }
    questions = [q for q in selected if teacher_of[q.id] == "llm" or q.id in golds]
    if not questions:
        fields = "supporting_sentences"
        if settings.units != "sentence":
            fields = f"evidences, decomposition, {fields} or supporting"
        raise UserError(
            f"none of the {len(selected)} questions of {dataset.name} has annotations to teach "
            f"from: {fields}."
        )
    held_out = _warn_of_held_out(questions)
    insertions = _Insertions({}, {})
    if config.teacher.insert_missing:
        insertions, golds = _insertions(questions, golds, teacher_of, dataset, settings)
    needs, config = _prepared(config, settings)
    jobs = [task.job(q, _program(teacher_of[q.id], config.answer), settings) for q in questions]
    chosen = chosen._replace(needs=needs)
    bound = _settings(config, chosen)

    def open_all(stack: contextlib.ExitStack, book: Journal) -> Mapping[type | str, Handler]:
        at_once = min(config.in_flight, len(jobs))
        handlers = opening.open_handlers(config, chosen, book, stack, rows=at_once)
        return _with_teachers(config, insertions.into(handlers), golds, teacher_of)

    until = task.deadline(config)
    run = run_jobs(jobs, open_all, workdir, bound, config.in_flight, started, until)
    if run is None:
        return {}
    records = list(run.records.values())
    ended = ((q, r.result(Prediction)) for q in questions if (r := run.records.get(q.id)))
    found = [
        _trajectory(prediction, q, teacher_of[q.id], golds.get(q.id), config)
        for q, prediction in ended
        if prediction is not None
    ]
    kept = trajectories.select(found, config.keep, config.seed, config.limit, config.min_steps)
    trajectories.write_trajectories(workdir / trajectories.FILE, kept)
    sidecar = _sidecar(config, settings, dataset, bound, kept, held_out)
    write_json(workdir / trajectories.SIDECAR, sidecar)
    result = {
        **trajectories.statistics(kept, golds),
        "num_questions": len(questions),
        "without_annotations": len(selected) - len(questions),
        "held_out": held_out,
        "inserted": insertions.number(kept, settings),
        "sees_gold": kind != "llm",
        "dropped": _dropped(found, kept, config.keep, config.min_steps),
        **_usage(records),
        "seconds": run.seconds,
        "complete": run.complete,
    }
    print(trajectories.table(result), file=sys.stderr)
    return result


# ----------------------------------------------------------------------------------- the insertions


class _Insertions(NamedTuple):
    """What a teacher is given beside what is found: facts by passage, or passages by query."""

    facts: Mapping[str, Sequence[Triple]]
    passages: teachers.GoldPassages

    def into(self, handlers: Mapping[type | str, Handler]) -> Mapping[type | str, Handler]:
        """The handlers, which insert."""
        if self.facts:
            insert = functools.partial(teachers.insert_facts, self.facts)
            handlers = {**handlers, Extract: teachers.InsertingHandler(handlers[Extract], insert)}
        if self.passages:
            insert = functools.partial(teachers.insert_passage, self.passages)
            handlers = {**handlers, Retrieve: teachers.InsertingHandler(handlers[Retrieve], insert)}
        return handlers

    def number(self, kept: Sequence[Trajectory], settings: CiragConfig) -> int:
        """Facts, and rounds to which a passage was given that their query had not retrieved."""
        return sum(map(len, self.facts.values())) + sum(
            passage.id in step.passages[settings.num_passages :]
            for trajectory in kept
            for step in trajectory.steps
            if (passage := self.passages.get(trajectory.question_id, {}).get(step.query))
        )


def _insertions(
    questions: Sequence[Question],
    golds: dict[str, Any],
    teacher_of: Mapping[str, str],
    dataset: Dataset,
    settings: CiragConfig,
) -> tuple[_Insertions, dict[str, Any]]:
    """What questions that nobody evaluates on are given, and all annotations with such facts."""
    chosen = {
        q.id: golds[q.id]
        for q in questions
        if q.id in golds and all(getattr(q, k) not in names for k, names in _HELD_OUT.items())
    }
    if settings.units == "sentence":
        taught = {k: gold for k, gold in chosen.items() if teacher_of[k] == "annotations"}
        return _Insertions({}, teachers.gold_passages(taught, dataset.corpus)), golds
    missing = teachers.missing_facts(chosen)
    known = {
        key: teachers.with_facts(gold, missing, settings.normalization)
        for key, gold in chosen.items()
    }
    return _Insertions(missing, {}), golds | known


# ------------------------------------------------------------------------------------- the config


def _check(config: Config) -> CiragConfig:
    """CIRAG's settings; refuses what no teacher can do before anything is opened."""
    settings = CiragConfig(**task.plain(config.cirag))
    kind = config.teacher.kind
    check_choice("config.teacher.kind", kind, teachers.KINDS)
    if settings.prefilled_headers:
        raise UserError(
            "config.cirag.prefilled_headers=true: a teacher writes its decision in one piece."
        )
    if settings.integrator != "model":
        raise UserError(f"config.cirag.integrator={settings.integrator}: config.teacher decides.")
    if not 0 <= config.teacher.share <= 1:
        raise UserError("config.teacher.share must lie in [0, 1].")
    check_at_least(0, config, "limit")
    check_at_least(1, config, "cirag.max_steps", "min_steps")  # a teacher decides in rounds
    answers.check_profile(config.profile)
    trajectories.check_keep(config.keep)
    if config.keep == "correct_only" and kind != "annotations" and not config.answer:
        raise UserError(
            "config.keep=correct_only needs config.answer=true: a language model's trajectory is "
            "known to be right by the answer that is read from it."
        )
    if kind != "llm":
        if settings.units == "triple" and settings.prompt_format != "multi_turn":
            raise UserError(
                f"config.cirag.prompt_format={settings.prompt_format!r}: of triples the annotation "
                "teacher reads the multi_turn format alone; a student may be trained on another."
            )
        if settings.keep_above:
            raise UserError(
                f"config.cirag.keep_above={settings.keep_above}: the annotation teacher has no "
                "probabilities; choose by them when the student is asked."
            )
        if settings.needs.triples and config.triples == ONLINE:
            raise UserError(
                "config.triples=online: the annotation teacher compares with triples that are "
                "there beforehand; extract them first (launch/extract.py)."
            )
    return settings


def _prepared(config: Config, settings: CiragConfig) -> tuple[Needs, Config]:
    """CIRAG's needs with the roles that are asked; the config in which the teacher integrates."""
    roles = () if config.teacher.kind == "annotations" else ("integrator",)
    if roles and config.answer:
        roles = (*roles, "reader")
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.integrator = config.teacher.llm
    return dataclasses.replace(settings.needs, roles=roles), config


def _settings(config: Config, chosen: task.Task) -> dict[str, Any]:
    """What decides the trajectories of a run, named as the user's config names it."""
    found = identity.of_run(config, cirag.__module__, chosen)
    own = {f"teacher.{k}": config.teacher[k] for k in ("kind", "insert_missing", "share")}
    own["answer"] = config.answer
    return own | {
        f"teacher.llm.{name[11:]}" if name.startswith("integrator.") else name: value
        for name, value in found.items()
    }


def _program(teacher: str, answer: bool) -> Callable[..., Program[Prediction]]:
    """The loop, with the cascade where the answer shows whether a trajectory is right."""
    return cirag if answer and teacher == "llm" else construct_and_integrate


def _with_teachers(
    config: Config,
    handlers: Mapping[type | str, Handler],
    golds: Mapping[str, AnyGold],
    teacher_of: Mapping[str, str],
) -> dict[type | str, Handler]:
    if config.teacher.kind == "llm":
        return dict(handlers)
    own = teachers.AnnotationTeacher(golds)
    if config.teacher.kind == "annotations":
        return {**handlers, "integrator": own}
    model = handlers["integrator"]
    mixture = teachers.Mixture({"annotations": own, "llm": model}, teacher_of.__getitem__)
    return {**handlers, "integrator": mixture, "teacher": model}  # "teacher": shown in progress


def _warn_of_held_out(questions: Sequence[Question]) -> dict[str, int]:
    """Counts questions that evaluation reports on; says so where there are any."""
    counts: dict[str, int] = {}
    for field, names in _HELD_OUT.items():
        for name in names:
            count = sum(getattr(q, field) == name for q in questions)
            if count:
                counts[f"{field}={name}"] = count
    if counts:
        told = ", ".join(f"{count} of {name}" for name, count in counts.items())
        print(
            f"WARNING: questions that are held out become training data: {told}; a student "
            "trained on them must not be evaluated on them",
            file=sys.stderr,
        )
    return counts


# ------------------------------------------------------------------------------------ the results


def _trajectory(
    prediction: Prediction, question: Question, teacher: str, gold: AnyGold | None, config: Config
) -> Trajectory:
    """The trajectory of an ended program."""
    steps, solved = prediction.steps, None
    if teacher == "annotations":
        assert gold is not None
        steps = trajectories.mark_unclear(trajectories.until_second_empty_round(steps), gold)
        solved = gold.is_solved([fact for step in steps for fact in step.kept])
    elif config.answer and question.answers:
        right = answers.exact_match(prediction.answer, question.answers, config.profile)
        solved = bool(right)
    asked, last = {step.query for step in steps}, steps[-1].next_query
    end = "stopped"
    if len(steps) < len(prediction.steps):
        end = "in_vain"
    elif last is not None:
        end = "repeat" if config.cirag.on_repeat == "stop" and last in asked else "max_steps"
    elif prediction.parse_errors.get("no_decision"):
        end = "no_decision"
    name = teacher
    if teacher == "llm":
        name = backends.model_name(config.teacher.llm) or config.teacher.llm.backend
    return Trajectory(
        question.id, question.question, name, steps, end, solved, prediction.parse_errors
    )


def _dropped(
    found: Sequence[Trajectory], kept: Sequence[Trajectory], keep: str, min_steps: int
) -> dict[str, int]:
    """Why trajectories were not written -> how many."""
    why = collections.Counter(trajectories.drop_reason(t, keep, min_steps) for t in found)
    passed = why.pop(None, 0)
    if passed > len(kept):
        why["limit"] = passed - len(kept)
    return dict(sorted((str(reason), count) for reason, count in why.items()))


def _usage(records: Sequence[Record]) -> dict[str, Any]:
    usage = sum((record.usage for record in records), start=Usage())
    errors = collections.Counter(r.error for r in records if r.error)
    return {
        "failures": errors.total(),
        "errors": dict(errors.most_common(5)),
        **usage.tokens,
    }


def _sidecar(
    config: Config,
    settings: CiragConfig,
    dataset: Dataset,
    bound: Mapping[str, Any],
    kept: Sequence[Trajectory],
    held_out: Mapping[str, int],
) -> dict[str, Any]:
    """How trajectories were rendered, and of what they are."""
    names = (*PROMPT_FIELDS, "num_candidates", "num_passages", "max_steps")
    return {
        **{name: getattr(settings, name) for name in names},
        "dataset": dataset.name,
        "passages": bound["passages"],
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
