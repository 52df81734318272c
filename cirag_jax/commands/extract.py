"""Extraction of triples from a corpus: the command ``launch/extract.py``.

Each passage is extracted by one program of the scheduler. After each block of passages, one
transaction adds the results to the triple store; the journal then drops them. On a Ray cluster,
each block has a separate journal, which a worker writes.
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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import tqdm

from cirag_jax import cli, processes
from cirag_jax.commands import backends, cluster, task
from cirag_jax.commands.extract_estimate import estimate, estimate_only, measured_rate
from cirag_jax.commands.extract_import import export_triples, import_triples
from cirag_jax.commands.extract_selection import Selection, selected_passages
from cirag_jax.commands.identity import of_extractor
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.errors import InUse, UserError, check_at_least, check_choice
from cirag_jax.identity import check_same
from cirag_jax.io import Closing, say
from cirag_jax.llm.types import Usage
from cirag_jax.methods.common import extraction, own_prompts
from cirag_jax.methods.common.extraction import Extraction, ExtractionSettings
from cirag_jax.methods.common.own_prompts import OwnPrompts
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import JournalReader, Record, Totals, convert
from cirag_jax.runtime.run import Runner, Show, progress_bar
from cirag_jax.runtime.scheduler import Handler, Job, Progress
from cirag_jax.runtime.store import Journal, journal_path
from cirag_jax.triples import store as stores
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Config, Passage, UnitInterval
from cirag_jax.validation import check_value

_Block = tuple[Sequence[Passage], Mapping[str, Record]]  # passages, and records by program name

SHARDS = "shards"  # in a workdir: the journals of workers of a Ray cluster
_RETRIES = 60  # one per second, while another worker has a shard's journal open


def extract_corpus(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Extracts triples of new and changed passages to ``triples.sqlite``; resumes interrupted runs.

    ``config`` comes from configs/extract.py. Several processes divide the passages by id. Each
    process has its own journal and store, and the first process merges the stores at the end.

    Returns:
        Counts of passages by outcome, failures by cause, malformed answers by kind, triples,
        tokens, seconds, and ``complete``. Empty in all processes except the first.
    """
    started = time.monotonic()
    settings = _settings(config)
    index, count = jax.process_index(), jax.process_count()
    on_cluster = cluster.is_chosen(config)
    stores.reject_old_format(workdir)
    if config.export_prompts is not None:
        file, dialect = config.export_prompts, config.dialect
        return cli.PrintOnly(own_prompts.export_file(file, lambda: extraction.render(dialect)))
    if config.import_openie is not None and config.export_openie is not None:
        raise UserError("config.import_openie and config.export_openie are alternatives.")
    if config.export_openie is not None:
        return export_triples(config, workdir)
    if config.import_openie is not None:
        return import_triples(config, workdir, started)
    if config.estimate_only:
        identity = _identity(config, settings, _own_prompts(config))
        return estimate_only(config, workdir, settings, identity)
    if count > 1 or on_cluster:
        task.refuse_budgets(config)
    paths = [journal_path(workdir, number, count) for number in range(count)]
    parts = [path.with_name(path.name.replace("journal", "triples")) for path in paths]

    # Read once: an edit during the run changes nothing, and workers need no copy of the file.
    prompts = processes.together(lambda: _own_prompts(config))
    identity = processes.together(lambda: _identity(config, settings, prompts))
    processes.check_equal(identity)

    def work() -> None:
        with (
            _CorpusExtraction(
                config, settings, prompts, identity, paths[index], started
            ) as extraction_run,
            TripleStore.create(parts[index]) as store,
            CorpusScan(config.data.dir) as corpus,
        ):
            selection = Selection(
                config, identity, corpus, store, selected_passages(config), (index, count)
            )
            store.set_run_counts(extraction_run.run(selection, store))

    processes.together(work)
    if index:
        return {}
    if count > 1:
        stores.merge(parts, workdir / stores.FILE)
    return _result(workdir, parts, paths)


