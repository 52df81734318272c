"""What commands share that run programs over the questions of a data set."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from cirag_jax import config_files, processes
from cirag_jax.datasets import jsonl, load
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.methods.common.extraction import ONLINE
from cirag_jax.methods.common.reading import ANSWER_TOKENS
from cirag_jax.methods.registry import block_name, find_method, method_block
from cirag_jax.runtime import codec, journal, journal_reader
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.journal import Journal
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.requests import Needs, Program
from cirag_jax.runtime.scheduler import Handler, Job, Progress, Scheduler, progress_bar
from cirag_jax.triples.normalization import normalise
from cirag_jax.types import Config, Dataset, Prediction, Question

_CONFIGS = config_files.CONFIGS / "methods"
_NOTE_SECONDS = 5.0  # Between two notes of the time.

OpenHandlers = Callable[[contextlib.ExitStack, Journal], Mapping[type | str, Handler]]


def method_config(method: str, preset: str = "", values: Sequence[str] = ()) -> Config:
    """The config of a method, locked.

    Args:
      method: its name, for ``configs/methods/METHOD.py``, or the path of a config file (``.py``).
      preset: "" is the paper's setting.
      values: ``KEY=VALUE`` each, as ``--config.KEY=VALUE`` on the command line.
    """
    file = pathlib.Path(method) if method.endswith(".py") else _CONFIGS / f"{method}.py"
    if method == "blocks" or not file.is_file():
        known = ", ".join(sorted(f.stem for f in _CONFIGS.glob("*.py") if f.stem != "blocks"))
        raise UserError(
            f"method={method!r} is unknown; there are {known}, or give the path of a config file."
        )
    overrides = [f"--config.{value}" for value in values]
    return config_files.load_config(f"{file}:{preset}" if preset else str(file), overrides)


class Task(NamedTuple):
    """The questions of a run and the passages to search.

    Attributes:
      needs: of the method with its settings.
      dataset: with the triples of its passages.
      questions: those that are answered.
      corpus: the passages to search; none where none are needed.
    """

    needs: Needs
    dataset: Dataset
    questions: Sequence[Question]
    corpus: Corpus


def roles_of(config: Config, needs: Needs) -> tuple[str, ...]:
    """Returns the roles of a run: the method's, and the extractor where it extracts online."""
    online = needs.triples and config.triples == ONLINE
    return (*needs.roles, "extractor") if online else needs.roles


def asks_schemas(needs: Needs, *roles: str) -> bool:
    """Returns whether one of the roles is asked for JSON of a schema."""
    return any("json_schema" in needs.abilities.get(role, ()) for role in roles)


def needs_encoder(config: Config, needs: Needs) -> bool:
    """Returns whether something embeds with ``config.encoder``."""
    rankers = (config.rankers[name] for name in needs.rankers)
    embeds = needs.demonstrations or (needs.index and config.retriever.kind != "bm25")
    return embeds or any(block.kind == "bi_encoder" and not block.model for block in rankers)


def demonstrations(task: Task) -> tuple[Question, ...]:
    """Returns the training questions to show: none that is answered or held out."""
    ids = {question.id for question in task.questions}
    texts = {normalise(question.question, "unicode") for question in task.questions}
    return tuple(
        question
        for question in task.dataset.questions
        if question.split == "train"
        and question.fold in (None, "train")
        and question.id not in ids
        and normalise(question.question, "unicode") not in texts
    )


def most_tokens(config: Config, role: str) -> int:
    """Returns the most tokens that a role may write; a reader's default depends on its format."""
    most: int = config[role].max_tokens
    if most or role != "reader":
        return most
    own = method_block(config)
    return ANSWER_TOKENS[own.get("reader_format", "documents")]


def select(dataset: Dataset, data: Config, default_split: str, needs: Needs) -> Task:
    """The questions that ``data`` (``config.data``) selects and the passages they may find.

    ``default_split`` is that of the built-in dataset, where ``data.split`` is unset. Where
    ``needs`` has no corpus there are no passages.
    """
    data = data.copy_and_resolve_references()
    if not data.dir and not data.split:
        data.split = default_split
    questions = load.select_questions(dataset, data)
    if not needs.corpus:
        return Task(needs, dataset, questions, Corpus("none", ()))
    return Task(needs, dataset, questions, load.select_corpus(dataset, questions, data))


def job(
    question: Question, program: Callable[[Question, Any], Program[Prediction]], settings: Any
) -> Job:
    """A program about a question; the annotations are the journal's, not the program's to see."""
    given = question if settings.needs.gold else Question(question.id, question.question, ())
    annotated = json.loads(codec.dump(jsonl.question_record(question)))
    return Job(question.id, annotated, lambda: program(given, settings))


def method_settings(config: Config) -> Any:
    """The settings of ``config.method``, of its own block of a config of configs/methods."""
    method, block = find_method(config.method), block_name(config.method)
    if block not in config:
        raise UserError(f"config.method={config.method!r} needs its settings, config.{block}.")
    try:
        return method.config(**plain(config[block]))
    except UserError as error:
        raise UserError(f"config.{block}: {error}") from None


