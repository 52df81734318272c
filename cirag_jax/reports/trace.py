"""The trace viewer: a run's journal as one self-contained, static HTML page.

Each question and each passage is a separate data block, which is parsed only when it is shown.

Passages and model output are untrusted. They are JSON without ``<`` in data blocks, and the page
inserts them only as text nodes. See `pages` for its Content-Security-Policy.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from cirag_jax import sqlite
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from cirag_jax.evaluation import answers
from cirag_jax.evaluation.evidence import endpoints
from cirag_jax.io import replacing, writing
from cirag_jax.reports import pages
from cirag_jax.runtime.records import JournalReader, Record
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Config, Passage, Prediction, Question, Sentence, Step, Triple, Unit

PAGE = "trace.html"
VERDICTS = ("right", "wrong", "unscored", "failed", "unfinished")


def report(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes ``trace.html`` for the run ``config.run`` (configs/report.py).

    Returns:
      ``page`` (path), ``bytes``, ``num_questions`` and the number of questions with each verdict.
    """
    if config.run is None:
        raise UserError(
            "--config.run=WORKDIR is required: a workdir of launch/answer.py, launch/distill.py or "
            "launch/compare.py; or --config.runs, several workdirs of launch/answer.py."
        )
    answers.check_profile(config.profile)
    page = workdir / PAGE
    counts = write_trace(config.run, page, title=config.title, profile=config.profile)
    return {"page": str(page), "bytes": page.stat().st_size, **counts}


def write_trace(
    run: str | os.PathLike[str],
    page: pathlib.Path,
    *,
    title: str | None = None,
    profile: str = answers.DEFAULT,
) -> dict[str, int]:
    """Writes a run's page atomically; returns the counts of `write_page`.

    Args:
      run: a workdir of ``launch/answer.py`` or ``launch/distill.py``, or its ``journal.sqlite``.
      page: path of the page.
      title: title of the page; by default, the names of the method and the workdir.
      profile: answer scorer; an answer is right if its exact match is 1.
    """
    path = pathlib.Path(run).expanduser()
    path = path / JOURNAL if path.is_dir() else path
    with JournalReader(path) as journal:
        records, passages = list(journal.records()), journal.passages()
        method = journal.settings.get("method")
    for record in records:
        if not isinstance(record.input, Mapping) or "question" not in record.input:
            raise UserError(f"{path} is not the journal of a run that answers questions.")
    title = title or f"{method or 'trace'}, {path.resolve().parent.name}"
    try:
        with (
            writing(page),
            replacing(page) as temporary,
            temporary.open("w", encoding="utf-8", newline="\n") as file,
        ):
            return write_page(file, title, records, passages, profile)
    except sqlite.DAMAGE as error:
        raise sqlite.damaged(path, error) from None


def write_page(
    file: TextIO,
    title: str,
    records: Sequence[Record],
    passages: Mapping[str, Passage],
    profile: str = answers.DEFAULT,
) -> dict[str, int]:
    """Writes the page of ``records``; returns the number of questions, in total and by verdict.

    The keys of ``passages`` are their ids. For the other arguments, see `write_trace`.
    """
    number = {passage_id: index for index, passage_id in enumerate(passages)}
    before, after = pages.template(
        "trace.html", title, ["page.css", "trace.css"], ["page.js", "trace.js"]
    )
    file.write(before)
    rows = []
    for index, record in enumerate(records):
        question = _question(record, number, profile)
        file.write(pages.data_block(f"q{index}", question))
        rows.append({key: question[key] for key in _LISTED})
    for passage in passages.values():
        file.write(pages.data_block(f"p{number[passage.id]}", _passage(passage)))
    file.write(pages.data_block("index", {"title": title, "questions": rows}))
    file.write(after)
    verdicts = [row["verdict"] for row in rows]
    return {"num_questions": len(rows), **{name: verdicts.count(name) for name in VERDICTS}}


# ------------------------------------------------------------------------------------- the data

# Fields that the list of questions shows and searches.
_LISTED = ("id", "question", "verdict", "granularity", "answer", "answers", "f1", "em")


