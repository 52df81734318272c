"""Folders of HF ``datasets`` and other tables whose columns have usual names.

Reads what ``Dataset.save_to_disk`` wrote (Arrow), and Parquet, JSON or separated values. A table
with questions has a column ``question`` or ``query``, one with passages ``text``, ``contents`` or
``passage``.
"""

from collections.abc import Iterator

from cirag_jax.datasets.formats.base import Draft, Format, Reader, answers_of, id_of, read_passage
from cirag_jax.datasets.formats.files import Source
from cirag_jax.datasets.records import convert
from cirag_jax.types import Passage, Question

_QUESTION = ("question", "query")
_ANSWERS = ("answers", "golden_answers", "answer")
_TEXT = ("text", "contents", "passage")
_GOLD = ("supporting", "gold_ids", "positive_ids")
_ID = ("id", "_id", "docid", "passage_id")


class TableReader(Reader):
    """Reads questions and passages from any tables."""

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """See `Reader`."""
        for table in self.source.tables:
            fields = self.source.fields(table)
            if not fields & set(_QUESTION) and fields & set(_TEXT) and fields & set(_ID):
                for place, row in self.source.rows(table):
                    yield place, read_passage(row, place, _ID, _TEXT)

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; the split of a question is the name of its table."""
        for split, default, (place, row) in self.source.rows_by_split(question_tables(self.source)):
            field = next((name for name in _ANSWERS if name in row), _ANSWERS[0])
            value = row.get(field)
            if isinstance(value, dict):  # SQuAD: {"text": [...], "answer_start": [...]}
                value = value.get("text", value.get("aliases"))
            gold = next((row[name] for name in _GOLD if row.get(name)), [])
            question = Question(
                id=id_of(row, place, *_ID, default=default),
                question=id_of(row, place, *_QUESTION),
                answers=answers_of(value, place, field),
                split=split,
            )
            yield Draft(place, question, convert(place, gold, list[str]))


def question_tables(source: Source) -> list[str]:
    """Returns the tables of questions."""
    return [name for name in source.tables if source.fields(name) & set(_QUESTION)]


def _recognizes(source: Source) -> bool:
    kinds = {source.suffix(name) for name in source.tables}
    return bool(kinds & {".arrow", ".parquet"}) and bool(question_tables(source))


FORMAT = Format(_recognizes, TableReader)
