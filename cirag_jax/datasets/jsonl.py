"""The dataset folder: ``questions.jsonl``, ``corpus.jsonl`` and optionally ``openie.jsonl``.

``docs/data.md`` documents the format for users. Reading is strict: input that could silently change
a result, such as an unknown passage id, raises an error that names the file, line and field.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from absl import logging

from cirag_jax.datasets.passage_file import PassageFile, PassagesById
from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.datasets.sentences import sentences_of, source_sentence
from cirag_jax.errors import UserError
from cirag_jax.io import write_lines, writing
from cirag_jax.types import Count, Dataset, NonEmptyStr, Passage, Question, Triple

QUESTIONS = "questions.jsonl"
CORPUS = "corpus.jsonl"
OPENIE = "openie.jsonl"

# Bytes of a corpus from which its passages stay on disk.
LARGE_CORPUS = 1 << 30

_CONTENTS = f"a dataset folder contains {QUESTIONS} and {CORPUS}"
_NO_PASSAGES = "put passages there, or use the method direct, which needs none"


def read_dataset(
    folder: str | os.PathLike[str],
    *,
    corpus: bool = True,
    questions: bool = True,
    triples: bool = True,
) -> Dataset:
    """Reads and validates a dataset folder, in file order; the dataset is named after the folder.

    Absent and null fields become None. Three repairs are made and logged:
    ``supporting_sentences`` with an index out of range are dropped (official HotpotQA and
    2WikiMultihopQA have some), malformed triples are dropped, and ``triple_sentences`` out of range
    become null.

    With ``corpus=False`` the corpus may be missing; questions may then name any passage. With
    ``questions=False`` no questions are read, and with ``triples=False`` no ``openie.jsonl``.
    ``gold_triples.jsonl`` is never read: it has triples of gold passages only, so it would reveal
    the gold passages.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {_CONTENTS}.")
    # An existing corpus is always read, because questions are validated against it.
    reads_corpus = corpus or (folder / CORPUS).is_file()
    if questions and not (folder / QUESTIONS).is_file():
        raise UserError(f"{folder / QUESTIONS} does not exist; {_CONTENTS}.")
    if reads_corpus and not (folder / CORPUS).is_file():
        raise UserError(f"{folder / CORPUS} does not exist; {_NO_PASSAGES}.")
    passages = read_corpus(folder) if reads_corpus else None
    records = _read_questions(folder / QUESTIONS, passages) if questions else ()
    openie, extracted = folder / OPENIE, {}
    if triples and passages is not None and openie.exists():
        extracted = read_openie(openie, passages)
    return Dataset(folder.resolve().name, records, passages or {}, extracted)


def read_corpus(folder: str | os.PathLike[str]) -> Mapping[str, Passage]:
    """Reads the passages of a dataset folder by id, in file order.

    The passages of a file of at least `LARGE_CORPUS` bytes stay on disk.
    """
    path = Path(folder).expanduser() / CORPUS
    if path.is_file() and path.stat().st_size >= LARGE_CORPUS:
        return PassagesById(PassageFile(path))
    corpus: dict[str, Passage] = {}
    for place, passage in read_lines(path, Passage):
        if passage.id in corpus:
            raise field_error(place, "id", f"repeats the id {passage.id!r} of an earlier line")
        corpus[passage.id] = passage
    return corpus


def write_dataset(dataset: Dataset, folder: str | os.PathLike[str]) -> None:
    """Writes a dataset folder that `read_dataset` reads back unchanged.

    Replaces an older dataset and keeps other files in the folder. Each file gets its name only when
    it is complete, and ``questions.jsonl`` is written last, so `read_dataset` rejects a partly
    written folder. A dataset without passages has no ``corpus.jsonl``.
    """
    folder = Path(folder)
    write_passages(folder, dataset.name, dataset.corpus.values())
    write_annotations(folder, dataset)


