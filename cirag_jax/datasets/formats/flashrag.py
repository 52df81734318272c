"""FlashRAG: questions by split, a corpus of ``contents``, and result folders.

``{train,dev,test}.jsonl`` have ``id``, ``question``, ``golden_answers`` and ``metadata``, and a
corpus has ``id`` and ``contents``, whose first line is the title. Metadata keep the fields of the
original benchmark, which differ; those that name gold passages are read where they can be.
Without a corpus, the passages are those of the questions' metadata. A result folder has
``intermediate_data.json``, whose questions have ``output``: ``pred`` and ``retrieval_result``.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cirag_jax.datasets import jsonl
from cirag_jax.datasets.formats.base import Draft, Format, Named, Reader, answers_of, id_of, text_of
from cirag_jax.datasets.formats.files import Source
from cirag_jax.datasets.passages import passage_of
from cirag_jax.datasets.records import convert
from cirag_jax.io import write_lines, write_text
from cirag_jax.types import Dataset, Passage, Question

RESULTS = "intermediate_data"
OWN = "cirag_jax"  # The part of the metadata that we write: our own fields of a question.


class FlashragReader(Reader):
    """Reads questions and corpus, or the questions and passages of a result folder."""

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """See `Reader`; the rows of a table with ``contents``, or passages of the metadata."""
        tables = corpora(self.source)
        for place, row in self.source.rows(*tables):
            yield place, passage_from(place, row)
        if not tables:
            seen = set[str]()
            for _, _, place, row in self._questions():
                passages = retrieved(place, row) or [p for p, _ in _context(_metadata(row))]
                for passage in passages:
                    if passage.id not in seen:
                        seen.add(passage.id)
                        yield place, passage

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; the split of a question is the name of its file."""
        for split, name, place, row in self._questions():
            question = Question(
                id=id_of(row, place, "id", default=name),
                question=id_of(row, place, "question"),
                answers=answers_of(row.get("golden_answers"), place, "golden_answers"),
                split=split,
            )
            metadata = _metadata(row)
            if isinstance(own := metadata.get(OWN), dict):
                fields = {"split": split, **own}
                record = {"id": question.id, "question": question.question, **fields}
                read = convert(place, {**record, "answers": list(question.answers)}, Question)
                yield Draft(place, read, read.supporting, read.context, read.supporting_sentences)
            elif split is None:
                context = [passage.id for passage in retrieved(place, row)]
                yield Draft(place, question, context=context)
            else:
                yield _benchmark_draft(place, question, metadata)

    def rankings(self) -> Mapping[str, Sequence[str]]:
        """See `Reader`; the retrieved passages of a result folder."""
        if RESULTS not in self.source.tables:
            return {}
        return {
            id_of(row, place, "id", default=name): [p.id for p in retrieved(place, row)]
            for _, name, place, row in self._questions()
        }

    def _questions(self) -> Iterator[tuple[str | None, str, str, Mapping[str, Any]]]:
        """Yields the split, an id for a question without one, the place and the record."""
        if RESULTS in self.source.tables:
            for number, (place, row) in enumerate(self.source.rows(RESULTS)):
                yield None, f"question_{number}", place, row
            return
        for split, name, row in self.source.rows_by_split(question_tables(self.source)):
            yield split, name, *row


def question_tables(source: Source) -> list[str]:
    """Returns the tables of questions."""
    fields = {name: source.fields(name) for name in source.tables}
    names = [n for n, f in fields.items() if "golden_answers" in f and "reward_model" not in f]
    order = {"train": 0, "dev": 1, "validation": 2, "test": 3}
    return sorted(names, key=lambda name: (order.get(name, 4), name))


def corpora(source: Source) -> list[str]:
    """Returns the tables of passages."""
    return [name for name in source.tables if "contents" in source.fields(name)]


def passage_from(place: str, row: Mapping[str, Any]) -> Passage:
    """Returns the passage of a row of a corpus."""
    contents = text_of(row, place, "contents", "text")
    first, newline, rest = contents.partition("\n")
    title = first.strip() if newline else ""
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]  # As in FlashRAG's dumps of Wikipedia.
    sentences = row.get("sentences")
    return Passage(
        id_of(row, place, "id"),
        text_of(row, place, "title", default=title),
        text_of(row, place, "text", default=rest if newline else contents),
        None if sentences is None else convert(place, sentences, tuple[str, ...]),
    )


def retrieved(place: str, row: Mapping[str, Any]) -> list[Passage]:
    """Returns the distinct retrieved passages of a question of a result folder, best first."""
    output = row.get("output")
    documents = output.get("retrieval_result") if isinstance(output, dict) else None
    found: dict[str, Passage] = {}
    for document in documents if isinstance(documents, list) else ():
        if isinstance(document, dict) and "id" in document:
            passage = passage_from(f"{place}: retrieval_result", document)
            found.setdefault(passage.id, passage)
    return list(found.values())


