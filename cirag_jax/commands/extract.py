"""Extraction of a corpus: what ``launch/extract.py`` runs.

A program per passage, over the scheduler and the journal of all commands. Block by block, what the
journal holds goes into the store in one transaction and leaves the journal. On a Ray cluster each
block is a shard with a journal of its own, which a worker writes.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import pathlib
import shutil
import sys
import time
import zlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import tqdm

from cirag_jax import processes
from cirag_jax.commands import backends, cluster, task
from cirag_jax.commands.extract_estimate import estimate
from cirag_jax.commands.extract_import import import_openie
from cirag_jax.commands.identity import of_extractor
from cirag_jax.datasets.corpus import WHOLE
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.load import load_dataset, select_corpus, select_questions
from cirag_jax.errors import InUse, UserError, check_at_least, check_choice
from cirag_jax.identity import check_same
from cirag_jax.io import Closing, say
from cirag_jax.llm.types import Usage
from cirag_jax.methods.common import extraction
from cirag_jax.methods.common.extraction import Extraction, ExtractionSettings
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import JournalReader, Record, Totals, typed
from cirag_jax.runtime.run import Runner, Show, progress_bar
from cirag_jax.runtime.scheduler import Handler, Job, Progress
from cirag_jax.runtime.store import JOURNAL, Journal, journal_path
from cirag_jax.triples import store as stores
from cirag_jax.triples.store import TripleStore, content_hash
from cirag_jax.types import Config, Passage

_Block = tuple[Sequence[Passage], Mapping[str, Record]]  # passages, and their programs by name

SHARDS = "shards"  # in a workdir: journals of what workers of a Ray cluster have under way
_REFUSALS = 60  # of a shard's journal, a second each, while another worker may still hold it


def extract_corpus(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Brings ``workdir/triples.sqlite`` up to date with a corpus; resumes what ``workdir`` holds.

    Several processes share the passages by their ids, each with a journal and a store of its own;
    the first merges the stores once all have ended. ``config`` is of configs/extract.py.

    Returns:
        Counts of passages by outcome, failures by cause, malformed answers by kind, triples,
        tokens, seconds, and whether everything is done (``complete``); nothing in all processes
        but the first.
    """
    started = time.monotonic()
    settings = _settings(config)
    index, count = jax.process_index(), jax.process_count()
    on_cluster = cluster.is_chosen(config)
    stores.refuse_earlier(workdir)
    if config.import_openie is not None:
        return _import(config, workdir, started)
    if config.estimate_only:
        return _estimate_only(config, workdir, settings)
    if count > 1 or on_cluster:
        task.refuse_budgets(config)
    paths = [journal_path(workdir, number, count) for number in range(count)]
    parts = [path.with_name(path.name.replace("journal", "triples")) for path in paths]

    def work() -> None:
        identity = _identity(config, settings)
        with (
            _CorpusExtraction(config, settings, identity, paths[index], started) as extracting,
            TripleStore.create(parts[index]) as store,
            CorpusScan(config.data.dir) as corpus,
        ):
            selection = _Selection(
                config, identity, corpus, store, _selected(config), (index, count)
            )
            store.note(extracting.run(selection, store))

    processes.together(work)
    if index:
        return {}
    if count > 1:
        stores.merge(parts, workdir / stores.FILE)
    return _result(workdir, parts, paths)


def _settings(config: Config) -> ExtractionSettings:
    check_at_least(1, config, "entity_tokens", "triple_tokens", "block", "in_flight")
    check_at_least(0, config, "limit", "stop_after_minutes", "min_passages")
    if not 0 <= config.max_empty_share <= 1:
        raise UserError("config.max_empty_share must be between 0 and 1.")
    check_choice("config.retry", config.retry, ("never", "errors", "all"))
    return ExtractionSettings(
        config.entity_tokens,
        config.triple_tokens,
        config.constrained,
        config.grounded,
        config.dialect,
    )


