"""Collects training examples for the roles of a method: ``launch/distill.py`` with its config.

The method answers training questions with a teacher in its roles, as in launch/answer.py. The
conversations of the questions with a good outcome become examples (`distill.examples`).
"""

import collections
import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cirag_jax import cli
from cirag_jax.commands import answer, backends, judge, opening, task
from cirag_jax.commands.distill import warn_of_held_out
from cirag_jax.commands.pool import Pool
from cirag_jax.datasets.records import read_lines
from cirag_jax.distill import dualrag_labels
from cirag_jax.distill import examples as examples_lib
from cirag_jax.distill.examples import RoleExample
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.evaluation import answers
from cirag_jax.io import say, write_json
from cirag_jax.methods.common import own_prompts
from cirag_jax.methods.registry import block_name
from cirag_jax.runtime.records import JournalReader
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Config, Prediction, Question
from cirag_jax.validation import check_value


def collect(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Answers the questions of ``config``, and writes the examples; resumes an interrupted run.

    Writes ``examples.jsonl`` in the order of the questions, the sidecar ``examples.json``, and the
    files of launch/answer.py. ``config`` comes from configs/methods, with the block ``examples`` of
    launch/distill.py.

    Returns:
      The result of `answer.execute`; ``examples`` (numbers by role), ``labels`` (numbers by role
      and kind of label), ``dropped_calls`` (numbers by role and reason), ``kept_questions``,
      ``dropped_questions`` (numbers by reason) and ``held_out``. The result is empty in all
      processes except the first.
    """
    started = time.monotonic()
    with Pool() as pool:
        planned = answer.plan_run(config, pool)
        roles = _check(config, planned)
        held_out = warn_of_held_out(planned.task.questions)
        result = answer.execute(planned, workdir, pool, started, task.deadline(config))
        if not result:
            return {}
        questions = planned.task.questions
        with JournalReader(workdir / JOURNAL) as journal:
            predictions = {
                record.id: prediction
                for record in journal.records(question.id for question in questions)
                if (prediction := record.result(Prediction)) is not None
            }
            reasons = _outcomes(config, questions, predictions)
            kept = [question for question in questions if reasons[question.id] is None]
            if config.examples.labels == "dualrag_ft":
                labelled = _labels(config, planned, kept, predictions, pool)
                found = [example for example in labelled if example.role in roles]
                dropped = collections.Counter[tuple[str, str]]()
            else:
                found, dropped = _calls(config, journal, kept, roles)
    source = {"method": config.method, "dataset": planned.task.dataset.name}
    examples = [
        dataclasses.replace(e, source={**source, "teacher": _teacher(config, e.role), **e.source})
        for e in found
    ]
    examples_lib.write_examples(workdir / examples_lib.FILE, examples)
    counts = collections.Counter(example.role for example in examples)
    by_role = {role: counts[role] for role in roles}
    labels = collections.Counter((e.role, e.source["label"]) for e in found if "label" in e.source)
    sidecar = {
        **_prompt_fields(config, planned),
        **source,
        "teachers": {role: _teacher(config, role) for role in roles},
        "split": config.data.split,
        "fold": config.data.fold,
        "keep": config.examples.keep,
        "labels": config.examples.labels,
        "passages": planned.settings.get("passages"),
        "examples": by_role,
        "held_out": held_out,
    }
    write_json(workdir / examples_lib.SIDECAR, sidecar)
    print(_table(by_role, _nested(labels, roles)), file=sys.stderr)
    return {
        **result,
        "examples": by_role,
        "labels": _nested(labels, roles),
        "dropped_calls": _nested(dropped, roles),
        "kept_questions": len(kept),
        "dropped_questions": dict(collections.Counter(filter(None, reasons.values()))),
        "held_out": held_out,
    }


def _check(config: Config, planned: answer.PlannedRun) -> tuple[str, ...]:
    """Checks ``config.examples``; returns the roles to collect."""
    block, available = config.examples, planned.task.needs.roles
    check_value("config.examples.keep", block.keep, examples_lib.Keep)
    check_value("config.examples.labels", block.labels, Literal["teacher", "dualrag_ft"])
    check_at_least(0, config, "examples.found_at")
    if config.question is not None:
        raise UserError("config.question is not supported: examples need a dataset's questions.")
    if (block.keep == "judge") != (block.judgements is not None):
        raise UserError(
            "config.examples.keep=judge and config.examples.judgements need each other: judge this "
            "workdir with configs/judge.py, then run launch/distill.py again with both."
        )
    if block.labels == "dualrag_ft":
        if config.method != "dualrag":
            raise UserError("config.examples.labels=dualrag_ft needs a config of dualrag.")
        dualrag_labels.check(task.method_settings(config))
        available = dualrag_labels.ROLES
    if not block.few_shot and "few_shot" not in config[block_name(config.method)]:
        raise UserError(
            f"config.examples.few_shot=false is not supported: {config.method} has no setting "
            "few_shot, so a student would still be shown worked examples."
        )
    for role in block.roles:
        if role not in available:
            raise UserError(
                f"config.examples.roles: {config.method} has no role {role!r} with the present "
                f"settings; choose from {', '.join(available) or 'none'}."
            )
    if "integrator" in block.roles:
        raise UserError(
            "config.examples.roles: integrators learn from trajectories; use "
            "--config=configs/trajectories.py."
        )
    roles = tuple(block.roles) or tuple(role for role in available if role != "integrator")
    if not roles:
        raise UserError(f"{config.method} has no language model to train.")
    return roles


# ------------------------------------------------------------------------------------ the outcomes


def _outcomes(
    config: Config, questions: Sequence[Question], predictions: Mapping[str, Prediction]
) -> dict[str, str | None]:
    """Returns why each question is dropped, or None if it is kept.

    The reasons are ``failed`` (or not answered yet), ``unknown`` (no annotation or verdict),
    ``wrong`` and ``not_found``.
    """
    block = config.examples
    verdicts = _verdicts(block.judgements, predictions) if block.keep == "judge" else {}

    def reason(question: Question) -> str | None:
        prediction = predictions.get(question.id)
        if prediction is None:
            return "failed"
        if block.keep == "all":
            return None
        if block.keep == "found":
            best = prediction.passages[: block.found_at or None]
            if not question.supporting:
                return "unknown"
            return None if {*question.supporting} <= {*best} else "not_found"
        is_right = verdicts.get(question.id)
        if block.keep == "correct" and question.answers:
            golds = answers.golds_of(question, config.profile)
            is_right = bool(answers.exact_match(prediction.answer, golds, config.profile))
        return "unknown" if is_right is None else None if is_right else "wrong"

    return {question.id: reason(question) for question in questions}


@dataclasses.dataclass(frozen=True)
class _Judgement:
    """A line of configs/judge.py."""

    id: str
    system: str
    answer: str
    judge: bool | None = None


def _verdicts(path: str, predictions: Mapping[str, Prediction]) -> dict[str, bool]:
    """Returns the first judge's verdicts on the answers of this run, by question id."""
    file = pathlib.Path(path).expanduser()
    file = file / judge.FILE if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"{file} does not exist; configs/judge.py writes it.")
    verdicts: dict[str, bool] = {}
    systems = set()
    for place, row in read_lines(file, _Judgement):
        systems.add(row.system)
        prediction = predictions.get(row.id)
        if prediction is None or row.judge is None:
            continue
        if row.answer != prediction.answer:
            raise UserError(
                f"{place}: the answer to {row.id!r} is not the one in this workdir; judge this "
                "workdir again."
            )
        verdicts[row.id] = row.judge
    if len(systems) > 1:
        raise UserError(f"{file} has verdicts on {len(systems)} runs; judge only this workdir.")
    return verdicts


