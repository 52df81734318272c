"""The pages of launch/report.py: a run's trace, or several runs side by side and theirs."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cirag_jax.commands import compare, comparison, difficulty
from cirag_jax.datasets.records import read_lines
from cirag_jax.errors import InUse, UserError
from cirag_jax.io import read_object, say
from cirag_jax.reports import difficulty as difficulty_report
from cirag_jax.reports import results, trace
from cirag_jax.reports.pages import Section
from cirag_jax.runtime.records import JournalReader, Record
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Config

CONFIG, RESULT = "config.json", "result.json"
# What becomes of reading a file that something else wrote.
_OTHER = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


class _Graded(msgspec.Struct):
    """What is used of a line of ``difficulty.jsonl``."""

    id: str


def report(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes ``trace.html`` of the run ``config.run``, or the result page of several runs.

    Args:
      config: of configs/report.py.
      workdir: an existing folder.

    Returns:
      Of one run as `trace.report`; of several as `comparison.measure_runs`, with ``page`` and
      ``traces`` as `results.write`; of those in a folder the ``unfinished``, which are not shown.
    """
    if config.run is not None and config.runs is not None:
        raise UserError("config.run and config.runs are two ways to say it; give one of them.")
    inside = _runs_inside(config.run)
    if config.runs is None and not inside:
        if config.difficulty is not None:
            raise UserError("config.difficulty is shown beside several runs; config.run is one.")
        return trace.report(config, workdir)
    unfinished: dict[str, str] = {}
    if inside:
        unfinished = _unfinished(inside)
        folders = [(name, path) for name, path in inside if name not in unfinished]
        if not folders:
            raise UserError(f"no run in {config.run} has ended: {_list_unfinished(unfinished)}.")
    else:
        folders = comparison.named_folders(config.runs)
    runs, result = comparison.measure_runs(
        config,
        folders,
        config.allow_different or bool(inside),
        _recorded_repeats(config.run, inside),
    )
    records = {run.name: run.records for run in runs}
    more = [] if config.difficulty is None else _difficulty(config.difficulty, records)
    note = f"Unfinished and not shown: {_list_unfinished(unfinished)}." if unfinished else ""
    shown = results.write(result, records, workdir, title=config.title, note=note, more=more)
    if note:
        say(note)
    return {**result, **shown, **({"unfinished": unfinished} if inside else {})}


def _runs_inside(folder: str | None) -> list[tuple[str, pathlib.Path]]:
    """Name and workdir of the runs of launch/compare.py in a folder, in the order it was told.

    One that it has not begun is among them.
    """
    path = pathlib.Path(folder or "").expanduser()
    if folder is None or path.is_file() or (path / JOURNAL).exists():
        return []
    found = [file.parent.name for file in sorted(path.glob(f"*/{JOURNAL}"))]
    config = read_object(path / CONFIG, optional=True) if found else {}
    methods = config.get("methods")
    told = compare.read_entries(methods, None) if isinstance(methods, str | list) else ()
    names = dict.fromkeys([*(entry.name for entry in told), *found])
    return [(name, path / name) for name in names]


def _recorded_repeats(folder: str | None, inside: Sequence[Any]) -> int | None:
    """The seeds that launch/compare.py ran of each run in a folder, where it says so."""
    found = read_object(pathlib.Path(folder or "").expanduser() / CONFIG, optional=True)
    repeats = found.get("repeats") if inside else None
    return repeats if isinstance(repeats, int) else None


def _unfinished(inside: Sequence[tuple[str, pathlib.Path]]) -> dict[str, str]:
    """How far those runs are that have not ended, by name.

    A journal knows only the questions that were begun: where its run says nothing itself, one that
    knows fewer than another is not at its end.
    """
    counts = {name: _question_counts(folder) for name, folder in inside}
    whole = max(known for known, _ in counts.values())
    found = {}
    for name, folder in inside:
        known, ended = counts[name]
        says = read_object(folder / RESULT, optional=True).get("complete", known == whole)
        if ended is None:
            found[name] = "at work"
        elif not says or ended < known:
            found[name] = f"{ended} questions so far"
    return found


def _question_counts(folder: pathlib.Path) -> tuple[int, int | None]:
    """Questions that a run has begun, and that have ended; None: it is at work."""
    try:
        file = folder / JOURNAL
        if not file.is_file():
            return 0, 0
        with JournalReader(file) as book:
            return book.counts()
    except InUse:
        return 0, None


def _list_unfinished(unfinished: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({how_far})" for name, how_far in unfinished.items())


def _difficulty(folder: str, records: Mapping[str, Mapping[str, Record]]) -> list[Section]:
    """What configs/difficulty.py left in ``folder``, about some of these runs and questions."""
    path = pathlib.Path(folder).expanduser()
    found, questions = read_object(path / RESULT), next(iter(records.values()))
    try:
        sections, named = difficulty_report.sections(found), set(found["systems"])
    except _OTHER:
        raise UserError(f"{path / RESULT} is no result of configs/difficulty.py.") from None
    graded = {row.id for _, row in read_lines(path / difficulty.QUESTIONS, _Graded)}
    for what, ids in {"run": named - records.keys(), "question": graded - questions.keys()}.items():
        if ids:
            raise UserError(f"{path} is about a {what} that is not on the page: {min(ids)}.")
    return sections