def _identity(config: Config, settings: ExtractionSettings) -> dict[str, Any]:
    """Who extracts: all that decides the triples of a passage."""
    extraction.check_adapter(config.extractor, settings)
    return of_extractor(config.extractor, settings)


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
    selected = select_questions(dataset, data)
    passages = select_corpus(dataset, selected, data).passages
    return frozenset(passage.id for passage in passages)


def _estimate_only(
    config: Config, workdir: pathlib.Path, settings: ExtractionSettings
) -> dict[str, Any]:
    """Reads and changes nothing else."""
    with contextlib.ExitStack() as stack:
        store = rate = None
        if (workdir / stores.FILE).exists():
            store = stack.enter_context(TripleStore.open(workdir))
        if (workdir / JOURNAL).exists():
            with JournalReader(workdir / JOURNAL) as book:
                rate = _rate(book)
        corpus = stack.enter_context(CorpusScan(config.data.dir))
        identity = _identity(config, settings)
        selection = _Selection(config, identity, corpus, store, _selected(config), (0, 1))
        return {**estimate(selection.wanted(), config, settings, rate), "complete": False}


def _import(config: Config, workdir: pathlib.Path, started: float) -> dict[str, Any]:
    if _selected(config) is not None:
        raise UserError("config.import_openie takes the whole file; leave data.corpus.")
    if jax.process_count() > 1:
        raise UserError("config.import_openie runs in one process.")
    path = pathlib.Path(config.import_openie).expanduser()
    with (
        Journal(journal_path(workdir, 0, 1), {"import": str(path)}) as book,
        TripleStore.create(workdir / stores.FILE) as store,
        CorpusScan(config.data.dir) as corpus,
    ):
        imported = import_openie(path, corpus, store, config.block)
        return {
            "passages": len(store),
            **store.counts(),
            **imported,
            "seconds": book.add_seconds(time.monotonic() - started),
            "complete": True,
            "store": str(store.path),
        }


def _result(
    workdir: pathlib.Path, parts: Sequence[pathlib.Path], paths: Sequence[pathlib.Path]
) -> dict[str, Any]:
    """What the command prints: of the whole store, and of this run of every process."""
    runs = collections.Counter()
    for part in parts:
        with TripleStore.open(part) as store:
            runs.update(store.noted())
    totals, seconds = Totals(), 0.0
    for path in paths:
        with JournalReader(path) as book:
            totals, seconds = totals + book.totals(), max(seconds, book.seconds)
    usage = sum(totals.usage.values(), Usage())
    with TripleStore.open(workdir) as store:
        counts, failures = store.counts(), store.failures()
        if failures:
            cause, number = next(iter(failures.items()))
            say(f"{counts['failed']:,} passages failed, {number:,} of them: {cause}")
        return {
            "passages": len(store),
            **counts,
            "failures": failures,
            "parse_errors": store.parse_errors(),
            **{name: runs[name] for name in ("reused", "extracted", "deleted", "left")},
            "calls": totals.calls,
            **usage.tokens,
            "seconds": seconds,
            "complete": not runs["left"],
            "store": str(store.path),
        }