def _question(record: Record, number: Mapping[str, int], profile: str) -> dict[str, Any]:
    """Returns all data of a question; numbers of data blocks stand for passages."""
    question: Mapping[str, Any] = record.input
    prediction = record.result(Prediction, partial=True)
    evidences = [tuple(map(str, fact)) for fact in question.get("evidences") or ()]
    pairs = {endpoints(head, tail) for head, _, tail in evidences}
    supporting = [str(passage_id) for passage_id in question.get("supporting") or ()]
    steps = prediction.steps if prediction else ()
    facts = [unit for step in steps for unit in step.kept if isinstance(unit, Triple)]
    kept = {endpoints(triple.head, triple.tail) for triple in facts}
    gold_sentences = [
        [number[i], sentence]
        for i, sentence in question.get("supporting_sentences") or ()
        if i in number
    ]

    def is_gold(unit: Unit) -> bool:
        match unit:
            case Triple():
                return bool(pairs) and endpoints(unit.head, unit.tail) in pairs
            case Sentence():
                return [number.get(unit.passage_id), unit.index] in gold_sentences
        return unit in supporting

    return {
        **question_fields(record),
        **answer_fields(record, prediction, profile),
        "error": record.error,
        "gold_passages": [number[i] for i in supporting if i in number],
        "gold_missing": [i for i in supporting if i not in number],
        "gold_sentences": gold_sentences,
        "gold_facts": [[*fact, endpoints(fact[0], fact[2]) in kept] for fact in evidences],
        "decomposition": question.get("decomposition") or [],
        "steps": [_step(step, number, is_gold) for step in steps],
        "attempts": [dataclasses.asdict(a) for a in (prediction.attempts if prediction else ())],
        "parse_errors": dict(prediction.parse_errors) if prediction else {},
        "calls": {kind: count for kind, count in record.calls.items() if count},
        "usage": dataclasses.asdict(record.usage),
        "seconds": record.seconds,
    }


def question_fields(record: Record) -> dict[str, Any]:
    """Returns the fields of a question that are the same in all runs."""
    question: Mapping[str, Any] = record.input
    return {
        "id": record.id,
        "question": str(question["question"]),
        "type": question.get("type"),
        "hops": question.get("hops"),
        "answers": [str(gold) for gold in question.get("answers") or () if str(gold).strip()],
    }


def answer_fields(record: Record, prediction: Prediction | None, profile: str) -> dict[str, Any]:
    """Returns the answer, its scores and one of `VERDICTS`."""
    golds = _golds(record, profile)
    em = f1 = None
    # Runs that only collect evidence for distillation have no attempts and thus no answers.
    if record.has_succeeded and prediction and golds and prediction.attempts:
        em = answers.exact_match(prediction.answer, golds, profile)
        f1 = answers.f1(prediction.answer, golds, profile)
    return {
        "answer": prediction.answer if prediction else "",
        "granularity": prediction.granularity if prediction and record.has_succeeded else None,
        "verdict": _verdict(record, em),
        "em": em,
        "f1": f1,
    }


def _golds(record: Record, profile: str) -> tuple[str, ...]:
    fields, aliases = question_fields(record), record.input.get("aliases")
    golds, aliases = tuple(fields["answers"]), None if aliases is None else tuple(aliases)
    question = Question(record.id, "", golds, hops=fields["hops"], aliases=aliases)
    return answers.golds_of(question, profile)


def _verdict(record: Record, em: float | None) -> str:
    if record.error is not None:
        return "failed"
    if record.outcome is None:
        return "unfinished"
    if em is None:
        return "unscored"
    return "right" if em else "wrong"


def _step(step: Step, number: Mapping[str, int], is_gold: Callable[[Unit], bool]) -> dict[str, Any]:
    return {
        "query": step.query,
        "more_queries": list(step.more_queries),
        "passages": [number[i] for i in step.passages if i in number],
        "candidates": [[*_unit(unit, number), is_gold(unit)] for unit in step.candidates],
        "scores": list(step.scores),
        "thought": step.thought,
        "kept": [[*_unit(unit, number), is_gold(unit)] for unit in step.kept],
        "next_query": step.next_query,
        "response": step.response,
        "notes": dict(step.notes),
    }


def _unit(unit: Unit, number: Mapping[str, int]) -> list[Any]:
    """Returns [head, relation, tail, passage number, sentence index].

    Sentences and passages have no head and relation, and their passage id as the tail.
    """
    match unit:
        case Triple():
            source = number.get(unit.passage_id) if unit.passage_id is not None else None
            return [unit.head, unit.relation, unit.tail, source, unit.sentence]
        case Sentence():
            return [None, None, unit.passage_id, number.get(unit.passage_id), unit.index]
    return [None, None, unit, number.get(unit), None]


def _passage(passage: Passage) -> dict[str, Any]:
    # Triples refer to these sentences, which may differ from the benchmark's.
    sentences = list(sentences_of(passage)) or [passage.text]
    return {"id": passage.id, "title": passage.title, "sentences": sentences}
