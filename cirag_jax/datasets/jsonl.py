"""The dataset folder: ``questions.jsonl``, ``corpus.jsonl`` and optionally ``openie.jsonl``.

This is the bring-your-own-corpus format; ``docs/data.md`` describes it for users. Reading is
strict: whatever could silently change a result (a dangling passage id, a number where text is
due) stops with one sentence that names file, line and field.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from cirag_jax.datasets.records import Record, read_lines
from cirag_jax.datasets.sentences import sentences_of, source_sentence
from cirag_jax.errors import UserError
from cirag_jax.io import write_lines
from cirag_jax.types import Dataset, Passage, Question, SubQuestion, Triple

QUESTIONS = "questions.jsonl"
CORPUS = "corpus.jsonl"
OPENIE = "openie.jsonl"

_CONTENTS = f"a dataset folder holds {QUESTIONS} and {CORPUS}"

# ------------------------------------------------------------------------------- public functions


def read_dataset(folder: str | os.PathLike[str]) -> Dataset:
    """Reads and validates a dataset folder.

    Absent and null fields become None. Pairs of ``supporting_sentences`` whose index lies beyond
    the sentences of their passage (official HotpotQA and 2WikiMultihopQA have some) and malformed
    triples are dropped; their number is logged. ``gold_triples.jsonl`` is not a triple store and
    is never read here: only gold passages have such triples, so it would give the answer away.

    Args:
        folder: Holds ``questions.jsonl``, ``corpus.jsonl`` and optionally ``openie.jsonl``.

    Returns:
        The dataset, named after the folder; corpus and questions in file order.

    Raises:
        UserError: A file is missing, unreadable or empty, a line is not a JSON object in UTF-8, a
            required field is missing, a field has the wrong type, an id occurs twice, or a passage
            id does not occur in the corpus.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {_CONTENTS}.")
    for name in (QUESTIONS, CORPUS):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} does not exist; {_CONTENTS}.")
    corpus = read_corpus(folder)
    questions = _read_questions(folder / QUESTIONS, corpus)
    openie = folder / OPENIE
    triples = _read_openie(openie, corpus) if openie.exists() else {}
    return Dataset(folder.resolve().name, questions, corpus, triples)


def read_corpus(folder: str | os.PathLike[str]) -> dict[str, Passage]:
    """The passages of a dataset folder by id, in file order; it needs no questions.

    Raises:
        UserError: As `read_dataset`.
    """
    path = Path(folder) / CORPUS
    corpus: dict[str, Passage] = {}
    for row in read_lines(path):
        passage = Passage(
            id=row.text("id", filled=True),
            title=row.text("title"),
            text=row.text("text"),
            sentences=row.texts("sentences"),
        )
        if passage.id in corpus:
            raise row.error("id", f"repeats the id {passage.id!r} of an earlier line")
        corpus[passage.id] = passage
    return corpus


