"""HippoRAG and PropRAG: ``X.json``, ``X_corpus.json``, and triples in ``openie_results_*.json``.

The questions are records of HotpotQA and 2WikiMultihopQA (``supporting_facts`` and ``context``), of
MuSiQue (``paragraphs``), or of PopQA and Natural Questions (``paragraphs`` or ``contexts``). They
name gold passages by title and text, never by the ``idx`` of the corpus.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cirag_jax.datasets import jsonl
from cirag_jax.datasets.formats.base import (
    Draft,
    Format,
    Named,
    Reader,
    Triples,
    answers_of,
    id_of,
    text_of,
)
from cirag_jax.datasets.formats.files import Source
from cirag_jax.datasets.records import convert, field_error
from cirag_jax.datasets.triple_files import hipporag_rows, write_hipporag
from cirag_jax.io import write_json
from cirag_jax.types import Count, Dataset, Passage, Question, SubQuestion

_CORPUS = "_corpus"
_HOPS = {"bridge_comparison": 4}


class _Paragraph(msgspec.Struct):
    """A paragraph of a question of MuSiQue, PopQA or Natural Questions."""

    title: str = ""
    text: str | None = None
    paragraph_text: str | None = None
    is_supporting: bool | None = None

    @property
    def named(self) -> Named:
        return Named(self.title, self.text if self.paragraph_text is None else self.paragraph_text)


class _Step(msgspec.Struct):
    """A step of MuSiQue's decomposition."""

    question: str
    answer: str


class HipporagReader(Reader):
    """Reads the data sets of a folder; with several, ids start with the name of theirs."""

    def passages(self) -> Iterator[tuple[str, Passage]]:
        """See `Reader`; in HippoRAG 1, a corpus may be an object of sentences by title."""
        tables = corpora(self.source)
        for table in tables:
            prefix = f"{table.removesuffix(_CORPUS)}/" if len(tables) > 1 else ""
            place = self.source.place(self.source.tables[table][0])
            value = self.source.json(table)
            if isinstance(value, dict):
                value = [
                    {"title": title, "text": "".join(convert(f"{place}: {title}", s, list[str]))}
                    for title, s in value.items()
                ]
            for number, row in enumerate(convert(place, value, list[dict[str, Any]])):
                where = f"{place}[{number}]"
                yield (
                    where,
                    Passage(
                        prefix + id_of(row, where, "idx", default=str(number)),
                        text_of(row, where, "title"),
                        text_of(row, where, "text"),
                    ),
                )

    def drafts(self) -> Iterator[Draft]:
        """See `Reader`; the questions have no split."""
        for table in corpora(self.source):
            name = table.removesuffix(_CORPUS)
            if name in self.source.tables:
                for number, (place, row) in enumerate(self.source.rows(name)):
                    yield _draft(place, row, f"{name}_{number}")

    def triples(self, corpus: Mapping[str, Passage]) -> Triples:
        """See `Reader`; reads every ``openie_results_*.json``."""
        rows = []
        for table in self.source.tables:
            if table.rpartition("/")[2].startswith("openie_results"):
                path = self.source.path / self.source.tables[table][0]
                rows += hipporag_rows(path, corpus.values())
        return jsonl.merged_triples(self.source.path, rows, corpus)


def _draft(place: str, row: Mapping[str, Any], default_id: str) -> Draft:
    kind = row.get("type") if isinstance(row.get("type"), str) else None
    answers = _answers(place, row)
    aliases = answers_of(row.get("answer_aliases"), place, "answer_aliases")
    steps = _convert(place, row, "question_decomposition", list[_Step]) or []
    question = Question(
        id=id_of(row, place, "_id", "id", default=default_id),
        question=id_of(row, place, "question"),
        answers=tuple(dict.fromkeys((*answers, *aliases))),
        type=kind,
        hops=len(steps) or (None if kind is None else _HOPS.get(kind, 2)),
        evidences=_convert(place, row, "evidences", tuple[tuple[str, str, str], ...]),
        decomposition=tuple(SubQuestion(s.question, s.answer) for s in steps) or None,
        aliases=tuple(a for a in aliases if a not in answers) or None,
    )
    if "supporting_facts" in row:
        facts = _convert(place, row, "supporting_facts", list[tuple[str, Count]]) or []
        context = _convert(place, row, "context", list[tuple[str, list[str]]]) or []
        gold = {title for title, _ in facts}
        names = [Named(title, " ".join(sentences)) for title, sentences in context]
        known = {name.title for name in names}
        supporting = [name for name in names if name.title in gold]
        supporting += [Named(title) for title in gold - known]
        return Draft(place, question, supporting, names)
    field = "contexts" if "contexts" in row else "paragraphs"
    paragraphs = _convert(place, row, field, list[_Paragraph])
    if paragraphs is None:
        return Draft(place, question)
    # As in HippoRAG, paragraphs without a mark are gold.
    supporting = [p.named for p in paragraphs if p.is_supporting is not False]
    names = [p.named for p in paragraphs]
    return Draft(place, question, supporting, names if len(supporting) < len(names) else None)


def _answers(place: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the answers, which benchmarks store in different fields."""
    for field in ("answer", "gold_ans", "reference"):
        if field in row:
            return answers_of(row[field], place, field)
    if "obj" not in row:
        raise field_error(place, "answer", "is missing")
    values = []
    for field in ("obj", "possible_answers", "o_wiki_title", "o_aliases"):
        value = row.get(field)
        if isinstance(value, str) and value.startswith("["):
            try:  # PopQA stores lists as text.
                value = json.loads(value)
            except ValueError:
                raise field_error(place, field, "is not a JSON list") from None
        values += answers_of(value, place, field)
    return tuple(dict.fromkeys(values))


def _convert(place: str, row: Mapping[str, Any], field: str, kind: Any) -> Any:
    """Returns a field, or None if it is absent or null."""
    value = row.get(field)
    return None if value is None else convert(f"{place}: field '{field}'", value, kind)


def corpora(source: Source) -> list[str]:
    """Returns the tables of passages, ``X_corpus.json``."""
    return [
        name for name in source.tables if name.endswith(_CORPUS) and source.suffix(name) == ".json"
    ]


def write(dataset: Dataset, folder: Path) -> None:
    """Writes the questions, the corpus, and the extracted triples if there are any."""
    rows = {passage_id: number for number, passage_id in enumerate(dataset.corpus)}
    corpus = [
        {"title": p.title, "text": p.text, "idx": rows[p.id]} for p in dataset.corpus.values()
    ]
    write_json(folder / f"{dataset.name}{_CORPUS}.json", corpus)
    questions = [_question_record(question, dataset) for question in dataset.questions]
    write_json(folder / f"{dataset.name}.json", questions)
    if dataset.triples:
        pairs = ((dataset.corpus[name], found) for name, found in dataset.triples.items())
        write_hipporag(folder / f"openie_results_ner_{dataset.name}.json", pairs)


def _question_record(question: Question, dataset: Dataset) -> dict[str, Any]:
    gold = set(question.supporting or ())
    paragraphs = [
        {
            "title": dataset.corpus[name].title,
            "paragraph_text": dataset.corpus[name].text,
            "is_supporting": name in gold,
        }
        for name in dict.fromkeys((*(question.context or ()), *(question.supporting or ())))
    ]
    aliases = question.aliases or ()
    return {
        "id": question.id,
        "question": question.question,
        "answer": next((a for a in question.answers if a not in aliases), ""),
        "answer_aliases": list(question.answers),
        "paragraphs": paragraphs,
    }


FORMAT = Format(lambda source: bool(corpora(source)), HipporagReader, write)