def _settings(config: Config) -> ExtractionSettings:
    check_at_least(1, config, "entity_tokens", "triple_tokens", "block", "in_flight")
    check_at_least(0, config, "limit", "stop_after_minutes", "min_passages")
    check_value("config.max_empty_share", config.max_empty_share, UnitInterval)
    check_choice("config.retry", config.retry, ("never", "errors", "all"))
    return ExtractionSettings(
        config.entity_tokens,
        config.triple_tokens,
        config.constrained,
        config.grounded,
        config.dialect,
    )


def _identity(config: Config, settings: ExtractionSettings, prompts: OwnPrompts) -> dict[str, Any]:
    """Checks the adapter and returns the identity of the extractor."""
    extraction.check_adapter(config.extractor, settings)
    with own_prompts.active(prompts):
        return of_extractor(config.extractor, settings)


def _own_prompts(config: Config) -> OwnPrompts:
    if config.prompt_file is None:
        return {}  # `NONE` cannot be pickled, for workers.
    return own_prompts.read(
        config.prompt_file, lambda: extraction.render(config.dialect), "extract.py"
    )


def _result(
    workdir: pathlib.Path, parts: Sequence[pathlib.Path], paths: Sequence[pathlib.Path]
) -> dict[str, Any]:
    """Returns the command's result: counts of the complete store and of all processes."""
    runs = collections.Counter()
    for part in parts:
        with TripleStore.open(part) as store:
            runs.update(store.run_counts())
    totals, seconds = Totals(), 0.0
    for path in paths:
        with JournalReader(path) as journal:
            totals, seconds = totals + journal.totals(), max(seconds, journal.seconds)
    usage = sum(totals.usage.values(), Usage())
    with TripleStore.open(workdir) as store:
        counts, failures = store.counts(), store.failures()
        if failures:
            cause, number = next(iter(failures.items()))
            say(f"{counts['failed']:,} passages failed, {number:,} of them with: {cause}")
        return {
            "passages": len(store),
            **counts,
            "failures": failures,
            "parse_errors": store.parse_errors(),
            **{name: runs[name] for name in ("reused", "extracted", "deleted", "left")},
            "calls": totals.calls,
            **usage.counts,
            "seconds": seconds,
            "complete": not runs["left"],
            "store": str(store.path),
        }


class _Shard(NamedTuple):
    """A block of passages for a worker of a Ray cluster.

    ``file`` is the block's journal. After ``until`` (`time.time`), no more requests are sent.
    """

    name: str
    file: pathlib.Path
    passages: Sequence[Passage]
    until: float | None


class _Worker:
    """Extracts triples of shards, in a process of a Ray cluster."""

    def __init__(self, config: Config, prompts: OwnPrompts, identity: dict[str, Any]):
        """Loads the language model and checks that it has the given identity."""
        self._config, self._settings, self._identity = config, _settings(config), identity
        self._prompts = prompts
        remedy = "a worker of the Ray cluster has different software or another model"
        here = _identity(config, self._settings, prompts)
        check_same("the extraction", identity, here, remedy)
        self._handler = GenerateHandler(backends.open_backend(config.extractor), {})

    def __call__(self, shard: _Shard) -> bool:
        """Extracts triples into the shard's journal; returns whether all programs have ended."""
        with self._open(shard) as runner:
            return runner.run(_jobs(shard.passages, self._settings, self._prompts))

    def _open(self, shard: _Shard) -> Runner:
        """Opens the journal; retries while a lost worker or a killed command still has it open."""
        for _ in range(_RETRIES):
            with contextlib.suppress(InUse):
                return self._runner(shard)
        return self._runner(shard)

    def _runner(self, shard: _Shard) -> Runner:
        until = None if shard.until is None else time.monotonic() + shard.until - time.time()
        return Runner(
            shard.file,
            self._identity,
            lambda *_: {"extractor": self._handler},
            in_flight=self._config.in_flight,
            until=until,
            encode=extraction.encode_extraction,
            replace=self._config.replace,
        )


