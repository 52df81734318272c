"""Import of existing triples (``openie.jsonl``) into a store, and export of a store's triples."""

import collections
import contextlib
import hashlib
import itertools
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec

from cirag_jax.commands.extract_selection import selected_passages
from cirag_jax.datasets import jsonl, triple_files
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.jsonl import OpenIE, triples_of
from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.datasets.triple_files import hipporag_rows
from cirag_jax.errors import UserError
from cirag_jax.io import say, write_lines
from cirag_jax.runtime.store import Journal, journal_path
from cirag_jax.triples import store as stores
from cirag_jax.triples.store import Record, TripleStore, content_hash
from cirag_jax.types import Config, Passage, Triple


def import_triples(config: Config, workdir: Path, started: float) -> dict[str, Any]:
    """Imports the triples of a file into the store; returns the result of the command."""
    _check_complete(config, "config.import_openie", "imports the complete file")
    path = Path(config.import_openie).expanduser()
    with (
        Journal(journal_path(workdir, 0, 1), {"import": str(path)}) as journal,
        TripleStore.create(workdir / stores.FILE) as store,
        CorpusScan(config.data.dir) as corpus,
    ):
        imported = _import(path, corpus, store, config.block)
        return {
            "passages": len(store),
            **store.counts(),
            **imported,
            "seconds": journal.add_seconds(time.monotonic() - started),
            "complete": True,
            "store": str(store.path),
        }


def _check_complete(config: Config, option: str, does: str) -> None:
    if selected_passages(config) is not None:
        raise UserError(f"{option} {does}; do not set config.data.corpus.")
    if jax.process_count() > 1:
        raise UserError(f"{option} runs in one process.")


def _import(path: Path, corpus: CorpusScan, store: TripleStore, block: int) -> dict[str, Any]:
    """Imports the triples of an ``openie.jsonl`` or of a HippoRAG file into the store.

    Each transaction adds or replaces ``block`` passages. Passages already imported from the same
    file are kept, and passages that are not in the corpus are deleted from the store. Lines about
    the same passage are merged. Triples that are not three non-empty strings are dropped, and
    sentence indices out of range become null. The corpus may be larger than memory, and so may a
    file in the format of ``openie.jsonl``.

    Returns:
        Numbers of passages that were ``imported``, ``reused`` and ``deleted``, and of triples that
        were ``malformed`` or had a sentence ``out_of_range``.
    """
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; config.import_openie must be the path of an openie.jsonl or "
            "of a .json file of HippoRAG."
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    identity = {"import": path.name, "sha256": digest[:16]}
    counts = {"imported": 0, "reused": 0, "deleted": 0, "malformed": 0, "out_of_range": 0}
    with contextlib.closing(sqlite3.connect("", isolation_level=None)) as lines:
        _read(path, corpus, lines)
        deleted = [name for name in store.passage_ids() if name not in corpus]
        counts["deleted"] = len(deleted)
        store.commit((), {}, deleted)
        records = _records(corpus, store, lines, identity, counts)
        while batch := list(itertools.islice(records, block)):
            store.commit(batch, identity)
            counts["imported"] += len(batch)
    if counts["malformed"]:
        say(f"{path}: dropped {counts['malformed']:,} triples that are not three non-empty strings")
    if counts["out_of_range"]:
        say(f"{path}: set {counts['out_of_range']:,} sentence indices out of range to null")
    return counts


def _read(path: Path, corpus: CorpusScan, lines: sqlite3.Connection) -> None:
    """Stores the lines in a temporary database, indexed by passage."""
    lines.execute("CREATE TABLE lines (id TEXT, place TEXT, line BLOB)")
    lines.execute("BEGIN")
    is_hipporag = path.suffix == ".json"
    rows = hipporag_rows(path, corpus) if is_hipporag else read_lines(path, OpenIE)
    for place, line in rows:
        if line.passage_id not in corpus:
            problem = f"names passage {line.passage_id!r}, which the corpus does not have"
            raise field_error(place, "passage_id", problem)
        row = (line.passage_id, place, msgspec.json.encode(line))
        lines.execute("INSERT INTO lines VALUES (?, ?, ?)", row)
    lines.execute("CREATE INDEX passages ON lines (id)")


def _records(
    corpus: CorpusScan,
    store: TripleStore,
    lines: sqlite3.Connection,
    identity: dict[str, Any],
    counts: dict[str, int],
) -> Iterator[Record]:
    """Yields new and changed records in the order of the corpus."""
    query = "SELECT place, line FROM lines WHERE id = ? ORDER BY rowid"
    for passage in corpus:
        rows = lines.execute(query, (passage.id,)).fetchall()
        decoded = [(place, msgspec.json.decode(line, type=OpenIE)) for place, line in rows]
        if all(line.triples is None for _, line in decoded):
            continue
        entry, digest = store.entry(passage.id), content_hash(passage)
        if entry is not None and (entry.hash, entry.extractor) == (digest, identity):
            counts["reused"] += 1
            continue
        triples: dict[Triple, None] = {}
        for place, line in decoded:
            new, malformed, out_of_range = triples_of(place, line, passage)
            triples.update(dict.fromkeys(new))
            counts["malformed"] += malformed
            counts["out_of_range"] += out_of_range
        yield Record(passage.id, digest, tuple(triples))


def export_triples(config: Config, workdir: Path) -> dict[str, Any]:
    """Writes the triples of the store to a file, in the order of the corpus."""
    _check_complete(config, "config.export_openie", "exports the complete store")
    path = Path(config.export_openie).expanduser()
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(
            f"config.export_openie={path} must end in .jsonl (the format of openie.jsonl) or .json "
            "(HippoRAG's)."
        )
    if not path.parent.is_dir():
        raise UserError(f"config.export_openie={path}: {path.parent} is not a folder.")
    counts = collections.Counter({"exported": 0, "triples": 0, "without_triples": 0})

    def rows() -> Iterator[tuple[Passage, Sequence[Triple]]]:
        passages = iter(corpus)
        while block := list(itertools.islice(passages, 500)):
            store.check_corpus(block)
            extracted = store.triples([passage.id for passage in block])
            for passage in block:
                triples = extracted[passage.id]
                if triples is None:
                    counts["without_triples"] += 1
                    continue
                counts.update(exported=1, triples=len(triples))
                yield passage, triples

    with TripleStore.open(workdir) as store, CorpusScan(config.data.dir) as corpus:
        if path.suffix == ".json":
            triple_files.write_hipporag(path, rows())
        else:
            write_lines(path, (jsonl.openie_record(p.id, triples) for p, triples in rows()))
    return {**counts, "file": str(path), "complete": True}