def write_passages(folder: Path, name: str, passages: Iterable[Passage]) -> None:
    """Writes ``corpus.jsonl`` if the dataset ``name`` has passages, and removes an older dataset.

    The passages are written as they are read. `write_annotations` completes the folder.
    """
    passages = iter(passages)
    first = next(passages, None)
    if first is None and (folder / CORPUS).exists():
        raise UserError(
            f"{folder / CORPUS} exists, but {name} has no passages; move it away or write to "
            "another folder."
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in (QUESTIONS, OPENIE):
            (folder / file).unlink(missing_ok=True)
        if first is not None:
            rows = map(dataclasses.asdict, itertools.chain((first,), passages))
            write_lines(folder / CORPUS, rows)


def write_annotations(folder: Path, dataset: Dataset) -> None:
    """Writes the triples and the questions of a dataset."""
    with writing(folder):
        if dataset.triples:
            rows = (openie_record(key, value) for key, value in dataset.triples.items())
            write_lines(folder / OPENIE, rows)
        write_lines(folder / QUESTIONS, map(question_record, dataset.questions))


class OpenIE(msgspec.Struct):
    """A line of ``openie.jsonl`` without entities; without extraction, ``triples`` is None."""

    passage_id: NonEmptyStr
    triples: list[Any] | None = None
    triple_sentences: list[Count | None] | None = None


def _read_questions(path: Path, corpus: Mapping[str, Passage] | None) -> tuple[Question, ...]:
    questions: dict[str, Question] = {}
    out_of_range = 0
    for place, question in read_lines(path, Question):
        pairs = question.supporting_sentences
        for alias in question.aliases or ():
            if alias not in question.answers:
                raise field_error(place, "aliases", f"has {alias!r}, which answers does not have")
        if corpus is not None:
            _check_passages(place, question, corpus)
        if corpus is not None and pairs is not None:
            kept = tuple(p for p in pairs if p[1] < len(sentences_of(corpus[p[0]])))
            out_of_range += len(pairs) - len(kept)
            question = dataclasses.replace(question, supporting_sentences=kept)
        if question.id in questions:
            raise field_error(place, "id", f"repeats the id {question.id!r} of an earlier line")
        questions[question.id] = question
    if out_of_range:
        logging.warning(
            "%s: dropped %d supporting_sentences whose index is out of range.", path, out_of_range
        )
    return tuple(questions.values())


def _check_passages(place: str, question: Question, corpus: Mapping[str, Passage]) -> None:
    """Raises UserError if the corpus lacks a passage or a sentence that a question names."""
    for field, passage_id in _named_passages(question):
        _check_known(place, field, passage_id, corpus)
    for i, places in enumerate(question.same_sentences or ()):
        for j, (passage_id, sentence) in enumerate(places):
            if sentence >= len(sentences_of(corpus[passage_id])):
                problem = f"names sentence {sentence} of the shorter passage {passage_id!r}"
                raise field_error(place, f"same_sentences[{i}][{j}]", problem)


def _named_passages(question: Question) -> Iterator[tuple[str, str]]:
    for i, passage_id in enumerate(question.supporting or ()):
        yield f"supporting[{i}]", passage_id
    for i, (passage_id, _) in enumerate(question.supporting_sentences or ()):
        yield f"supporting_sentences[{i}][0]", passage_id
    for i, places in enumerate(question.same_sentences or ()):
        for j, (passage_id, _) in enumerate(places):
            yield f"same_sentences[{i}][{j}][0]", passage_id
    for i, passage_id in enumerate(question.context or ()):
        yield f"context[{i}]", passage_id
    for i, step in enumerate(question.decomposition or ()):
        if step.supporting is not None:
            yield f"decomposition[{i}].supporting", step.supporting


def _check_known(place: str, field: str, passage_id: str, corpus: Mapping[str, Passage]) -> None:
    if passage_id not in corpus:
        problem = f"names passage {passage_id!r}, which {CORPUS} does not have"
        raise field_error(place, field, problem)


def read_openie(path: Path, corpus: Mapping[str, Passage]) -> dict[str, tuple[Triple, ...]]:
    """Reads the triples of an ``openie.jsonl`` by passage id."""
    return merged_triples(path, read_lines(path, OpenIE), corpus)


def merged_triples(
    path: Path, rows: Iterable[tuple[str, OpenIE]], corpus: Mapping[str, Passage]
) -> dict[str, tuple[Triple, ...]]:
    """Returns the triples of pairs (place, line) by passage id, and logs what was repaired."""
    triples: dict[str, tuple[Triple, ...]] = {}
    malformed = out_of_range = merged = 0
    for place, row in rows:
        _check_known(place, "passage_id", row.passage_id, corpus)
        if row.triples is None:
            continue
        row_triples, num_malformed, num_out_of_range = triples_of(
            place, row, corpus[row.passage_id]
        )
        malformed += num_malformed
        out_of_range += num_out_of_range
        if row.passage_id in triples:  # Several runs may extract the same passage.
            merged += 1
            row_triples = dict.fromkeys((*triples[row.passage_id], *row_triples))
        triples[row.passage_id] = tuple(row_triples)
    for count, message in (
        (merged, "merged %d lines into an earlier line of the same passage"),
        (malformed, "dropped %d triples that are not three non-empty strings"),
        (out_of_range, "%d triple_sentences are out of range and were set to null"),
    ):
        if count:
            logging.warning(f"%s: {message}.", path, count)
    return triples


def triples_of(place: str, row: OpenIE, passage: Passage) -> tuple[Iterable[Triple], int, int]:
    """Returns a line's triples, and the numbers of malformed and of out-of-range entries."""
    if row.triples is None:
        return (), 0, 0
    parts = row.triples
    sentences = [None] * len(parts) if row.triple_sentences is None else row.triple_sentences
    if len(sentences) != len(parts):
        problem = f"must have one entry per triple ({len(parts)}), not {len(sentences)}"
        raise field_error(place, "triple_sentences", problem)
    triples, out_of_range, texts = [], 0, sentences_of(passage)
    for part, sentence in zip(parts, sentences, strict=True):
        is_list = isinstance(part, list) and len(part) == 3
        if is_list and all(isinstance(text, str) and text.strip() for text in part):
            head, relation, tail = part
            if sentence is not None and sentence >= len(texts):
                sentence, out_of_range = None, out_of_range + 1
            if sentence is None:
                sentence = source_sentence(head, relation, tail, texts)
            triples.append(Triple(head, relation, tail, passage.id, sentence))
    return triples, len(parts) - len(triples), out_of_range


def question_record(question: Question) -> dict[str, Any]:
    """Returns a question as a record of ``questions.jsonl`` and of a run's journal."""
    record = dataclasses.asdict(question)
    for field in ("same_sentences", "aliases"):
        if record[field] is None:
            del record[field]  # Keeps records equal to journals older than this field.
    return record


def passage_record(passage: Passage) -> dict[str, Any]:
    """Returns a passage as a record, without a field of sentences if it has none."""
    record = dataclasses.asdict(passage)
    if passage.sentences is None:
        del record["sentences"]
    return record


def ends_of(triples: Iterable[Triple]) -> list[str]:
    """Returns the distinct heads and tails of triples, in order."""
    return list(dict.fromkeys(end for triple in triples for end in (triple.head, triple.tail)))


def openie_record(passage_id: str, triples: Sequence[Triple]) -> dict[str, Any]:
    """Returns the triples of a passage as a record of ``openie.jsonl``."""
    return {
        "passage_id": passage_id,
        "entities": ends_of(triples),
        "triples": [[triple.head, triple.relation, triple.tail] for triple in triples],
        "triple_sentences": [triple.sentence for triple in triples],
    }
