"""Whole documents, in sentences: articles in JSON lines, text files, or a dataset's passages."""

import collections
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cirag_jax.datasets import demo, documents, jsonl, sentences
from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.grade.records import Document
from cirag_jax.types import Filled

DOCUMENTS = "documents.jsonl"

_PARAGRAPHS = re.compile(r"\n[ \t]*\n")


class _Row(msgspec.Struct):
    """A line of ``documents.jsonl`` or ``corpus.jsonl``."""

    text: Filled
    id: Filled | None = None
    title: str = ""
    source: str | None = None
    date: str | None = None
    sentences: tuple[str, ...] | None = None


def read(path: str | None) -> tuple[Document, ...]:
    """The documents of a folder or file, in its order; None: the built-in dataset's.

    A folder has ``documents.jsonl`` (an object a line: ``text``, and what is known of ``id``,
    ``title``, ``source``, ``date``), or a dataset's ``corpus.jsonl``, each passage a document, or
    ``.txt`` and ``.md`` files. A file is one of these.
    """
    if path is None:
        found = demo.build().corpus.values()
        return tuple(Document(p.id, p.title, sentences.sentences_of(p)) for p in found)
    place = Path(path).expanduser()
    if place.is_dir():
        lines = [place / name for name in (DOCUMENTS, jsonl.CORPUS) if (place / name).is_file()]
        if lines:
            return _read_lines(lines[0])
    elif place.suffix == ".jsonl" and place.is_file():
        return _read_lines(place)
    return tuple(
        Document(name, title, _split(text)) for name, title, text in documents.read_files(place)
    )


def _read_lines(path: Path) -> tuple[Document, ...]:
    # The triples of a dataset name sentences as its own splitter counts them.
    split = sentences.split_sentences if path.name == jsonl.CORPUS else _split
    found: dict[str, Document] = {}
    for number, (place, row) in enumerate(read_lines(path, _Row), 1):
        name = row.id or f"{path.stem}-{number}"
        if name in found:
            raise field_error(place, "id", f"repeats the id {name!r} of an earlier line")
        own = split(row.text) if row.sentences is None else row.sentences
        found[name] = Document(name, row.title, own, row.source, row.date)
    return tuple(found.values())


def _split(text: str) -> tuple[str, ...]:
    """Sentences; none goes over the end of a paragraph."""
    parts = (" ".join(paragraph.split()) for paragraph in _PARAGRAPHS.split(text))
    return tuple(s for part in parts for s in sentences.split_sentences(part))


def select(
    found: Iterable[Document], least: int, most: int
) -> tuple[tuple[Document, ...], dict[str, int]]:
    """Documents of ``least`` to ``most`` words (0: any number), each title and text once.

    Returns:
      What is left, and why others are not -> how many; ``same_title`` counts documents that are
      kept although an earlier one has their title.
    """
    kept: list[Document] = []
    why: collections.Counter[str] = collections.Counter()
    texts: set[bytes] = set()
    titles: set[str] = set()
    for document in found:
        words = sum(len(sentence.split()) for sentence in document.sentences)
        whole = "\n".join((document.title, *document.sentences))
        text = hashlib.sha256(whole.encode("utf-8", "replace")).digest()
        if text in texts:
            why["repeated"] += 1
        elif words < max(least, 1):
            why["short"] += 1
        elif most and words > most:
            why["long"] += 1
        else:
            kept.append(document)
            why["same_title"] += bool(document.title) and document.title in titles
            titles.add(document.title)
        texts.add(text)
    return tuple(kept), {name: count for name, count in why.items() if count}
