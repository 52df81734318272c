"""BEIR, MTEB's retrieval tasks and BRIGHT on disk.

BEIR has ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl`` (``_id``, ``text``) and
``qrels/SPLIT.tsv`` (``query-id``, ``corpus-id``, ``score``). MTEB stores the same tables as Parquet
or JSON lines in folders (``corpus/``, ``queries/``, ``data/`` or ``qrels/``). BRIGHT has
``documents/`` (``id``, ``content``) and ``examples/`` (``id``, ``query``, ``gold_ids``).
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from cirag_jax.datasets.formats import trec
from cirag_jax.datasets.formats.base import (
    Draft,
    Format,
    Reader,
    answers_of,
    id_of,
    read_passage,
    text_of,
)
from cirag_jax.datasets.formats.files import Source
from cirag_jax.datasets.records import convert, field_error
from cirag_jax.types import Passage, Question

_QUERIES, _CORPUS = "queries", "corpus"
_JUDGEMENTS = ("qrels", "data", "default")  # The folders in which qrels may be.


class BeirReader(Reader):
    """Reads a retrieval benchmark; gold passages are those with a score above 0."""

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """See `Reader`."""
        for place, row in self.source.rows(*tables_in(self.source, _CORPUS)):
            yield place, read_passage(row, place, ("_id", "id"), ("text",))

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; a query without gold passages is skipped, as BEIR does."""
        gold, splits = self._judgements()
        for place, row in self.source.rows(*tables_in(self.source, _QUERIES)):
            name = id_of(row, place, "_id", "id")
            if name not in gold:
                self.notes["queries without a judged passage were skipped"] += 1
                continue
            metadata = row.get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            question = Question(
                id=name,
                question=id_of(row, place, "text"),
                answers=answers_of(metadata.get("answer"), place, "metadata.answer"),
                split=splits[name],
            )
            yield Draft(place, question, gold[name])

    def _judgements(self) -> tuple[Mapping[str, list[str]], Mapping[str, str]]:
        """Returns the gold passages of each query, and its split: the first that judges it."""
        gold: dict[str, list[str]] = collections.defaultdict(list)
        splits: dict[str, str] = {}
        for table in judgements(self.source):
            split = table.rpartition("/")[2]
            for place, row in self._judged(table):
                query = id_of(row, place, "query-id", "query_id")
                score = row.get("score", 1)
                try:
                    relevant = float(score) > 0
                except (TypeError, ValueError):
                    raise field_error(place, "score", f"must be a number, not {score!r}") from None
                if splits.setdefault(query, split) == split and relevant:
                    gold[query].append(id_of(row, place, "corpus-id", "corpus_id"))
        return gold, splits

    def _judged(self, table: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self.source.suffix(table) in trec.SUFFIXES:
            for place, query, passage, score in trec.judgements(self.source, table):
                yield place, {"query-id": query, "corpus-id": passage, "score": score}
        else:
            yield from self.source.rows(table)


class BrightReader(Reader):
    """Reads one or all domains of BRIGHT; with several, ids start with the domain."""

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """See `Reader`."""
        for table, prefix in self._domains("documents"):
            for place, row in self.source.rows(table):
                name = prefix + id_of(row, place, "id")
                yield place, Passage(name, "", text_of(row, place, "content"))

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; the domain is the type of a question."""
        for table, prefix in self._domains("examples"):
            for place, row in self.source.rows(table):
                question = Question(
                    id=prefix + id_of(row, place, "id"),
                    question=id_of(row, place, "query"),
                    answers=answers_of(row.get("gold_answer"), place, "gold_answer"),
                    type=table.rpartition("/")[2],
                    split="test",
                )
                gold = convert(f"{place}: gold_ids", row.get("gold_ids") or [], list[str])
                excluded = set(row.get("excluded_ids") or ()) - {"N/A"}
                if excluded:
                    self.notes["questions have excluded_ids, which are searched all the same"] += 1
                yield Draft(place, question, [prefix + name for name in gold])

    def _domains(self, folder: str) -> list[tuple[str, str]]:
        tables = tables_in(self.source, folder)
        several = len(tables) > 1
        return [(t, f"{t.rpartition('/')[2]}/" if several else "") for t in tables]


def tables_in(source: Source, name: str) -> list[str]:
    """Returns the table of a name, or the tables in the folder of that name."""
    return [table for table in source.tables if table == name or table.startswith(f"{name}/")]


def judgements(source: Source) -> list[str]:
    """Returns the tables of qrels, the training split first."""
    names = [t for t in source.tables if t == "qrels" or t.rpartition("/")[0] in _JUDGEMENTS]
    order = {"train": 0, "dev": 1, "validation": 1, "test": 2}
    return sorted(names, key=lambda name: (order.get(name.rpartition("/")[2], 3), name))


def _recognizes(source: Source) -> bool:
    corpus = source.fields(source.find(_CORPUS))
    is_corpus = {"_id", "text"} <= corpus or ({"id", "text"} <= corpus and bool(judgements(source)))
    return is_corpus and "contents" not in corpus


FORMAT = Format(_recognizes, BeirReader)
BRIGHT = Format(lambda s: "content" in s.fields(s.find("documents")), BrightReader)
