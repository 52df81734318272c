"""Writes a dataset folder whose corpus is streamed from its official file.

Questions name gold passages by title or id. While the corpus is copied, only the passages that
questions name are remembered, and 20 bytes for every other passage.
"""

import dataclasses
import html
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from cirag_jax.datasets.benchmarks.base import OfficialBuilder
from cirag_jax.datasets.benchmarks.corpora import CorpusSource, Reporter, check_source
from cirag_jax.datasets.benchmarks.files import sha256_of
from cirag_jax.datasets.jsonl import CORPUS, OPENIE, QUESTIONS, passage_record, question_record
from cirag_jax.datasets.passage_file import IdTable, PassageFile, PassagesById
from cirag_jax.errors import UserError
from cirag_jax.io import remove_parts, replacing, say, write_json, write_lines, writing
from cirag_jax.types import Dataset, Question

MANIFEST = "sources.json"
_MOST_MISSING = 0.01  # Share of questions whose gold passage may be missing from the corpus.


class _Found(NamedTuple):
    """A passage that a question names."""

    id: str
    num_sentences: int


class Names:
    """Finds passages by the titles or ids that questions use.

    A title matches exactly, or else if it differs only in case, HTML escapes or Unicode form,
    because HotpotQA's titles are case-insensitive.
    """

    def __init__(self, names: Sequence[str]):
        self._exact: dict[str, _Found | None] = dict.fromkeys(names)
        self._loose: dict[str, _Found | None] = dict.fromkeys(map(_loose, self._exact))
        self.num_ambiguous = 0

    def add(self, name: str, found: _Found) -> None:
        """Adds a passage of the corpus; the first passage of a name counts."""
        if name in self._exact:
            self.num_ambiguous += self._exact[name] is not None
            self._exact[name] = self._exact[name] or found
        if (key := _loose(name)) in self._loose:
            self._loose[key] = self._loose[key] or found

    def find(self, name: str) -> _Found | None:
        """Returns the passage of a name, or None."""
        return self._exact[name] or self._loose[_loose(name)]


def _loose(name: str) -> str:
    return unicodedata.normalize("NFC", html.unescape(name)).casefold()


def write(builder: OfficialBuilder, name: str, questions: Sequence[Question], out: Path) -> Dataset:
    """Writes the dataset folder; every file gets its name when it is complete, questions last.

    The builder has a corpus. The questions name passages by the corpus's key.
    """
    source = builder.source
    assert source is not None
    names = Names([i for q in questions for i in (*(q.supporting or ()), *(q.context or ()))])
    table = IdTable()
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        remove_parts(out)
        for file in (QUESTIONS, OPENIE):
            (out / file).unlink(missing_ok=True)
        with replacing(out / CORPUS) as temporary:
            write_lines(temporary, _copied(source, names, table))
            questions, missing = _place(questions, names, source)
        write_manifest(builder, out, num_passages=len(table), **missing)
        write_lines(out / QUESTIONS, map(question_record, questions))
    return Dataset(name, tuple(questions), PassagesById(PassageFile(out / CORPUS)), {})


def _copied(source: CorpusSource, names: Names, table: IdTable) -> Iterator[dict[str, Any]]:
    """Yields the records of ``corpus.jsonl``; raises UserError at the end if an id is repeated."""
    reporter = Reporter(source.path.name, source.num_bytes)
    by_title = source.corpus.key == "title"
    for _, passage in source.passages(reporter):
        reporter.passages += 1
        table.add(passage.id)
        found = _Found(passage.id, len(passage.sentences or ()))
        names.add(passage.title if by_title else passage.id, found)
        yield passage_record(passage)
    if table.finish():
        _refuse_repeats(source, table)
    check_source(source, len(table) + source.num_empty)
    if source.num_empty:
        say(f"{source.path.name}: skipped {source.num_empty:,} passages without a text")


def _refuse_repeats(source: CorpusSource, table: IdTable) -> None:
    first_places: dict[str, str] = {}
    for place, passage in source.passages():
        if len(table.candidates(passage.id)) > 1:
            earlier = first_places.setdefault(passage.id, place)
            if earlier != place:
                raise UserError(f"{place}: repeats the id {passage.id!r} of {earlier}.")


def _place(
    questions: Sequence[Question], names: Names, source: CorpusSource
) -> tuple[list[Question], dict[str, int]]:
    """Replaces names by ids of passages.

    Returns the questions, and how many have no gold passage or no context in the corpus although
    they name one.
    """
    kind = source.corpus.key
    placed, without_gold, without_context, num_gold = [], [], 0, 0
    for question in questions:
        gold = _ids(question.supporting, names)
        context = _ids(question.context, names)
        num_gold += question.supporting is not None
        if question.supporting is not None and gold is None:
            without_gold.append(question)
        without_context += question.context is not None and context is None
        placed.append(
            dataclasses.replace(
                question,
                supporting=gold,
                supporting_sentences=None if gold is None else _sentences(question, names),
                context=context,
            )
        )
    if without_gold:
        first = without_gold[0]
        name = next(n for n in first.supporting or () if names.find(n) is None)
        message = (
            f"{source.path} lacks a gold {kind} of {len(without_gold):,} of {num_gold:,} "
            f"questions, such as {name!r} of question {first.id!r}"
        )
        if len(without_gold) > _MOST_MISSING * num_gold:
            raise UserError(f"{message}; is it the official file of this benchmark?")
        logging.warning("%s; their gold passages are unknown.", message)
    if names.num_ambiguous:
        logging.warning(
            "%s: %d passages repeat a %s that questions name; the first one counts.",
            source.path, names.num_ambiguous, kind,
        )  # fmt: skip
    counts = {"without_gold": len(without_gold), "without_context": without_context}
    return placed, counts


def _ids(wanted: Sequence[str] | None, names: Names) -> tuple[str, ...] | None:
    """Returns the ids of all wanted passages, or None if one is missing."""
    if wanted is None:
        return None
    found = [names.find(name) for name in wanted]
    ids = dict.fromkeys(passage.id for passage in found if passage is not None)
    return None if None in found else tuple(ids)


def _sentences(question: Question, names: Names) -> tuple[tuple[str, int], ...] | None:
    """Returns the gold sentences; indices out of range are dropped."""
    if question.supporting_sentences is None:
        return None
    found = [(names.find(name), index) for name, index in question.supporting_sentences]
    kept = [(p.id, index) for p, index in found if p is not None and index < p.num_sentences]
    return tuple(dict.fromkeys(kept))


def write_manifest(builder: OfficialBuilder, out: Path, **counts: int) -> None:
    """Writes names, sizes and checksums of the official files that were read."""
    paths = dict.fromkeys(found.path for found in builder.found.values())
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in paths
    ]
    source = builder.source
    if source is not None:
        files.append({"name": source.path.name, "bytes": source.num_bytes, "sha256": source.sha256})
    config = builder.builder_config.name  # pyright: ignore[reportOptionalMemberAccess]
    benchmark = {"benchmark": builder.name, "config": config}
    with writing(out):
        write_json(out / MANIFEST, {**benchmark, **counts, "files": files})