def write_dataset(dataset: Dataset, folder: str | os.PathLike[str]) -> None:
    """Writes ``dataset`` as a dataset folder that `read_dataset` reads back unchanged.

    Every file is written aside and renamed, ``questions.jsonl`` last: a folder left by a killed
    run has no ``questions.jsonl`` and is refused by `read_dataset`. Other files in the folder stay.

    Args:
        dataset: What to write.
        folder: Created where absent; an older dataset in it is replaced.

    Raises:
        UserError: The folder cannot be created or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (QUESTIONS, OPENIE):
            (folder / name).unlink(missing_ok=True)
        write_lines(folder / CORPUS, map(_passage_record, dataset.corpus.values()))
        if dataset.triples:
            rows = (_openie_record(key, value) for key, value in dataset.triples.items())
            write_lines(folder / OPENIE, rows)
        write_lines(folder / QUESTIONS, map(_question_record, dataset.questions))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}.") from error


# ---------------------------------------------------------------------------------- the three files


def _read_questions(path: Path, corpus: Mapping[str, Passage]) -> tuple[Question, ...]:
    questions: dict[str, Question] = {}
    out_of_range = 0
    for row in read_lines(path):
        pairs = _pairs(row, "supporting_sentences", corpus)
        if pairs is not None:
            kept = tuple(p for p in pairs if p[1] < len(sentences_of(corpus[p[0]])))
            out_of_range += len(pairs) - len(kept)
            pairs = kept
        question = Question(
            id=row.text("id", filled=True),
            question=row.text("question", filled=True),
            answers=row.texts("answers", required=True) or (),
            type=row.maybe_text("type"),
            hops=row.maybe_count("hops"),
            split=row.maybe_text("split"),
            fold=row.maybe_text("fold"),
            setting=row.maybe_text("setting"),
            supporting=_passage_ids(row, "supporting", corpus),
            supporting_sentences=pairs,
            context=_passage_ids(row, "context", corpus),
            evidences=row.triples("evidences"),
            decomposition=_decomposition(row, "decomposition", corpus),
        )
        if question.id in questions:
            raise row.error("id", f"repeats the id {question.id!r} of an earlier line")
        questions[question.id] = question
    if out_of_range:
        logging.warning(
            "%s: dropped %d supporting_sentences whose index is out of range.", path, out_of_range
        )
    return tuple(questions.values())


def _read_openie(path: Path, corpus: Mapping[str, Passage]) -> dict[str, tuple[Triple, ...]]:
    triples: dict[str, tuple[Triple, ...]] = {}
    malformed = merged = 0
    for row in read_lines(path):
        passage_id = row.text("passage_id", filled=True)
        _check_known(row, "passage_id", passage_id, corpus)
        parts = row.maybe("triples", list)
        if parts is None:  # unknown, so this passage counts as never extracted
            continue
        places = _triple_sentences(row, "triple_sentences", len(parts))
        found = []
        for index, part in enumerate(parts):
            if not _is_triple(part):
                malformed += 1
                continue
            head, relation, tail = part
            place = places[index] if places else None
            if place is None:
                place = source_sentence(head, relation, tail, sentences_of(corpus[passage_id]))
            found.append(Triple(head, relation, tail, passage_id, place))
        if passage_id in triples:  # one passage extracted twice, as happens across runs
            merged += 1
            found = dict.fromkeys((*triples[passage_id], *found))
        triples[passage_id] = tuple(found)
    if merged:
        logging.warning("%s: merged %d lines into an earlier one of their passage.", path, merged)
    if malformed:
        logging.warning(
            "%s: dropped %d triples that are not three non-empty strings.", path, malformed
        )
    return triples


def _is_triple(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(part, str) and part.strip() for part in value)
    )


# ----------------------------------------------------------------------------- fields of one record


def _check_known(row: Record, field: str, passage_id: str, corpus: Mapping[str, Passage]) -> None:
    if passage_id not in corpus:
        raise row.error(field, f"names passage {passage_id!r}, which {CORPUS} does not have")


def _passage_ids(row: Record, field: str, corpus: Mapping[str, Passage]) -> tuple[str, ...] | None:
    ids = row.texts(field)
    for i, passage_id in enumerate(ids or ()):
        _check_known(row, f"{field}[{i}]", passage_id, corpus)
    return ids


def _pairs(
    row: Record, field: str, corpus: Mapping[str, Passage]
) -> tuple[tuple[str, int], ...] | None:
    pairs = row.text_index_pairs(field)
    for i, (passage_id, _) in enumerate(pairs or ()):
        _check_known(row, f"{field}[{i}][0]", passage_id, corpus)
    return pairs


def _decomposition(
    row: Record, field: str, corpus: Mapping[str, Passage]
) -> tuple[SubQuestion, ...] | None:
    parts = row.parts(field)
    if parts is None:
        return None
    steps = []
    for part in parts:
        supporting = part.maybe_text("supporting")
        if supporting is not None:
            _check_known(part, "supporting", supporting, corpus)
        steps.append(SubQuestion(part.text("question"), part.text("answer"), supporting))
    return tuple(steps)


def _triple_sentences(row: Record, field: str, count: int) -> list[int | None] | None:
    values = row.maybe(field, list)
    if values is None:
        return None
    if len(values) != count:
        raise row.error(field, f"must have one entry per triple ({count}), not {len(values)}")
    for i, value in enumerate(values):
        if value is not None:
            row.check_index(f"{field}[{i}]", value)
    return values


# ---------------------------------------------------------------------------------------- writing


def _passage_record(passage: Passage) -> dict[str, Any]:
    return {
        "id": passage.id,
        "title": passage.title,
        "text": passage.text,
        "sentences": passage.sentences,
    }


def _question_record(question: Question) -> dict[str, Any]:
    steps = question.decomposition
    return {
        "id": question.id,
        "question": question.question,
        "answers": question.answers,
        "type": question.type,
        "hops": question.hops,
        "split": question.split,
        "fold": question.fold,
        "setting": question.setting,
        "supporting": question.supporting,
        "supporting_sentences": question.supporting_sentences,
        "context": question.context,
        "evidences": question.evidences,
        "decomposition": None
        if steps is None
        else [
            {"question": step.question, "answer": step.answer, "supporting": step.supporting}
            for step in steps
        ],
    }


def _openie_record(passage_id: str, triples: tuple[Triple, ...]) -> dict[str, Any]:
    entities = dict.fromkeys(part for triple in triples for part in (triple.head, triple.tail))
    return {
        "passage_id": passage_id,
        "entities": list(entities),
        "triples": [[triple.head, triple.relation, triple.tail] for triple in triples],
        "triple_sentences": [triple.sentence for triple in triples],
    }
