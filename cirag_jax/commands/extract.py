"""Extraction of a corpus: what ``launch/extract.py`` runs.

Block by block: the programs of a block's passages run through the scheduler, every response is
journalled, the block's segment is committed to the store, its journal rows are dropped. Blocks
follow the order of the passages, so a run that was killed gives the bytes of one that was not.
"""

import collections
import contextlib
import hashlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tqdm

from cirag_jax.commands import backends
from cirag_jax.commands.extract_estimate import Estimate, Workload, estimate, parameters
from cirag_jax.commands.extract_plan import RETRIES, Plan
from cirag_jax.datasets.corpus import WHOLE, build_corpus
from cirag_jax.datasets.corpus_scan import CorpusScan, open_corpus
from cirag_jax.datasets.load import load_dataset, select_questions
from cirag_jax.errors import UserError
from cirag_jax.io import say
from cirag_jax.llm.types import Backend, Usage
from cirag_jax.methods import extraction
from cirag_jax.methods.extraction import Extraction, ExtractionSettings
from cirag_jax.runtime import journal
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.journal import Journal
from cirag_jax.runtime.requests import Program, RequestError
from cirag_jax.runtime.scheduler import Job, Progress, Scheduler
from cirag_jax.triples import openie
from cirag_jax.triples.store import FOLDER, TripleStore, batches, content_hash
from cirag_jax.triples.store_writer import StoreWriter
from cirag_jax.triples.usage_log import FILE as USAGE
from cirag_jax.triples.usage_log import UsageLog
from cirag_jax.types import Config, Passage


def extract_corpus(config: Config, workdir: Path) -> dict[str, Any]:
    """Brings ``workdir/triples`` up to date with a corpus; goes on with what ``workdir`` holds.

    Args:
        config: Of configs/extract.py.
        workdir: An existing folder.

    Returns:
        Counts of passages by outcome, failures by cause, malformed answers by kind, triples,
        tokens, seconds, and whether everything is done (``complete``).

    Raises:
        UserError: The config, the corpus, the model or ``workdir`` cannot be used as given, too
            many passages give no triple, or the disk is full.
    """
    begun = time.monotonic()
    settings = _settings(config)
    with contextlib.ExitStack() as stack:
        corpus = open_corpus(config.data.dir, stack)
        only = _selected(config)
        if config.import_openie is not None:
            if only is not None:
                raise UserError("config.import_openie takes the whole file; leave data.corpus.")
            return _import(config, workdir, corpus, begun)
        model, backend = _model(config, stack)
        identity = extraction.extractor_identity(config.extractor, model, settings)
        if config.estimate_only:
            return _estimate_only(config, workdir, corpus, only, identity, settings)
        bound = {
            **identity,
            "entity_tokens": settings.entity_tokens,
            "triple_tokens": settings.triple_tokens,
        }
        book = stack.enter_context(Journal(workdir / journal.FILE, bound))
        store = stack.enter_context(StoreWriter.open(workdir / FOLDER))
        log = UsageLog(workdir / USAGE)
        run = _Run(config, settings, identity, corpus, only, store, book, log)
        complete = run.prepare()
        if run.left:
            if backend is None:
                backend = _open(config, run.spent, stack)
            complete = run.extract(backend, begun)
        seconds = book.add_seconds(time.monotonic() - begun)
        return run.result(complete, seconds)


def _settings(config: Config) -> ExtractionSettings:
    for name in ("entity_tokens", "triple_tokens", "block", "in_flight"):
        if config[name] < 1:
            raise UserError(f"config.{name} must be at least 1.")
    for name in ("limit", "stop_after_minutes", "min_passages"):
        if config[name] < 0:
            raise UserError(f"config.{name} must not be negative.")
    if not 0 <= config.max_empty_share <= 1:
        raise UserError("config.max_empty_share must be between 0 and 1.")
    if config.retry not in RETRIES:
        raise UserError(f"config.retry={config.retry!r} must be one of {', '.join(RETRIES)}.")
    return ExtractionSettings(
        config.entity_tokens, config.triple_tokens, config.constrained, config.grounded
    )


