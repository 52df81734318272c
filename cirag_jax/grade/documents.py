"""Documents split into sentences, from JSON lines, text files or a dataset's passages."""

import collections
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cirag_jax.datasets import demo, documents, jsonl, sentences
from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.grade.records import Document
from cirag_jax.types import NonEmptyStr

DOCUMENTS = "documents.jsonl"

_PARAGRAPHS = re.compile(r"\n[ \t]*\n")


class _Row(msgspec.Struct):
    """A line of ``documents.jsonl`` or ``corpus.jsonl``."""

    text: NonEmptyStr
    id: NonEmptyStr | None = None
    title: str = ""
    source: str | None = None
    date: str | None = None
    sentences: tuple[str, ...] | None = None


def read(path: str | None) -> tuple[Document, ...]:
    """Reads the documents of a folder or file in order; None means the built-in dataset.

    A folder has ``documents.jsonl`` (lines with ``text``, and optionally ``id``, ``title``,
    ``source`` and ``date``), a dataset's ``corpus.jsonl`` (each passage is a document), or other
    documents (`documents.read_files`). ``path`` may also be one such file.
    """
    if path is None:
        passages = demo.build().corpus.values()
        return tuple(Document(p.id, p.title, sentences.sentences_of(p)) for p in passages)
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
    # A dataset's triples refer to sentences by the numbers of the dataset's splitter.
    split = sentences.split_sentences if path.name == jsonl.CORPUS else _split
    by_id: dict[str, Document] = {}
    for number, (place, row) in enumerate(read_lines(path, _Row), 1):
        name = row.id or f"{path.stem}-{number}"
        if name in by_id:
            raise field_error(place, "id", f"repeats the id {name!r} of an earlier line")
        parts = split(row.text) if row.sentences is None else row.sentences
        by_id[name] = Document(name, row.title, parts, row.source, row.date)
    return tuple(by_id.values())


def _split(text: str) -> tuple[str, ...]:
    """Splits a text into sentences, which never span two paragraphs."""
    parts = (" ".join(paragraph.split()) for paragraph in _PARAGRAPHS.split(text))
    return tuple(s for part in parts for s in sentences.split_sentences(part))


def select(
    documents: Iterable[Document], least: int, most: int
) -> tuple[tuple[Document, ...], dict[str, int]]:
    """Selects distinct documents with ``least`` to ``most`` words (0 means no limit).

    Returns:
      The selected documents, and the number of rejected documents by reason. In addition,
      ``same_title`` counts selected documents that repeat the title of an earlier document.
    """
    kept: list[Document] = []
    reasons: collections.Counter[str] = collections.Counter()
    texts: set[bytes] = set()
    titles: set[str] = set()
    for document in documents:
        words = sum(len(sentence.split()) for sentence in document.sentences)
        full_text = "\n".join((document.title, *document.sentences))
        text = hashlib.sha256(full_text.encode("utf-8", "replace")).digest()
        if text in texts:
            reasons["repeated"] += 1
        elif words < max(least, 1):
            reasons["short"] += 1
        elif most and words > most:
            reasons["long"] += 1
        else:
            kept.append(document)
            reasons["same_title"] += bool(document.title) and document.title in titles
            titles.add(document.title)
        texts.add(text)
    return tuple(kept), {reason: count for reason, count in reasons.items() if count}
