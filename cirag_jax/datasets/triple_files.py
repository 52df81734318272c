"""Files of extracted triples: the store, ``openie.jsonl``, and the JSON file of HippoRAG.

HippoRAG's file has an object per passage in the list ``docs``, with ``idx``, ``passage`` (title and
text), ``extracted_entities`` and ``extracted_triples``.
"""

import collections
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cirag_jax.datasets import corruption, jsonl
from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError
from cirag_jax.io import one_line, read_json, replacing, say
from cirag_jax.triples import store as stores
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Passage, Triple

_SQLITE = b"SQLite format 3\0"  # The first bytes of a store.
FORMATS = "a workdir of launch/extract.py, an openie.jsonl, or a .json file of HippoRAG"


class HippoDoc(msgspec.Struct):
    """A passage of HippoRAG's file; ``extracted_triples`` is None if the extraction failed."""

    passage: str
    idx: str | int | None = None
    extracted_triples: list[Any] | None = None


def is_store(source: str | None) -> bool:
    """Returns whether a source of triples is a triple store, which is read on request."""
    if source is None:
        return False
    path = Path(source).expanduser()
    if path.is_dir():
        return not (path / jsonl.OPENIE).is_file() or (path / stores.FILE).is_file()
    if not path.is_file():  # `TripleStore.open` describes a missing store.
        return path.suffix not in (".json", ".jsonl")
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def check_passages(source: str, store: TripleStore, passages: Collection[Passage]) -> None:
    """Warns of passages without an entry in a store; raises `UserError` if no passage has one."""
    missing = store.num_missing(passages)
    if missing and missing == len(passages):
        raise UserError(
            f"{source} has none of the {missing:,} passages of the corpus, but {len(store):,} "
            "others: it is a store of another corpus; extract this one with launch/extract.py."
        )
    if missing:
        say(
            f"WARNING: {source} has no entry for {missing:,} of {len(passages):,} passages of the "
            "corpus; extract them with launch/extract.py"
        )


def read_triples(source: str, corpus: Mapping[str, Passage]) -> dict[str, tuple[Triple, ...]]:
    """Reads the triples of the passages of ``corpus``, by passage id.

    ``source`` is a store, an ``openie.jsonl`` or a dataset folder that contains one, or a JSON file
    of HippoRAG. Passages that were never extracted, or whose extraction failed, are missing in the
    result.
    """
    path = Path(source).expanduser()
    if is_store(source):
        with TripleStore.open(path) as store:
            store.check_corpus(corpus.values())
            check_passages(source, store, corpus.values())
            triples = store.triples(corpus)
        if (store.path.parent / corruption.FILE).is_file():
            say(f"WARNING: {source}: this command does not read the facts of single questions")
        found = {i: facts for i, facts in triples.items() if facts is not None}
    elif path.is_dir():
        found = jsonl.read_openie(path / jsonl.OPENIE, corpus)
    elif not path.is_file():
        raise UserError(f"config.data.triples={source} does not exist; expected {FORMATS}.")
    elif path.suffix == ".json":
        found = jsonl.merged_triples(path, hipporag_rows(path, corpus.values()), corpus)
    else:
        found = jsonl.read_openie(path, corpus)
    if corpus and not found:
        raise UserError(f"{source} has no triples of the {len(corpus):,} passages of the corpus.")
    say(f"{source}: {len(found):,} of {len(corpus):,} passages have triples")
    return found


def extractors_of(source: str | None) -> tuple[str, ...]:
    """Returns the extractors of a triple store; empty for other files, which do not record them."""
    if not is_store(source):
        return ()
    with TripleStore.open(str(source)) as store:
        return store.extractors()


def hipporag_rows(path: Path, passages: Iterable[Passage]) -> Iterator[tuple[str, jsonl.OpenIE]]:
    """Yields (place, line of an ``openie.jsonl``) for the passages of a JSON file of HippoRAG.

    A passage is recognized by its title and text, regardless of white space, or else by its id.
    Passages that are not in the corpus are counted.
    """
    by_text: dict[bytes, list[str]] = collections.defaultdict(list)
    ids = set()
    for passage in passages:
        by_text[_text_key(hipporag_text(passage))].append(passage.id)
        ids.add(passage.id)
    value = read_json(path)
    docs = value.get("docs") if isinstance(value, dict) else None
    if not isinstance(docs, list):
        raise UserError(f"{path}: field 'docs' must be a list of passages, as HippoRAG writes it.")
    unknown = changed = 0
    for number, entry in enumerate(docs):
        place = f"{path}: docs[{number}]"
        doc = convert(place, entry, HippoDoc)
        names = by_text.get(_text_key(doc.passage), [])
        if not names and str(doc.idx) in ids:
            names, changed = [str(doc.idx)], changed + 1
        unknown += not names
        for name in names:
            yield place, jsonl.OpenIE(name, doc.extracted_triples)
    if unknown:
        say(f"WARNING: {path}: {unknown:,} of {len(docs):,} passages are not in the corpus")
    if changed:
        say(
            f"WARNING: {path}: {changed:,} of {len(docs):,} passages have the id of a passage of "
            "the corpus, but another text; their triples are used."
        )


def hipporag_text(passage: Passage) -> str:
    """Returns a passage as HippoRAG embeds it: the title, a newline, and the text."""
    return f"{passage.title}\n{passage.text}"


def _text_key(text: str) -> bytes:
    return hashlib.md5(one_line(text).encode()).digest()


def write_hipporag(path: Path, rows: Iterable[tuple[Passage, Sequence[Triple]]]) -> None:
    """Writes the triples of passages to a JSON file that HippoRAG reads.

    As in HippoRAG, ``idx`` contains the MD5 hash of the passage. The entities are the distinct
    heads and tails.
    """
    chars = words = count = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"docs": [')
        for number, (passage, triples) in enumerate(rows):
            text = hipporag_text(passage)
            entities = jsonl.ends_of(triples)
            doc = {
                "idx": f"chunk-{hashlib.md5(text.encode()).hexdigest()}",
                "passage": text,
                "extracted_entities": entities,
                "extracted_triples": [[t.head, t.relation, t.tail] for t in triples],
            }
            file.write((",\n" if number else "\n") + json.dumps(doc, ensure_ascii=False))
            chars += sum(map(len, entities))
            words += sum(len(entity.split()) for entity in entities)
            count += len(entities)
        averages = {
            "avg_ent_chars": round(chars / count, 4) if count else 0,
            "avg_ent_words": round(words / count, 4) if count else 0,
        }
        file.write("\n], " + json.dumps(averages)[1:] + "\n")