def _jobs(
    passages: Iterable[Passage], settings: ExtractionSettings, prompts: OwnPrompts
) -> list[Job]:
    def job(passage: Passage) -> Job:
        return Job(
            extraction.program_name(passage),
            {"passage": passage.id},
            lambda: own_prompts.run_with(prompts, extraction.extract(passage, settings)),
        )

    return [job(passage) for passage in passages]


class _CorpusExtraction(Closing):
    """The extraction of one process's share, with its journal."""

    def __init__(
        self,
        config: Config,
        settings: ExtractionSettings,
        prompts: OwnPrompts,
        identity: Mapping[str, Any],
        file: pathlib.Path,
        started: float,
    ):
        """Opens the journal; ``started`` is the `time.monotonic` at which the command started."""
        minutes = config.stop_after_minutes
        self._config, self._settings, self._prompts = config, settings, prompts
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
        self._journal = self._runner.journal
        self._shards = file.resolve().with_name(SHARDS)
        self._statuses: collections.Counter[str] = collections.Counter()
        self._example = ""  # a model's output without triples
        self._done = Progress()  # the progress of earlier blocks

    def close(self) -> None:
        """Closes the model and the journal."""
        self._runner.close()

    def _open_handlers(
        self, stack: contextlib.ExitStack, journal: Journal
    ) -> dict[type | str, Handler]:
        backend = backends.open_for_run(self._config.extractor, stack, journal)
        return {"extractor": GenerateHandler(backend, {})}

    def run(self, selection: Selection, store: TripleStore) -> dict[str, int]:
        """Extracts triples of all pending passages.

        Returns:
            The numbers of passages that were ``reused``, ``extracted`` or ``deleted``, and the
            number of passages ``left`` to extract.
        """
        bar = tqdm.tqdm(
            selection.chosen(), desc="corpus", unit=" passages", file=sys.stderr, delay=5
        )
        chosen = sum(1 for _ in bar)
        rate = measured_rate(self._journal)
        pending = estimate(selection.pending(), self._config, self._settings, rate)["passages"]
        deleted = [name for name in store.passage_ids() if name not in selection.corpus]
        if deleted:
            store.commit((), {}, deleted)
            say(f"removed the triples of {len(deleted):,} passages no longer in the corpus")
        if pending < chosen:
            say(f"{chosen - pending:,} passages are up to date")
        done = self._extract(selection, store, pending) if pending else 0
        if done == pending:
            self._journal.forget([record.id for record in self._journal.records()])
            if selection.share == (0, 1):
                self._drop_shards()
        self._runner.seconds()
        counts = {"reused": chosen - pending, "extracted": done}
        return {**counts, "deleted": len(deleted), "left": pending - done}

    def _extract(self, selection: Selection, store: TripleStore, pending: int) -> int:
        """Extracts block by block; returns the number of passages whose outcome is stored."""
        done = 0
        extract = self._on_cluster if cluster.is_chosen(self._config) else self._locally
        with progress_bar(pending, "passage") as show:
            blocks = extract(selection, show)
            with contextlib.closing(blocks):
                for block, records in blocks:
                    store.commit(_stored(block, records), selection.identity)
                    done += len(block)
        return done

    def _locally(self, selection: Selection, show: Show) -> Generator[_Block]:
        """Yields extracted blocks, which the caller stores; the last block may be partial."""

        def on_progress(progress: Progress, tokens: int) -> None:
            self._check(self._done.failed + progress.failed)
            show(_sum(self._done, progress), tokens)

        passages = selection.pending()
        while block := list(itertools.islice(passages, self._config.block)):
            jobs = _jobs(block, self._settings, self._prompts)
            names = [job.id for job in jobs]
            for name, outcome in self._journal.outcomes(names).items():  # earlier runs
                self._count(
                    convert(self._journal.path, name, outcome, extraction.EncodedExtraction)
                )
            complete = self._runner.run(jobs, show=on_progress)
            self._done = _sum(self._done, self._runner.progress)
            self._check(self._done.failed)
            records = self._runner.records(jobs)
            if not complete:
                # Drops failures: some may come from an earlier run and still wait for a retry.
                records = {name: r for name, r in records.items() if r.has_succeeded}
                block = [p for p in block if extraction.program_name(p) in records]
            yield block, records
            self._journal.forget(list(records))
            if not complete:
                return

    def _on_cluster(self, selection: Selection, show: Show) -> Generator[_Block]:
        """Yields blocks that workers extracted; deletes a shard's journal after it is stored."""
        config = self._config
        self._shards.mkdir(exist_ok=True)

        def shards() -> Iterator[_Shard]:
            until = None if self._until is None else time.time() + self._until - time.monotonic()
            for name, block in selection.blocks():
                if until is not None and time.time() >= until:
                    return
                yield _Shard(name, self._shards / f"{name}.sqlite", block, until)

        work = functools.partial(_Worker, config, self._prompts, dict(selection.identity))
        on_devices = config.extractor.backend != "openai"
        done = cluster.in_order(work, shards(), config, self._shards, on_devices=on_devices)
        for shard, is_complete in done:
            if not is_complete:
                return
            with JournalReader(shard.file) as journal:
                all_records = {record.id: record for record in journal.records()}
                totals = journal.totals()
            names = map(extraction.program_name, shard.passages)
            records = {name: all_records[name] for name in names}
            self._done = _sum(self._done, self._progress(records, totals))
            self._check(self._done.failed)
            show(self._done, 0)
            yield shard.passages, records
            self._drop(shard.file)

    def _progress(self, records: Mapping[str, Record], totals: Totals) -> Progress:
        """Returns the progress of a shard, and counts its outcomes."""
        outcomes = [record.result(extraction.EncodedExtraction) for record in records.values()]
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
        """Removes all shards' journals, after adding their calls to the totals."""
        for file in sorted(self._shards.glob("*.sqlite")):
            self._drop(file)
        shutil.rmtree(self._shards, ignore_errors=True)

    def _drop(self, file: pathlib.Path) -> None:
        """Removes a shard's journal, after adding its calls to the totals exactly once."""
        with JournalReader(file) as journal:
            name, totals = journal.id, journal.totals()
        self._journal.count(name, totals)
        file.unlink()

    def _encode(self, outcome: Extraction) -> dict[str, Any]:
        self._count(outcome)
        return extraction.encode_extraction(outcome)

    def _count(self, outcome: Extraction | extraction.EncodedExtraction) -> None:
        self._statuses[outcome.status] += 1
        self._example = self._example or outcome.answer

    def _check(self, failed_requests: int) -> None:
        """Raises `UserError` if too many passages have no triples."""
        total = self._statuses.total() + failed_requests
        missing, limit = total - self._statuses["ok"], self._config.max_empty_share
        if total < max(self._config.min_passages, 1) or missing <= limit * total:
            return
        empty, example = self._statuses["empty"], " ".join(self._example.split())[:120]
        raise UserError(
            f"{missing} of {total} passages gave no triples ({missing - empty} failed, {empty} "
            f"empty), more than config.max_empty_share={limit:g} allows; the first such output is "
            f"{example!r}; use a better model (with --config.replace=true) or raise the limit. "
            "Progress is saved."
        )


def _stored(block: Iterable[Passage], records: Mapping[str, Record]) -> list[stores.Record]:
    """Converts the journal's records of passages to records of the store."""
    pairs = ((passage, records[extraction.program_name(passage)]) for passage in block)
    return [
        extraction.store_record(p, r.result(extraction.EncodedExtraction), r.error)
        for p, r in pairs
    ]


def _sum(one: Progress, other: Progress) -> Progress:
    return Progress(*map(operator.add, dataclasses.astuple(one), dataclasses.astuple(other)))
