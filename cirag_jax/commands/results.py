"""The command ``launch/report.py``: pages of a run, of several runs, or of a step's rollouts."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cirag_jax.commands import compare, comparison, difficulty
from cirag_jax.datasets.records import read_lines
from cirag_jax.errors import InUse, UserError
from cirag_jax.io import read_object, say
from cirag_jax.llm.types import Usage
from cirag_jax.reports import difficulty as difficulty_report
from cirag_jax.reports import results, rollouts, trace
from cirag_jax.reports.pages import Section
from cirag_jax.runtime.records import JournalReader, Record
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.training import rewards
from cirag_jax.types import Config, Prediction, Question

CONFIG, RESULT = "config.json", "result.json"
# Errors from reading a result of another command.
_WRONG_FORMAT = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


class _Graded(msgspec.Struct):
    """A line of ``difficulty.jsonl``; only the id is read."""

    id: str


def report(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes ``trace.html`` of the run ``config.run``, or the result page of several runs.

    ``config`` comes from configs/report.py.

    Returns:
      For ``config.rollouts``, the result of `report_rollouts`. For one run, the result of
      `trace.report`. For several runs, the results of
      `comparison.measure_runs` and `results.write`, and the ``unfinished`` runs, which are not on
      the page.
    """
    if sum(config[name] is not None for name in ("run", "runs", "rollouts")) > 1:
        raise UserError(
            "config.run, config.runs and config.rollouts are alternatives; set only one."
        )
    if config.rollouts is not None:
        return report_rollouts(config, workdir)
    inside = _runs_inside(config.run)
    if config.runs is None and not inside:
        if config.difficulty is not None:
            raise UserError("config.difficulty needs several runs; set config.runs.")
        return trace.report(config, workdir)
    unfinished: dict[str, str] = {}
    if inside:
        unfinished = _unfinished(inside)
        folders = [(name, path) for name, path in inside if name not in unfinished]
        if not folders:
            raise UserError(f"no run in {config.run} is complete: {_list_unfinished(unfinished)}.")
    else:
        folders = comparison.named_folders(config.runs)
    runs, result = comparison.measure_runs(
        config,
        folders,
        config.allow_different or bool(inside),
        _recorded_repeats(config.run) if inside else None,
    )
    records = {run.name: run.records for run in runs}
    more = [] if config.difficulty is None else _difficulty(config.difficulty, records)
    note = f"Unfinished and not shown: {_list_unfinished(unfinished)}." if unfinished else ""
    pages = results.write(result, records, workdir, title=config.title, note=note, more=more)
    if note:
        say(note)
    return {**result, **pages, **({"unfinished": unfinished} if inside else {})}


def report_rollouts(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes ``rollouts.html`` of a step of GRPO; see `reports.rollouts`.

    Returns:
      ``page`` (path), ``num_questions`` and ``num_rollouts``.
    """
    path = pathlib.Path(config.rollouts).expanduser()
    shown = []
    with JournalReader(path) as journal:
        role = journal.settings.get("role")
        if role is None:
            raise UserError(
                f"{path} is not the journal of a step; choose a file in the folder rollouts/ of "
                "configs/grpo.py."
            )
        passages = journal.passages()
        for record in journal.records():
            question = record.input_as(Question)
            prediction = record.result(Prediction)
            turns = [turn for turn in journal.generations(record.id) if turn.request.role == role]
            values = {}
            if prediction is not None:
                usage = record.roles[role].usage if role in record.roles else Usage()
                rollout = rewards.Rollout(
                    question,
                    prediction,
                    usage.generated_tokens,
                    record.calls["retrieve"],
                    config.profile,
                )
                values = rewards.all_of(rollout)
            shown.append(rollouts.ShownRollout(question, prediction, values, turns, record.error))
    page = workdir / rollouts.PAGE
    rollouts.write_page(page, config.title or f"rollouts, {path.stem}", shown, passages)
    return {
        "page": str(page),
        "num_questions": len({each.question.id for each in shown}),
        "num_rollouts": len(shown),
    }


def _runs_inside(folder: str | None) -> list[tuple[str, pathlib.Path]]:
    """Returns the runs of launch/compare.py in a folder, in the order of ``config.methods``.

    Runs that have not started are included.
    """
    path = pathlib.Path(folder or "").expanduser()
    if folder is None or path.is_file() or (path / JOURNAL).exists():
        return []
    folders = [file.parent.name for file in sorted(path.glob(f"*/{JOURNAL}"))]
    config = read_object(path / CONFIG, optional=True) if folders else {}
    methods = config.get("methods")
    entries = compare.read_methods(methods, None) if isinstance(methods, str | list) else ()
    names = dict.fromkeys([*(entry.name for entry in entries), *folders])
    return [(name, path / name) for name in names]


def _recorded_repeats(folder: str | None) -> int | None:
    """Returns the number of seeds per run of launch/compare.py, or None if it is not recorded."""
    config = read_object(pathlib.Path(folder or "").expanduser() / CONFIG, optional=True)
    repeats = config.get("repeats")
    return repeats if isinstance(repeats, int) else None


def _unfinished(inside: Sequence[tuple[str, pathlib.Path]]) -> dict[str, str]:
    """Returns the progress of each unfinished run, by name.

    Without a result file, a run is unfinished if another has started more questions.
    """
    counts = {name: _question_counts(folder) for name, folder in inside}
    total = max(started for started, _ in counts.values())
    progress = {}
    for name, folder in inside:
        started, ended = counts[name]
        is_complete = read_object(folder / RESULT, optional=True).get("complete", started == total)
        if ended is None:
            progress[name] = "running"
        elif not is_complete or ended < started:
            progress[name] = f"{ended} questions so far"
    return progress


def _question_counts(folder: pathlib.Path) -> tuple[int, int | None]:
    """Returns the numbers of started and ended questions; (0, None) for a run in progress."""
    try:
        file = folder / JOURNAL
        if not file.is_file():
            return 0, 0
        with JournalReader(file) as journal:
            return journal.counts()
    except InUse:
        return 0, None


def _list_unfinished(unfinished: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({progress})" for name, progress in unfinished.items())


def _difficulty(folder: str, records: Mapping[str, Mapping[str, Record]]) -> list[Section]:
    """Returns the page sections for a result of configs/difficulty.py about these runs."""
    path = pathlib.Path(folder).expanduser()
    result, questions = read_object(path / RESULT), next(iter(records.values()))
    try:
        sections, systems = difficulty_report.sections(result), set(result["systems"])
    except _WRONG_FORMAT:
        raise UserError(f"{path / RESULT} is not a result of configs/difficulty.py.") from None
    graded = {row.id for _, row in read_lines(path / difficulty.QUESTIONS, _Graded)}
    unknown = {"run": systems - records.keys(), "question": graded - questions.keys()}
    for kind, names in unknown.items():
        if names:
            raise UserError(f"{path} is about a {kind} that is not on the page: {min(names)}.")
    return sections
