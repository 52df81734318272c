"""The dataset folder: ``questions.jsonl``, ``corpus.jsonl`` and optionally ``openie.jsonl``.

This is the bring-your-own-corpus format; ``docs/data.md`` describes it for users. Reading is
strict: whatever could silently change a result (a dangling passage id, a number where text is
due) stops with one sentence that names file, line and field.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from cirag_jax.graph.provenance import source_sentence
from cirag_jax.types import Dataset, Passage, Question, SubQuestion, Triple

QUESTIONS = "questions.jsonl"
CORPUS = "corpus.jsonl"
OPENIE = "openie.jsonl"

_CONTENTS = f"a dataset folder holds {QUESTIONS} and {CORPUS}"

_JSON_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


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
    corpus = _read_corpus(folder / CORPUS)
    questions = _read_questions(folder / QUESTIONS, corpus)
    openie = folder / OPENIE
    triples = _read_openie(openie, corpus) if openie.exists() else {}
    return Dataset(folder.resolve().name, questions, corpus, triples)


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
        _write_lines(folder / CORPUS, map(_passage_record, dataset.corpus.values()))
        if dataset.triples:
            rows = (_openie_record(key, value) for key, value in dataset.triples.items())
            _write_lines(folder / OPENIE, rows)
        _write_lines(folder / QUESTIONS, map(_question_record, dataset.questions))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}.") from error


# ---------------------------------------------------------------------------------- the three files


def _read_corpus(path: Path) -> dict[str, Passage]:
    corpus: dict[str, Passage] = {}
    for row in _rows(path):
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


def _read_questions(path: Path, corpus: Mapping[str, Passage]) -> tuple[Question, ...]:
    questions: dict[str, Question] = {}
    out_of_range = 0
    for row in _rows(path):
        pairs = row.pairs("supporting_sentences", corpus)
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
            supporting=row.passage_ids("supporting", corpus),
            supporting_sentences=pairs,
            context=row.passage_ids("context", corpus),
            evidences=row.evidences("evidences"),
            decomposition=row.decomposition("decomposition", corpus),
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
    for row in _rows(path):
        passage_id = row.text("passage_id", filled=True)
        row.check_known("passage_id", passage_id, corpus)
        parts = row.maybe("triples", list)
        if parts is None:  # unknown, so this passage counts as never extracted
            continue
        places = row.triple_sentences("triple_sentences", len(parts))
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


# ------------------------------------------------------------------------------------- one record


class _Row:
    """A JSON object with its place, and typed access whose errors name file, line and field."""

    __slots__ = ("line", "path", "record")

    def __init__(self, path: Path, line: int, record: dict[str, Any]):
        self.path, self.line, self.record = path, line, record

    def error(self, field: str, problem: str) -> UserError:
        return UserError(f"{self.path}:{self.line}: field '{field}' {problem}.")

    def check(self, field: str, value: object, kind: type) -> Any:
        # A JSON boolean is a Python int, but never a count or an index.
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        name = _JSON_NAMES.get(type(value), "something else")
        raise self.error(field, f"must be {_JSON_NAMES[kind]}, not {name}")

    def check_known(self, field: str, passage_id: str, corpus: Mapping[str, Passage]) -> None:
        if passage_id not in corpus:
            raise self.error(field, f"names passage {passage_id!r}, which {CORPUS} does not have")

    def required(self, field: str, kind: type) -> Any:
        if field not in self.record:
            raise self.error(field, "is missing")
        return self.check(field, self.record[field], kind)

    def maybe(self, field: str, kind: type) -> Any:
        value = self.record.get(field)
        return None if value is None else self.check(field, value, kind)

    def text(self, field: str, *, filled: bool = False) -> str:
        value = self.required(field, str)
        if filled and not value.strip():
            raise self.error(field, "is empty")
        return value

    def maybe_text(self, field: str) -> str | None:
        return self.maybe(field, str)

    def maybe_count(self, field: str) -> int | None:
        value = self.maybe(field, int)
        if value is not None and value < 0:
            raise self.error(field, f"must not be negative, but is {value}")
        return value

    def each(self, field: str, values: list[Any], kind: type) -> tuple[Any, ...]:
        # The first test is the fast path: exact types need no message and no loop in Python.
        if all(type(value) is kind for value in values):
            return tuple(values)
        return tuple(self.check(f"{field}[{i}]", value, kind) for i, value in enumerate(values))

    def texts(self, field: str, *, required: bool = False) -> tuple[str, ...] | None:
        values = self.required(field, list) if required else self.maybe(field, list)
        return None if values is None else self.each(field, values, str)

    def passage_ids(self, field: str, corpus: Mapping[str, Passage]) -> tuple[str, ...] | None:
        ids = self.texts(field)
        for i, passage_id in enumerate(ids or ()):
            self.check_known(f"{field}[{i}]", passage_id, corpus)
        return ids

    def pairs(
        self, field: str, corpus: Mapping[str, Passage]
    ) -> tuple[tuple[str, int], ...] | None:
        values = self.maybe(field, list)
        if values is None:
            return None
        pairs = []
        for i, value in enumerate(values):
            place = f"{field}[{i}]"
            if len(self.check(place, value, list)) != 2:
                raise self.error(place, "must be a pair of passage id and sentence index")
            passage_id = self.check(f"{place}[0]", value[0], str)
            sentence = self.check(f"{place}[1]", value[1], int)
            self.check_known(f"{place}[0]", passage_id, corpus)
            if sentence < 0:
                raise self.error(f"{place}[1]", f"must not be negative, but is {sentence}")
            pairs.append((passage_id, sentence))
        return tuple(pairs)

    def evidences(self, field: str) -> tuple[tuple[str, str, str], ...] | None:
        values = self.maybe(field, list)
        if values is None:
            return None
        triples = []
        for i, value in enumerate(values):
            place = f"{field}[{i}]"
            if len(self.check(place, value, list)) != 3:
                raise self.error(place, "must be a triple of head, relation and tail")
            head, relation, tail = self.each(place, value, str)
            triples.append((head, relation, tail))
        return tuple(triples)

    def decomposition(
        self, field: str, corpus: Mapping[str, Passage]
    ) -> tuple[SubQuestion, ...] | None:
        values = self.maybe(field, list)
        if values is None:
            return None
        steps = []
        for i, value in enumerate(values):
            place = f"{field}[{i}]"
            step = self.check(place, value, dict)
            for key in ("question", "answer"):
                if key not in step:
                    raise self.error(f"{place}.{key}", "is missing")
                self.check(f"{place}.{key}", step[key], str)
            supporting = step.get("supporting")
            if supporting is not None:
                self.check(f"{place}.supporting", supporting, str)
                self.check_known(f"{place}.supporting", supporting, corpus)
            steps.append(SubQuestion(step["question"], step["answer"], supporting))
        return tuple(steps)

    def triple_sentences(self, field: str, count: int) -> list[int | None] | None:
        values = self.maybe(field, list)
        if values is None:
            return None
        if len(values) != count:
            raise self.error(field, f"must have one entry per triple ({count}), not {len(values)}")
        for i, value in enumerate(values):
            if value is not None and self.check(f"{field}[{i}]", value, int) < 0:
                raise self.error(f"{field}[{i}]", f"must not be negative, but is {value}")
        return values


def _rows(path: Path) -> Iterator[_Row]:
    """The records of a JSON-lines file; blank lines are skipped, an empty file is an error."""
    count = 0
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                count += 1
                yield _Row(path, line, _record(path, line, raw))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not count:
        raise UserError(f"{path} is empty.")


def _record(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    try:
        # The first line may begin with the byte-order mark that some Windows editors write.
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{line}: byte {error.start + 1} is not valid UTF-8.") from error
    try:
        record = json.loads(text)
        if "\\u" in text:  # an escaped half of a surrogate pair parses, but is no text
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
        raise UserError(f"{path}:{line}: invalid or truncated JSON ({reason}).") from error
    except (UnicodeEncodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}:{line}: unusable JSON ({type(error).__name__}).") from error
    if not isinstance(record, dict):
        kind = _JSON_NAMES.get(type(record), "something else")
        raise UserError(f"{path}:{line}: must be a JSON object, not {kind}.")
    return record


# ---------------------------------------------------------------------------------------- writing


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


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