def _selected(config: Config) -> Collection[str] | None:
    """Ids of the passages that ``config.data`` leaves of the corpus; None: all of them."""
    data = config.data
    if data.corpus == WHOLE:
        named = [name for name in ("split", "fold", "setting", "limit") if data[name]]
        if named:
            raise UserError(
                f"config.data.{named[0]} selects questions; config.data.corpus=selected_questions "
                "extracts the passages of their contexts."
            )
        return None
    dataset = load_dataset(data)
    passages = build_corpus(dataset, select_questions(dataset, data), data.corpus).passages
    return frozenset(passage.id for passage in passages)


def _model(config: Config, stack: contextlib.ExitStack) -> tuple[str, Backend | None]:
    """The model's name; a server that has to be asked for it is opened."""
    name = backends.model_name(config.extractor)
    if name is not None:
        return name, None
    backend: Any = _open(config, Usage(), stack)
    return backend.config.model, backend


def _open(config: Config, spent: Usage, stack: contextlib.ExitStack) -> Backend:
    backend = backends.open_backend(config.extractor, spent=spent)
    return stack.enter_context(contextlib.closing(backend))


def _estimate_only(
    config: Config,
    workdir: Path,
    corpus: CorpusScan,
    only: Collection[str] | None,
    identity: Mapping[str, Any],
    settings: ExtractionSettings,
) -> dict[str, Any]:
    """Reads and changes nothing else."""
    log = UsageLog(workdir / USAGE)
    with contextlib.ExitStack() as stack:
        store = None
        if (workdir / FOLDER).is_dir():
            store = stack.enter_context(TripleStore.open(workdir / FOLDER))
        work = Workload(settings)
        for passage, need in _plan(config, store, identity, only).needs(corpus.check()):
            if need != "none":
                work.add(passage)
    found = _estimated(config, work, log)
    return {
        "passages": found.passages,
        "prompt_tokens": found.prompt_tokens,
        "generated_tokens": found.generated_tokens,
        "cost": found.cost,
        "seconds": found.seconds,
        "complete": False,
    }


def _plan(
    config: Config,
    store: TripleStore | None,
    identity: Mapping[str, Any],
    only: Collection[str] | None,
) -> Plan:
    return Plan(store, identity, config.retry, config.replace, config.limit, only)


def _estimated(config: Config, work: Workload, log: UsageLog) -> Estimate:
    size = 0.0
    model = backends.model_name(config.extractor)
    if config.extractor.backend != "openai" and model is not None:
        size = parameters(extraction.weight_files(model))
    found = estimate(work, config.extractor, size, log.rate)
    say(f"estimate: {found}")
    return found


def _import(config: Config, workdir: Path, corpus: CorpusScan, begun: float) -> dict[str, Any]:
    path = Path(config.import_openie).expanduser()
    # The journal is the lock of a workdir.
    with (
        Journal(workdir / journal.FILE, {"import": str(path)}) as book,
        StoreWriter.open(workdir / FOLDER) as store,
    ):
        imported = openie.import_openie(path, corpus, store, config.block)
        seconds = book.add_seconds(time.monotonic() - begun)
        return {
            "passages": len(store),
            **store.counts(),
            **imported,
            "seconds": seconds,
            "complete": True,
            "store": str(store.folder),
        }


# ------------------------------------------------------------------------------------------- a run