@dataclasses.dataclass(frozen=True)
class _Selection:
    """Which passages of a corpus are in question, and which of them are still to be extracted.

    ``identity`` is who would extract, ``store`` what there is (None: nothing yet); ``only`` are ids
    of the passages in question (None: the whole corpus); ``share`` is the number of this process,
    and of all processes.
    """

    config: Config
    identity: Mapping[str, Any]
    corpus: CorpusScan
    store: TripleStore | None
    only: Collection[str] | None
    share: tuple[int, int]

    def chosen(self) -> Iterator[Passage]:
        """The passages in question, in the corpus's order."""
        index, count = self.share
        chosen = (p for p in self.corpus if self.only is None or p.id in self.only)
        for passage in itertools.islice(chosen, self.config.limit or None):
            # By the id: a corpus that changes leaves a passage with its process.
            if zlib.crc32(passage.id.encode("utf-8", "replace")) % count == index:
                yield passage

    def wanted(self) -> Iterator[Passage]:
        """Those still to be extracted."""
        return filter(self.is_wanted, self.chosen())

    def blocks(self) -> Iterator[tuple[str, list[Passage]]]:
        """The passages still to be extracted, ``config.block`` at a time, and each block's name.

        Passages all of which are new make a block of their own, however many of those before them
        have been done meanwhile: a run that goes on finds it again under its name.
        """
        chosen, size, rest = self.chosen(), self.config.block, list[Passage]()
        for number in itertools.count():
            part = list(itertools.islice(chosen, size))
            wanted = [passage for passage in part if self.is_wanted(passage)]
            if part and len(wanted) == len(part):
                yield f"{number:08d}", part
                continue
            rest += wanted
            if len(rest) >= size or (rest and not part):
                yield f"{number:08d}-rest", rest[:size]
                del rest[:size]
            if not part:
                return

    def is_wanted(self, passage: Passage) -> bool:
        """Whether it is still to be extracted; raises `UserError` as `wanted` does."""
        entry = self.store.entry(passage.id) if self.store else None
        if self.store is None or entry is None or entry.hash != content_hash(passage):
            return True
        if "import" in entry.extractor:  # given by the user: as good as extracted
            return False
        if entry.extractor != self.identity:
            if not self.config.replace:
                remedy = "--config.replace=true extracts again, another --workdir keeps the triples"
                if "extractor" not in entry.extractor:
                    raise UserError(
                        f"{self.store.path} is of an earlier version, which did not note all that "
                        f"decides its triples; {remedy}."
                    )
                check_same(self.store.path, entry.extractor, self.identity, remedy)
            return True
        if self.config.retry == "errors":  # of requests: an unreadable answer would come again
            return bool(entry.cause) and not entry.cause.startswith(extraction.UNREADABLE)
        return self.config.retry == "all" and entry.status == "failed"


class _Shard(NamedTuple):
    """A block of passages for a worker of a Ray cluster.

    ``file`` is its journal's; ``until``, of `time.time`, when no more is asked, if ever.
    """

    name: str
    file: pathlib.Path
    passages: Sequence[Passage]
    until: float | None


class _Worker:
    """Extracts shards, in a process of a Ray cluster."""

    def __init__(self, config: Config, identity: dict[str, Any]):
        """Opens the language model, which must be that of ``identity``."""
        self._config, self._settings, self._identity = config, _settings(config), identity
        remedy = "a worker of the Ray cluster has other software, or another model"
        check_same("the extraction", identity, _identity(config, self._settings), remedy)
        self._handler = GenerateHandler(backends.open_backend(config.extractor), {})

    def __call__(self, shard: _Shard) -> bool:
        """Whether all programs of the shard have ended; its journal has what became of them."""
        with self._open(shard) as runner:
            return runner.run(_jobs(shard.passages, self._settings))

    def _open(self, shard: _Shard) -> Runner:
        """Waits where a worker that is lost, or of a command that was killed, still has it open."""
        for _ in range(_REFUSALS):
            with contextlib.suppress(InUse):
                return self._runner(shard)
        return self._runner(shard)

    def _runner(self, shard: _Shard) -> Runner:
        left = None if shard.until is None else shard.until - time.time()
        return Runner(
            shard.file,
            self._identity,
            lambda *_: {"extractor": self._handler},
            in_flight=self._config.in_flight,
            until=None if left is None else time.monotonic() + left,
            encode=extraction.encode_extraction,
            replace=self._config.replace,
        )


def _rate(book: JournalReader) -> float | None:
    """Passages a second over all runs on a journal."""
    return book.totals().programs / book.seconds if book.seconds else None


def _jobs(passages: Iterable[Passage], settings: ExtractionSettings) -> list[Job]:
    def job(passage: Passage) -> Job:
        name = extraction.program_of(passage)
        return Job(name, {"passage": passage.id}, lambda: extraction.extract(passage, settings))

    return [job(passage) for passage in passages]


