"""What a format of another project provides, and how its files become a dataset.

Formats name gold passages by id, by title, or by title and text (`Named`). `resolve` finds them in
the corpus with one pass over it, so a corpus of any size may be converted.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from absl import logging

from cirag_jax.datasets.formats.files import Source
from cirag_jax.datasets.records import field_error
from cirag_jax.io import is_utf8, one_line
from cirag_jax.types import Dataset, Passage, Question, Triple

Triples = Mapping[str, tuple[Triple, ...]]


class Named(NamedTuple):
    """A passage named by its title and, if known, by its text."""

    title: str
    text: str | None = None


class Draft(NamedTuple):
    """A question whose passages are ids or `Named`; None is unknown.

    ``sentences`` are gold sentences, as pairs of a passage and an index.
    """

    place: str
    question: Question
    supporting: Sequence[str | Named] | None = None
    context: Sequence[str | Named] | None = None
    sentences: Sequence[tuple[str | Named, int]] | None = None


class Reader:
    """Reads one source; subclasses override the parts that their format has.

    Attributes:
        repeats: Whether files of the format normally repeat passages.
    """

    repeats: ClassVar[bool] = False

    def __init__(self, source: Source):
        self.source = source
        self.notes: collections.Counter[str] = collections.Counter()
        """Numbers of skipped or changed records, by a description."""

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """Yields places and passages, in file order."""
        yield from ()

    def drafts(self) -> Iterator[Draft]:
        """Yields the questions, in file order."""
        yield from ()

    def triples(self, corpus: Mapping[str, Passage]) -> Triples:
        """Returns extracted triples of passages of ``corpus``."""
        del corpus
        return {}

    def rankings(self) -> Mapping[str, Sequence[str]]:
        """Returns ranked passage ids by question id, if the source has results."""
        return {}


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of another project.

    Attributes:
        recognizes: Whether a source has this format, judged by names and fields of its files.
        reader: Reads a source.
        write: Writes a dataset to a folder; None if the format is only read.
    """

    recognizes: Callable[[Source], bool]
    reader: type[Reader]
    write: Callable[[Dataset, Path], None] | None = None


# --------------------------------------------------------------------------------------- reading


def unique_passages(reader: Reader) -> Iterator[Passage]:
    """Yields the passages; skips repetitions, and raises for other passages with the same id."""
    digests: dict[str, bytes] = {}
    for place, passage in reader.passages():
        digest = _digest(passage.title, passage.text)
        if (earlier := digests.get(passage.id)) is not None:
            if earlier != digest:
                raise field_error(place, "id", f"repeats the id {passage.id!r} with another text")
            reader.notes["repeated passages were skipped"] += not reader.repeats
            continue
        digests[passage.id] = digest
        if not passage.text.strip():
            reader.notes["passages have no text"] += 1
        yield passage


def resolve(
    drafts: Sequence[Draft], passages: Iterable[Passage], notes: collections.Counter[str]
) -> tuple[Question, ...]:
    """Returns the questions with ids of passages.

    A `Named` passage is the one with its title and text, regardless of white space, or else the
    only one with its title. ``supporting`` with an unknown passage becomes None, because a partial
    list would inflate recall; so do ``context`` and ``supporting_sentences``.
    """
    names = [n for d in drafts for n in (*(d.supporting or ()), *(d.context or ()))]
    titles = {name.title for name in names if isinstance(name, Named)}
    ids = {name for name in names if isinstance(name, str)}
    known: set[str] = set()
    by_title: dict[str, list[str]] = collections.defaultdict(list)
    by_text: dict[bytes, str] = {}
    for passage in passages:
        if passage.id in ids:
            known.add(passage.id)
        if passage.title in titles:
            by_title[passage.title].append(passage.id)
            by_text.setdefault(_digest(passage.title, passage.text), passage.id)

    def find(name: str | Named) -> str | None:
        if isinstance(name, str):
            return name if name in known else None
        exact = None if name.text is None else by_text.get(_digest(name.title, name.text))
        same_title = by_title.get(name.title, ())
        return exact or (same_title[0] if len(same_title) == 1 else None)

    def find_all(names: Sequence[str | Named] | None) -> tuple[str, ...] | None:
        found = [find(name) for name in names or ()]
        return tuple(dict.fromkeys(map(str, found))) if found and None not in found else None

    questions: dict[str, Question] = {}
    for draft in drafts:
        question = draft.question
        if question.id in questions:
            raise field_error(draft.place, "id", f"repeats the id {question.id!r}")
        supporting, context = find_all(draft.supporting), find_all(draft.context)
        pairs = [(find(name), index) for name, index in draft.sentences or ()]
        sentences = None
        if supporting and pairs and all(name in supporting for name, _ in pairs):
            sentences = tuple(dict.fromkeys((str(name), index) for name, index in pairs))
        if draft.supporting and supporting is None:
            notes["questions have a gold passage that the corpus does not have once"] += 1
        questions[question.id] = dataclasses.replace(
            question, supporting=supporting, context=context, supporting_sentences=sentences
        )
    return tuple(questions.values())


def report(path: Path, notes: Mapping[str, int]) -> None:
    """Logs the numbers of skipped and changed records."""
    for note, count in (+collections.Counter(notes)).items():
        logging.warning("%s: %s %s.", path, f"{count:,}", note)


def _digest(title: str, text: str) -> bytes:
    return hashlib.md5(one_line(f"{title}\n{text}").encode()).digest()


# ---------------------------------------------------------------------------------------- fields


def text_of(row: Mapping[str, Any], place: str, *fields: str, default: str | None = None) -> str:
    """Returns the text of the first of ``fields`` that a record has; numbers become text.

    Without ``default``, a missing or null field raises UserError.
    """
    for field in fields:
        if (value := row.get(field)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise field_error(place, field, f"must be a string, not {_kind(value)}")
        return _checked(place, field, str(value))
    if default is not None:
        return default
    problem = "is null" if any(field in row for field in fields) else "is missing"
    raise field_error(place, fields[0], problem)


def id_of(row: Mapping[str, Any], place: str, *fields: str, default: str | None = None) -> str:
    """Returns a nonblank id; see `text_of`."""
    value = text_of(row, place, *fields, default=default)
    if not value.strip():
        raise field_error(place, fields[0], "is empty")
    return value


def read_passage(
    row: Mapping[str, Any], place: str, ids: Sequence[str], texts: Sequence[str]
) -> Passage:
    """Returns the passage of a record, given its fields of ids and texts; a title is optional."""
    return Passage(
        id_of(row, place, *ids),
        text_of(row, place, "title", default=""),
        text_of(row, place, *texts),
    )


def answers_of(value: Any, place: str, field: str) -> tuple[str, ...]:
    """Returns answers from a string, a number, or nested lists of them; null and "" are none."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        parts = (answers_of(v, place, f"{field}[{i}]") for i, v in enumerate(value))
        return tuple(dict.fromkeys(answer for part in parts for answer in part))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problem = f"must be a string, a number or a list, not {_kind(value)}"
        raise field_error(place, field, problem)
    text = _checked(place, field, str(value))
    return (text,) if text.strip() else ()


def _checked(place: str, field: str, text: str) -> str:
    if not is_utf8(text):
        raise field_error(place, field, "contains half of a surrogate pair; replace it")
    return text


def _kind(value: Any) -> str:
    names = {bool: "a boolean", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