def plain(config: Config) -> dict[str, Any]:
    """A block of a config as keyword arguments of a frozen dataclass."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.to_dict().items()}


class Run(NamedTuple):
    """What a workdir holds once `run` has ended.

    Attributes:
      records: of the jobs that were started, by id.
      complete: whether all jobs have ended.
      load_seconds: until its first request.
      seconds: wall time of all runs on this workdir.
    """

    records: Mapping[str, Record]
    complete: bool
    load_seconds: float
    seconds: float


def run(
    config: Config,
    open_handlers: OpenHandlers,
    jobs: Sequence[Job],
    workdir: pathlib.Path,
    settings: Mapping[str, Any],
    started: float,
    until: float | None,
) -> Run | None:
    """Runs what is left of ``jobs``, recorded in ``workdir/journal.sqlite``.

    Several processes deal the jobs out among themselves by their ids, each with a journal of its
    own, which the first merges once all have ended.

    Args:
      config: with ``in_flight``.
      open_handlers: opens what answers; given a stack that closes it, and the journal.
      jobs: programs whose result is a `Prediction`.
      workdir: where the journals lie.
      settings: what decides the results, see `Journal`.
      started: `time.monotonic()` at the command's start.
      until: `time.monotonic()` after which no batch is begun, see `deadline`; None: never.

    Returns:
      None in all processes but the first.
    """
    index, count = jax.process_index(), jax.process_count()
    if count > 1:
        refuse_budgets(config)

    def work() -> tuple[bool, float]:
        own, ended = _share(jobs, index, count), (True, 0.0)
        with Journal(journal.share(workdir, index, count), settings) as book:
            known, clock = book.outcomes(), _Clock(book, started)
            if any(job.id not in known for job in own):
                ended = _run(config, open_handlers, own, book, clock, until)
            clock.note()
        return ended

    complete, load_seconds = processes.together(work)
    if index:
        return None
    if count > 1:
        parts = [journal.share(workdir, number, count) for number in range(count)]
        journal.merge(parts, workdir / journal.FILE)
    wanted, records = {job.id for job in jobs}, journal_reader.read_records(workdir / journal.FILE)
    _, seconds = journal_reader.read_totals(workdir / journal.FILE)
    known = {record.id: record for record in records if record.id in wanted}
    complete = complete and all(job.id in known and known[job.id].has_ended for job in jobs)
    return Run(known, complete, load_seconds, seconds)


def _share(jobs: Sequence[Job], index: int, count: int) -> list[Job]:
    """The jobs of one of the processes: whatever else is asked, a question stays with its own."""
    return [
        dataclasses.replace(job, place=place)
        for place, job in enumerate(jobs)
        if int(codec.digest(job.id)[:8], 16) % count == index
    ]


def deadline(config: Config) -> float | None:
    """When ``config.stop_after_minutes``, counted from now, are over."""
    check_at_least(0, config, "stop_after_minutes")
    if not config.stop_after_minutes:
        return None
    return time.monotonic() + 60 * config.stop_after_minutes


def refuse_budgets(config: Config) -> None:
    """Raises `UserError` where a budget is set, which several processes cannot share."""
    for name, block in config.items():
        if isinstance(block, ConfigDict) and block.get("budget_tokens") is not None:
            raise UserError(f"config.{name}.budget_tokens holds in one process, not over several.")


class _Clock:
    """Notes the wall time of a run in its journal, now and then, so that a kill loses little."""

    def __init__(self, book: Journal, started: float):
        self._book, self._noted = book, started

    def note(self, every: float = 0.0) -> None:
        """Adds what has passed, if that is as many seconds."""
        now = time.monotonic()
        if now - self._noted >= every:
            self._book.add_seconds(now - self._noted)
            self._noted = now


def _run(
    config: Config,
    open_handlers: OpenHandlers,
    jobs: Sequence[Job],
    book: Journal,
    clock: _Clock,
    until: float | None,
) -> tuple[bool, float]:
    """Whether everything ended, and the seconds until the first request."""
    start = time.monotonic()
    check_at_least(1, config, "in_flight")
    with contextlib.ExitStack() as stack:
        handlers = open_handlers(stack, book)
        with progress_bar(len(jobs)) as show:

            def go_on(progress: Progress, new_tokens: int = 0) -> None:
                clock.note(_NOTE_SECONDS)
                show(progress, new_tokens)

            scheduler = Scheduler(
                handlers,
                book,
                in_flight=config.in_flight,
                encode=codec.encode,
                on_progress=go_on,
            )
            for handler in set(handlers.values()):
                if isinstance(handler, GenerateHandler):
                    handler.on_tokens = lambda tokens: go_on(scheduler.progress, tokens)
            load_seconds = time.monotonic() - start
            book.add_seconds(load_seconds, loading=True)
            return scheduler.run(jobs, deadline=until), load_seconds
