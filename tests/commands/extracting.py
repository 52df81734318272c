"""Helpers for the tests of ``launch/extract.py``."""

import contextlib
import json
import sqlite3

from cirag_jax.commands.extract import extract_corpus
from cirag_jax.triples.store import FILE, TripleStore
from configs import extract as extract_config

TEXTS = {
    "p0": "Ule feeds Tarn. Tarn governs Osk.",
    "p1": "Brum borders Osk. It nothing.",
    "p2": "Osk prose here.",
    "p3": "Dunn joins Ule. Ule cuts Brum. Brum cut Osk.",
    "p4": "Fenn garbled Osk. Osk feeds Fenn.",
    "p5": "Fenn refused Osk.",
}


def corpus(folder, texts):
    folder.mkdir(exist_ok=True)
    rows = [{"id": name, "title": name, "text": text} for name, text in texts.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(server, folder, workdir, **fields):
    config = extract_config.get_config()
    config.update_from_flattened_dict(
        {
            "data.dir": str(folder),
            "extractor.backend": "openai",
            "extractor.base_url": server.url,
            "extractor.model": "m",
            "extractor.max_retries": 0,
            "max_empty_share": 1.0,
            **fields,
        }
    )
    workdir.mkdir(exist_ok=True)
    return extract_corpus(config.lock(), workdir)


def triples(workdir, names):
    """Returns the triples and the status of each passage."""
    with TripleStore.open(workdir) as held:
        entries = {name: held.entry(name) for name in names}
        return held.triples(names), {n: e and e.status for n, e in entries.items()}


def without_varying(result):
    """Returns a result without the fields that depend on interruptions."""
    varying = ("seconds", "reused", "extracted", "store")
    return {name: value for name, value in result.items() if name not in varying}


def content(workdir):
    """Returns the content of the store, without the records about its last run."""
    with contextlib.closing(sqlite3.connect(workdir / FILE)) as db:
        tables = ("passages", "extractors")
        return [sorted(db.execute(f"SELECT * FROM {table}")) for table in tables]