# ------------------------------------------------------------------------------------ the examples


def _calls(
    config: Config, journal: JournalReader, questions: Sequence[Question], roles: Sequence[str]
) -> tuple[list[RoleExample], collections.Counter[tuple[str, str]]]:
    """Returns the teacher's calls as examples, and the dropped calls; see `examples_of`."""
    examples: list[RoleExample] = []
    dropped: collections.Counter[tuple[str, str]] = collections.Counter()
    for question in questions:
        calls = journal.generations(question.id)
        found, reasons = examples_lib.examples_of(calls, roles, config.examples.few_shot)
        examples += found
        dropped.update(reasons)
    return examples, dropped


def _labels(
    config: Config,
    planned: answer.PlannedRun,
    questions: Sequence[Question],
    predictions: Mapping[str, Prediction],
    pool: Pool,
) -> list[RoleExample]:
    """Returns the examples of DualRAG-FT. Questions without gold passages have none."""
    corpus, settings = planned.task.dataset.corpus, task.method_settings(config)
    rounds = {question.id: predictions[question.id].steps for question in questions}
    gold = {q.id: dualrag_labels.gold_passages(q, corpus) for q in questions}
    pairs = {
        (q.id, entity): list(gold[q.id])
        for q in questions
        if gold[q.id]
        for entity in dualrag_labels.entities_of(rounds[q.id])
    }
    ranker = opening.pooled_ranker(config, "passages", pool) if pairs else None
    scored = ranker.score([e for _, e in pairs], list(pairs.values())) if ranker else []
    scores: dict[str, dict[str, dict[str, float]]] = collections.defaultdict(dict)
    for ((question_id, entity), titles), found in zip(pairs.items(), scored, strict=True):
        scores[question_id][entity] = dict(zip(titles, map(float, found), strict=True))
    examples: list[RoleExample] = []
    with own_prompts.active(planned.task.own_prompts):
        for question in questions:
            if gold[question.id]:
                titles = dualrag_labels.Titles(
                    gold[question.id], scores[question.id], settings.min_score
                )
                steps = rounds[question.id]
                examples += dualrag_labels.labels_of(question, steps, titles, corpus)
    without_gold = sum(not passages for passages in gold.values())
    if without_gold:
        say(f"{without_gold} questions have no gold passages, and thus no labels")
    return examples


def _teacher(config: Config, role: str) -> str:
    return backends.model_name(config[role]) or config[role].backend


def _prompt_fields(config: Config, planned: answer.PlannedRun) -> dict[str, Any]:
    """Returns what determines the prompts of a student: the settings of the method."""
    settings = cli.jsonable(task.plain(config[block_name(config.method)]))
    if not config.examples.few_shot or config.examples.labels == "dualrag_ft":
        settings["few_shot"] = False
    own = planned.task.own_prompts
    digests = {role: own_prompts.of_role(own, role) for role in planned.task.needs.roles}
    return {"settings": settings, "own_prompts": {r: own for r, own in digests.items() if own}}


def _nested(
    counts: Mapping[tuple[str, str], int], roles: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Returns role -> kind -> number."""
    return {
        role: {kind: n for (name, kind), n in sorted(counts.items()) if name == role}
        for role in roles
    }


def _table(counts: Mapping[str, int], labels: Mapping[str, Mapping[str, int]]) -> str:
    """Formats the numbers of examples, as in DualRAG's Table 1, with their kinds of labels."""

    def row(role: str) -> str:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in labels.get(role, {}).items())
        return f"  {role.replace('_', ' '):<24}{counts[role]:>9,}  {kinds}".rstrip()

    return "\n".join([*map(row, counts), f"  {'sum':<24}{sum(counts.values()):>9,}"])