class _Run:
    """One extraction over one corpus."""

    def __init__(
        self,
        config: Config,
        settings: ExtractionSettings,
        identity: Mapping[str, Any],
        corpus: CorpusScan,
        only: Collection[str] | None,
        store: StoreWriter,
        book: Journal,
        log: UsageLog,
    ):
        self._config, self._settings, self._identity = config, settings, identity
        self._corpus, self._store, self._book, self._log = corpus, store, book, log
        self._plan = _plan(config, store, identity, only)
        self._tally = _Tally(config.max_empty_share, config.min_passages)
        self._work = Workload(settings)
        self._reused = self._deleted = self._done = self._retried = 0
        self._known = 0  # passages of the block that the journal had answered before

    @property
    def left(self) -> int:
        """Passages still to be extracted."""
        return self._work.passages - self._done

    @property
    def spent(self) -> Usage:
        """What counts against a budget: earlier blocks, and what the journal holds of the next."""
        return sum((record.usage for record in self._book.records()), self._log.total)

    def prepare(self) -> bool:
        """Reads the corpus once: checks it, counts what is left, drops what it lacks.

        Returns:
            Whether nothing is left.
        """
        with tqdm.tqdm(unit=" passages", desc="corpus", file=sys.stderr, delay=5) as bar:
            checked = self._counted(self._corpus.check(), bar)
            for passage, need in self._plan.needs(checked):
                self._reused += need == "none"
                self._retried += need == "retry"
                if need != "none":
                    self._work.add(passage)
            for _ in checked:  # those beyond the limit belong to the corpus, too
                pass
        gone = list(self._corpus.missing(self._store.passage_ids()))
        if gone:
            self._deleted = self._store.delete(gone)
            say(f"{self._deleted:,} passages have left the corpus: their triples are removed")
        if self._reused:
            say(f"{self._reused:,} passages are up to date")
        return not self.left

    @staticmethod
    def _counted(passages: Iterator[Passage], bar: Any) -> Iterator[Passage]:
        for passage in passages:
            bar.update()
            yield passage

    def extract(self, backend: Backend, begun: float) -> bool:
        """Extracts what is left; returns whether all of it was."""
        minutes = self._config.stop_after_minutes
        deadline = begun + 60 * minutes if minutes else None
        _estimated(self._config, self._work, self._log)
        handler = GenerateHandler(backend, {})
        with _progress_bar(self._work.passages) as bar:
            scheduler = Scheduler(
                {"extractor": handler},
                self._book,
                in_flight=self._config.in_flight,
                encode=extraction.encode_extraction,
                on_progress=lambda progress: self._on_progress(progress, bar),
            )
            handler.on_tokens = bar.count_tokens
            for block in self._blocks():
                if not self._extract_block(block, scheduler, deadline):
                    return False
        self._book.forget([record.id for record in self._book.records()])
        return True

    def _on_progress(self, progress: Progress, bar: "_ProgressBar") -> None:
        self._tally.check()
        answers = max(2 * progress.done, 2 * self._known + progress.generated + progress.replayed)
        bar.show(2 * self._done + answers, self._tally, progress)

    def _blocks(self) -> Iterator[list[Passage]]:
        """What is left, in the corpus's order; what failed before comes first.

        So the blocks of passages that were never tried are the same in every run, and what fails
        in this one is not tried again in it.
        """
        for kind in ("retry", "extract") if self._retried else ("extract",):
            wanted = (p for p, need in self._plan.needs(self._corpus) if need == kind)
            yield from batches(wanted, self._config.block)

    def _extract_block(
        self, block: Sequence[Passage], scheduler: Scheduler, deadline: float | None
    ) -> bool:
        started = time.monotonic()
        jobs = {job.id: (job, passage) for job, passage in map(self._job, block)}
        outcomes = self._book.outcomes()
        known = [outcomes[name] for name in jobs if name in outcomes]
        for outcome in known:
            self._tally.add(outcome["status"], outcome["answer"])
        self._known = len(known)
        if not scheduler.run([job for job, _ in jobs.values()], deadline=deadline):
            return False
        self._tally.check()
        self._commit(jobs, time.monotonic() - started)
        self._done += len(block)
        return True

    def _job(self, passage: Passage) -> tuple[Job, Passage]:
        digest = content_hash(passage, self._identity).hex()
        job = Job(
            f"{passage.id}@{digest[:16]}",  # a changed passage is another program
            {"passage": passage.id},
            lambda: _watched(passage, self._settings, self._tally),
        )
        return job, passage

    def _commit(self, jobs: Mapping[str, tuple[Job, Passage]], seconds: float) -> None:
        known = {record.id: record for record in self._book.records() if record.id in jobs}
        records, usage, calls = [], Usage(), 0
        for name, (_, passage) in jobs.items():
            found = known[name]
            digest = content_hash(passage, self._identity)
            records.append(extraction.stored(passage, digest, found.outcome, found.error))
            usage += found.usage
            calls += found.calls["generate"]
        block = hashlib.sha256("\n".join(jobs).encode()).hexdigest()[:16]
        self._log.add(block, len(jobs), calls, usage, seconds)
        self._store.commit(records, self._identity)
        self._book.forget(list(jobs))

    def result(self, complete: bool, seconds: float) -> dict[str, Any]:
        """What the command prints."""
        counts, failures = self._store.counts(), self._store.failures()
        if failures:
            cause, number = next(iter(failures.items()))
            say(f"{counts['failed']:,} passages failed, {number:,} of them: {cause}")
        total = self.spent
        return {
            "passages": len(self._store),
            **counts,
            "failures": dict(failures),
            "problems": dict(self._store.problems()),
            "reused": self._reused,
            "extracted": self._done,
            "deleted": self._deleted,
            "left": self.left,
            "calls": self._log.calls,
            "prompt_tokens": total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "generated_tokens": total.generated_tokens,
            "cost": total.cost,
            "seconds": seconds,
            "complete": complete,
            "store": str(self._store.folder),
        }