class _CorpusExtraction(Closing):
    """The share of one process in an extraction, over its own journal."""

    def __init__(
        self,
        config: Config,
        settings: ExtractionSettings,
        identity: Mapping[str, Any],
        file: pathlib.Path,
        started: float,
    ):
        """Opens the journal ``file``; ``started`` is `time.monotonic()` at the command's start."""
        minutes = config.stop_after_minutes
        self._config, self._settings = config, settings
        self._until = started + 60 * minutes if minutes else None
        self._runner = Runner(
            file,
            identity,
            self._open_handlers,
            in_flight=config.in_flight,
            until=self._until,
            started=started,
            encode=self._encode,
            replace=config.replace,
        )
        self._book = self._runner.book
        self._shards = file.resolve().with_name(SHARDS)
        self._statuses: collections.Counter[str] = collections.Counter()
        self._example = ""  # what a model wrote where there was no triple
        self._before = Progress()  # of earlier blocks

    def close(self) -> None:
        """Closes the model and the journal."""
        self._runner.close()

    def _open_handlers(
        self, stack: contextlib.ExitStack, book: Journal
    ) -> dict[type | str, Handler]:
        spent = sum(book.usage().values(), Usage())
        backend: Any = backends.open_backend(self._config.extractor, spent=spent)
        stack.enter_context(contextlib.closing(backend))
        return {"extractor": GenerateHandler(backend, {})}

    def run(self, selection: _Selection, store: TripleStore) -> dict[str, int]:
        """Extracts what is left; returns how many passages were ``reused``, ``extracted``,
        ``deleted``, ``left``.
        """
        bar = tqdm.tqdm(
            selection.chosen(), desc="corpus", unit=" passages", file=sys.stderr, delay=5
        )
        chosen = sum(1 for _ in bar)
        rate = _rate(self._book)
        wanted = estimate(selection.wanted(), self._config, self._settings, rate)["passages"]
        gone = [name for name in store.passage_ids() if name not in selection.corpus]
        if gone:
            store.commit((), {}, gone)
            say(f"{len(gone):,} passages have left the corpus: their triples are removed")
        if wanted < chosen:
            say(f"{chosen - wanted:,} passages are up to date")
        done = self._extract(selection, store, wanted) if wanted else 0
        if done == wanted:
            self._book.forget([record.id for record in self._book.records()])
            if selection.share == (0, 1):
                self._drop_shards()
        self._runner.seconds()
        counts = {"reused": chosen - wanted, "extracted": done}
        return {**counts, "deleted": len(gone), "left": wanted - done}

    def _extract(self, selection: _Selection, store: TripleStore, wanted: int) -> int:
        """Extracts block by block; returns of how many passages the outcome is stored."""
        done = 0
        with progress_bar(wanted, "passage") as show:
            if cluster.is_chosen(self._config):
                blocks = self._on_cluster(selection, show)
            else:
                blocks = self._here(selection, show)
            with contextlib.closing(blocks):
                for block, records in blocks:
                    store.commit(_stored(block, records), selection.identity)
                    done += len(block)
        return done

    def _here(self, selection: _Selection, show: Show) -> Generator[_Block]:
        """Blocks, the last what has ended of it; what follows one is done once it is stored."""

        def on_progress(progress: Progress, tokens: int) -> None:
            self._check(self._before.failed + progress.failed)
            show(_sum(self._before, progress), tokens)

        passages = selection.wanted()
        while block := list(itertools.islice(passages, self._config.block)):
            jobs = _jobs(block, self._settings)
            names = [job.id for job in jobs]
            for name, outcome in self._book.outcomes(names).items():  # of an earlier run
                self._count(typed(self._book.path, name, outcome, extraction.Outcome))
            complete = self._runner.run(jobs, show=on_progress)
            self._before = _sum(self._before, self._runner.progress)
            self._check(self._before.failed)
            known = self._runner.records(jobs)
            if not complete:
                # What failed is left: it may be of an earlier run, and not asked again.
                known = {name: r for name, r in known.items() if r.outcome is not None}
                block = [p for p in block if extraction.program_of(p) in known]
            yield block, known
            self._book.forget(list(known))
            if not complete:
                return

    def _on_cluster(self, selection: _Selection, show: Show) -> Generator[_Block]:
        """As `_here`, by workers of a Ray cluster; a shard's journal goes once it is stored."""
        config = self._config
        self._shards.mkdir(exist_ok=True)

        def shards() -> Iterator[_Shard]:
            until = None if self._until is None else time.time() + self._until - time.monotonic()
            for name, block in selection.blocks():
                if until is not None and time.time() >= until:
                    return
                yield _Shard(name, self._shards / f"{name}.sqlite", block, until)

        work = functools.partial(_Worker, config, dict(selection.identity))
        on_devices = config.extractor.backend != "openai"
        done = cluster.in_order(work, shards(), config, self._shards, on_devices=on_devices)
        for shard, is_whole in done:
            if not is_whole:
                return
            with JournalReader(shard.file) as book:
                found = {record.id: record for record in book.records()}
                totals = book.totals()
            records = {name: found[name] for name in map(extraction.program_of, shard.passages)}
            self._before = _sum(self._before, self._progress(records, totals))
            self._check(self._before.failed)
            show(self._before, 0)
            yield shard.passages, records
            self._drop(shard.file)

    def _progress(self, records: Mapping[str, Record], totals: Totals) -> Progress:
        """Of a shard; counts its outcomes, too."""
        outcomes = [record.result(extraction.Outcome) for record in records.values()]
        for outcome in filter(None, outcomes):
            self._count(outcome)
        usage = sum(totals.usage.values(), Usage())
        return Progress(
            done=len(records),
            failed=outcomes.count(None),
            calls=totals.calls,
            generated=totals.calls,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
        )

    def _drop_shards(self) -> None:
        """Removes what workers left of blocks that are cut otherwise now; its calls count."""
        for file in sorted(self._shards.glob("*.sqlite")):
            self._drop(file)
        shutil.rmtree(self._shards, ignore_errors=True)

    def _drop(self, file: pathlib.Path) -> None:
        """Removes a shard's journal; its calls count, once, whenever a kill comes."""
        with JournalReader(file) as book:
            name, totals = book.id, book.totals()
        self._book.count(name, totals)
        file.unlink()

    def _encode(self, found: Extraction) -> dict[str, Any]:
        self._count(found)
        return extraction.encode_extraction(found)

    def _count(self, found: Extraction | extraction.Outcome) -> None:
        self._statuses[found.status] += 1
        self._example = self._example or found.answer

    def _check(self, failed_requests: int) -> None:
        """Raises `UserError` where too many passages gave no triple."""
        total = self._statuses.total() + failed_requests
        without, limit = total - self._statuses["ok"], self._config.max_empty_share
        if total < max(self._config.min_passages, 1) or without <= limit * total:
            return
        empty, said = self._statuses["empty"], " ".join(self._example.split())[:120]
        raise UserError(
            f"{without} of {total} passages gave no triple ({without - empty} failed, {empty} "
            f"empty), more than config.max_empty_share={limit:g} allows; the first of them got the "
            f"answer {said!r}; use a better model (with --config.replace=true), or raise the "
            "share: what is answered is kept and will not be asked again."
        )


def _stored(block: Iterable[Passage], records: Mapping[str, Record]) -> list[stores.Record]:
    """The store's records of passages, from the journal's."""
    found = ((passage, records[extraction.program_of(passage)]) for passage in block)
    return [extraction.stored(p, r.result(extraction.Outcome), r.error) for p, r in found]


def _sum(one: Progress, other: Progress) -> Progress:
    return Progress(*map(operator.add, dataclasses.astuple(one), dataclasses.astuple(other)))