def _metadata(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the metadata, which UltraRAG calls ``meta_data``."""
    value = row.get("metadata") or row.get("meta_data")
    return value if isinstance(value, dict) else {}


class _Columns(msgspec.Struct):
    """Titles with sentences or sentence numbers, as columns."""

    title: list[str]
    content: list[list[str]] | None = None
    sentences: list[list[str]] | None = None
    sent_id: list[int] | None = None


def _pairs(value: Any, *fields: str) -> list[tuple[str, Any]]:
    """Returns pairs (title, value) from columns or from a list of pairs; [] from anything else."""
    try:
        columns = msgspec.convert(value, _Columns)
        values = next((v for f in fields if (v := getattr(columns, f)) is not None), [])
        return list(zip(columns.title, values, strict=True))
    except (msgspec.ValidationError, ValueError):
        pass
    try:
        return msgspec.convert(value, list[tuple[str, list[str] | int]])
    except msgspec.ValidationError:
        return []


def _context(metadata: Mapping[str, Any]) -> list[tuple[Passage, bool]]:
    """Returns the passages of a question's metadata, and whether MuSiQue's steps name them."""
    pairs = _pairs(metadata.get("context"), "content", "sentences")
    steps = [step.get("support_paragraph") for step in _steps(metadata)]
    paragraphs = [p for p in steps if isinstance(p, dict)]
    return [
        *((passage_of(t, "", s), False) for t, s in pairs if isinstance(s, list)),
        *(
            (passage_of(str(p["title"]), str(p["paragraph_text"])), True)
            for p in paragraphs
            if {"title", "paragraph_text"} <= p.keys()
        ),
    ]


def _steps(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    steps = metadata.get("question_decomposition")
    return [s for s in steps if isinstance(s, dict)] if isinstance(steps, list) else []


def _benchmark_draft(place: str, question: Question, metadata: Mapping[str, Any]) -> Draft:
    """Adds what the metadata of HotpotQA, 2WikiMultihopQA and MuSiQue say of passages."""
    kind = metadata.get("type")
    if isinstance(kind, str):
        question = dataclasses.replace(question, type=kind)
    context = [(Named(p.title, p.text), is_step) for p, is_step in _context(metadata)]
    by_title = {name.title: name for name, _ in reversed(context)}
    facts = [(t, i) for t, i in _pairs(metadata.get("supporting_facts"), "sent_id")
             if isinstance(i, int)]  # fmt: skip
    sentences = [(by_title.get(title, Named(title)), index) for title, index in facts]
    steps = [name for name, is_step in context if is_step]
    supporting = list(dict.fromkeys(name for name, _ in sentences)) or steps
    # MuSiQue's steps are only the gold passages, so they are no context.
    names = [name for name, is_step in context if not is_step]
    return Draft(place, question, supporting, names, sentences)


def _recognizes(source: Source) -> bool:
    return bool(RESULTS in source.tables or question_tables(source) or corpora(source))


# --------------------------------------------------------------------------------------- writing


def write(dataset: Dataset, folder: Path) -> None:
    """Writes one file of questions per split, and ``corpus.jsonl``.

    Metadata contain our other fields of a question, so reading the folder gives the same dataset.
    """
    splits: dict[str, list[dict[str, Any]]] = {}
    for question in dataset.questions:
        splits.setdefault(question.split or "test", []).append(_question_record(question))
    if dataset.corpus:
        write_lines(folder / "corpus.jsonl", map(_passage_record, dataset.corpus.values()))
    for split, rows in splits.items():
        write_lines(folder / f"{split}.jsonl", rows)


def write_results(
    folder: Path,
    dataset: Dataset,
    predictions: Iterable[tuple[str, str, Sequence[str]]],
) -> None:
    """Writes ``intermediate_data.json`` of triples (question id, answer, ranked passage ids)."""
    questions = {question.id: question for question in dataset.questions}
    rows = (
        {
            **_question_record(questions[name]),
            "output": {
                "retrieval_result": [_passage_record(dataset.corpus[i]) for i in ids],
                "pred": answer,
            },
        }
        for name, answer, ids in predictions
        if name in questions
    )
    texts = (json.dumps(row, ensure_ascii=False, indent=1) for row in rows)
    parts = (f"{',' if number else ''}\n{text}" for number, text in enumerate(texts))
    write_text(folder / f"{RESULTS}.json", ("[", *parts, "\n]\n"))


def _question_record(question: Question) -> dict[str, Any]:
    record = jsonl.question_record(question)
    shared = {name: record.pop(name) for name in ("id", "question")}
    answers = record.pop("answers")
    own = {n: value for n, value in record.items() if value is not None or n == "split"}
    return {**shared, "golden_answers": answers, "metadata": {OWN: own}}


def _passage_record(passage: Passage) -> dict[str, Any]:
    """Returns a row of a corpus; FlashRAG ignores all fields except id and contents."""
    record = jsonl.passage_record(passage)
    return {**record, "contents": f'"{passage.title}"\n{passage.text}'}


FORMAT = Format(_recognizes, FlashragReader, write)
