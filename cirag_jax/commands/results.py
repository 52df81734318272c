"""The pages of launch/report.py: a run's trace, or several runs side by side and theirs."""

import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from cirag_jax.commands import comparison, difficulty
from cirag_jax.datasets.records import read_lines
from cirag_jax.errors import UserError
from cirag_jax.io import read_object
from cirag_jax.reports import difficulty as difficulty_report
from cirag_jax.reports import results, trace
from cirag_jax.reports.pages import Section
from cirag_jax.runtime import journal
from cirag_jax.runtime.journal import Record
from cirag_jax.types import Config

RESULT = "result.json"
# What becomes of reading a file that something else wrote.
_OTHER = (KeyError, TypeError, ValueError, AttributeError, IndexError)


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
      ``traces`` as `results.write`.

    Raises:
      UserError: a run cannot be read or compared (`comparison.compare`), ``config.difficulty`` is
        no result about these runs, or a page cannot be written.
    """
    if config.run is not None and config.runs is not None:
        raise UserError("config.run and config.runs are two ways to say it; give one of them.")
    inside = _inside(config.run)
    if config.runs is None and not inside:
        if config.difficulty is not None:
            raise UserError("config.difficulty is shown beside several runs; config.run is one.")
        return trace.report(config, workdir)
    folders = inside or comparison.named_folders(config.runs)
    allow_different = config.allow_different or bool(inside)
    runs, result = comparison.measure_runs(config, folders, allow_different)
    records = {run.name: run.records for run in runs}
    more = [] if config.difficulty is None else _difficulty(config.difficulty, records)
    return {**result, **results.write(result, records, workdir, title=config.title, more=more)}


def _inside(folder: str | None) -> list[tuple[str, pathlib.Path]]:
    """Name and workdir of the runs that launch/compare.py left in a folder."""
    path = pathlib.Path(folder or "").expanduser()
    if folder is None or path.is_file() or (path / journal.FILE).exists():
        return []
    return [(file.parent.name, file.parent) for file in sorted(path.glob(f"*/{journal.FILE}"))]


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