def _watched(
    passage: Passage, settings: ExtractionSettings, tally: "_Tally"
) -> Program[Extraction]:
    try:
        found = yield from extraction.extract(passage, settings)
    except RequestError as error:
        tally.add("failed", str(error))
        raise
    tally.add(found.status, found.answer)
    return found


class _Tally:
    """Outcomes of this run's passages; stops one that goes nowhere."""

    def __init__(self, max_empty_share: float, min_passages: int):
        self._limit, self._least = max_empty_share, max(min_passages, 1)
        self.counts: collections.Counter[str] = collections.Counter()
        self._example = ""

    def add(self, status: str, answer: str) -> None:
        self.counts[status] += 1
        self._example = self._example or answer

    def check(self) -> None:
        """Raises `UserError` where too many passages gave no triple."""
        total = self.counts.total()
        without = total - self.counts["ok"]
        if total < self._least or without <= self._limit * total:
            return
        said = " ".join(self._example.split())[:120]
        raise UserError(
            f"{without} of {total} passages gave no triple ({self.counts['failed']} failed, "
            f"{self.counts['empty']} empty), more than config.max_empty_share={self._limit:g} "
            f"allows; the first of them got the answer {said!r}; use a better model, or raise the "
            "share: what is answered is kept and will not be asked again."
        )


class _ProgressBar:
    """Answers (two a passage), their rate and the time left, tokens, outcomes and cost."""

    def __init__(self, bar: Any):
        self._bar = bar
        self._tokens = self._before = 0  # of the handler's current call, and of those before it

    def count_tokens(self, tokens: int) -> None:
        """Takes the tokens that the backend's current call has generated so far."""
        if tokens < self._tokens:
            self._before += self._tokens
        self._tokens = tokens
        self._bar.set_postfix_str(f"{self._before + tokens:,} tokens", refresh=False)
        self._bar.update(0)

    def show(self, answers: int, tally: _Tally, progress: Progress) -> None:
        """Shows what there is."""
        parts = [f"{tally.counts[name]} {name}" for name in ("ok", "empty", "failed")]
        if progress.cost:
            parts.append(f"cost {progress.cost:.2f}")
        self._bar.set_description_str(", ".join(parts), refresh=False)
        self._bar.update(answers - self._bar.n)


@contextlib.contextmanager
def _progress_bar(passages: int) -> Iterator[_ProgressBar]:
    with tqdm.tqdm(
        total=2 * passages,
        unit=" answers",
        file=sys.stderr,
        mininterval=0.5 if sys.stderr.isatty() else 15,
        smoothing=0,
    ) as bar:
        yield _ProgressBar(bar)
