"""Training data of retrievers: Tevatron's JSON lines, and triplets of sentence-transformers.

Tevatron's rows have ``query_id``, ``query``, ``positive_passages`` and ``negative_passages`` with
``docid``, ``title`` and ``text``. Triplets have ``anchor``, ``positive`` and columns ``negative``,
``negative_1``, ... Both become questions whose ``supporting`` are the positives and whose
``context`` adds the negatives, from which the aligner draws hard negatives of units=passage.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cirag_jax.datasets.formats.base import Draft, Format, Reader, answers_of, id_of, read_passage
from cirag_jax.datasets.formats.files import Source
from cirag_jax.datasets.passages import passage_of
from cirag_jax.datasets.records import convert, field_error
from cirag_jax.io import write_lines
from cirag_jax.types import Dataset, Passage, Question

_SIDES = ("positive_passages", "negative_passages")
_ID_SIDES = ("positive_document_ids", "negative_document_ids")
_ANCHORS = ("anchor", "query", "question", "sentence1")
_POSITIVES = ("positive", "pos", "answer", "sentence2")


class TevatronReader(Reader):
    """Reads rows with passages, or with ids of the passages of a table ``corpus``."""

    repeats = True

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """See `Reader`; a row without a title has the title ""."""
        corpus = self.source.find("corpus")
        if corpus is not None:
            for place, row in self.source.rows(corpus):
                yield place, _passage(place, row)
        for place, row in self.source.rows(*tevatron_tables(self.source)):
            for side in _SIDES:
                yield from _passages(place, row, side)

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; the split of a question is the name of its file."""
        for split, default, (place, row) in self.source.rows_by_split(tevatron_tables(self.source)):
            positives, negatives = (
                [passage.id for _, passage in _passages(place, row, side)]
                or convert(f"{place}: {ids}", row.get(ids) or [], list[str])
                for side, ids in zip(_SIDES, _ID_SIDES, strict=True)
            )
            if not positives:
                self.notes["queries without a positive passage were skipped"] += 1
                continue
            question = Question(
                id=id_of(row, place, "query_id", "id", default=default),
                question=id_of(row, place, "query", "query_text"),
                answers=answers_of(row.get("answers"), place, "answers"),
                split=split,
            )
            yield Draft(place, question, positives, [*positives, *negatives])


class TripletReader(Reader):
    """Reads triplets; rows with the same anchor become one question."""

    repeats = True

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """See `Reader`; the id of a passage is a hash of its text."""
        for place, _, _, positives, negatives in self._triplets():
            for passage in (*positives, *negatives):
                yield place, passage

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; the split of a question is the name of its file."""
        drafts: dict[tuple[str, str], Draft] = {}
        for place, split, anchor, positives, negatives in self._triplets():
            if (draft := drafts.get((split, anchor))) is None:
                question = Question(f"{split}_{len(drafts)}", anchor, (), split=split)
                draft = drafts[split, anchor] = Draft(place, question, [], [])
            assert isinstance(draft.supporting, list) and isinstance(draft.context, list)
            draft.supporting.extend(passage.id for passage in positives)
            draft.context.extend(passage.id for passage in (*positives, *negatives))
        yield from drafts.values()

    def _triplets(self) -> Iterator[tuple[str, str, str, list[Passage], list[Passage]]]:
        """Yields the place, split, anchor, positives and negatives of each row."""
        for table in triplet_tables(self.source):
            fields = self.source.fields(table)
            anchor = next(name for name in _ANCHORS if name in fields)
            positive = next(name for name in _POSITIVES if name in fields)
            for place, row in self.source.rows(table):
                negatives = [name for name in row if name.startswith("neg")]
                yield (
                    place,
                    table.rpartition("/")[2],
                    id_of(row, place, anchor),
                    _texts(place, row, positive),
                    [p for name in negatives for p in _texts(place, row, name)],
                )


def _texts(place: str, row: Mapping[str, Any], field: str) -> list[Passage]:
    """Returns the passages of a field, which is a text, a list of texts, or null."""
    texts = answers_of(row.get(field), place, field)
    if field in _POSITIVES and not texts:
        raise field_error(place, field, "is empty")
    parts = (text.partition("\n") for text in texts)  # As `write_triplets` writes them.
    return [passage_of(a, c) if newline else passage_of("", a) for a, newline, c in parts]


def _passage(place: str, row: Mapping[str, Any]) -> Passage:
    return read_passage(row, place, ("docid", "_id", "id"), ("text", "contents"))


def _passages(place: str, row: Mapping[str, Any], side: str) -> Iterator[tuple[str, Passage]]:
    values = convert(f"{place}: {side}", row.get(side) or [], list[dict[str, Any]])
    for number, value in enumerate(values):
        where = f"{place}: {side}[{number}]"
        yield where, _passage(where, value)


def tevatron_tables(source: Source) -> list[str]:
    """Returns the tables of queries with positive passages."""
    marks = {_SIDES[0], _ID_SIDES[0]}
    return [name for name in source.tables if source.fields(name) & marks]


def triplet_tables(source: Source) -> list[str]:
    """Returns the tables with an anchor and a positive."""
    fields = {name: source.fields(name) for name in source.tables}
    return [name for name, f in fields.items() if f & set(_ANCHORS) and f & {"positive", "pos"}]


# --------------------------------------------------------------------------------------- writing


_Row = tuple[Question, list[Passage], list[Passage]]  # With positive and negative passages.


def _rows(dataset: Dataset) -> dict[str, list[_Row]]:
    """Returns the questions with gold passages, by split."""
    splits: dict[str, list[_Row]] = {}
    for question in dataset.questions:
        if gold := question.supporting:
            positives = [dataset.corpus[i] for i in gold]
            negatives = [dataset.corpus[i] for i in question.context or () if i not in gold]
            rows = splits.setdefault(question.split or "train", [])
            rows.append((question, positives, negatives))
    return splits


def write_tevatron(dataset: Dataset, folder: Path) -> None:
    """Writes a file per split, and ``corpus.jsonl``."""

    def records(passages: list[Passage]) -> list[dict[str, str]]:
        return [{"docid": p.id, "title": p.title, "text": p.text} for p in passages]

    for split, rows in _rows(dataset).items():
        lines = (
            {
                "query_id": question.id,
                "query": question.question,
                "answers": list(question.answers),
                "positive_passages": records(positives),
                "negative_passages": records(negatives),
            }
            for question, positives, negatives in rows
        )
        write_lines(folder / f"{split}.jsonl", lines)
    write_lines(folder / "corpus.jsonl", (records([p])[0] for p in dataset.corpus.values()))


def write_triplets(dataset: Dataset, folder: Path) -> None:
    """Writes a file per split, with a row for each pair of a positive and a negative passage.

    If no question of a split has negatives, its rows are pairs of an anchor and a positive.
    """

    def text(passage: Passage) -> str:
        return f"{passage.title}\n{passage.text}" if passage.title else passage.text

    for split, rows in _rows(dataset).items():
        has_negatives = any(negatives for _, _, negatives in rows)
        lines = (
            {"anchor": question.question, "positive": text(p)}
            | ({"negative": text(n)} if n else {})
            for question, positives, negatives in rows
            for p in positives
            for n in (negatives if has_negatives else [None])
        )
        write_lines(folder / f"{split}.jsonl", lines)


TEVATRON = Format(lambda source: bool(tevatron_tables(source)), TevatronReader, write_tevatron)
TRIPLETS = Format(lambda source: bool(triplet_tables(source)), TripletReader, write_triplets)
