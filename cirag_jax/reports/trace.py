"""The trace viewer: a run's journal as one self-contained, static HTML page.

The page needs no network and no server. It scales by laziness: every question and every passage is
a data block of its own, which the page parses when it is looked at.

Passages and model output are hostile input. They reach the page only as JSON inside data blocks in
which no ``<`` stands, and the document only as text nodes; a Content-Security-Policy lets no script
run but the page's own, known by its hash, and lets nothing be fetched or sent.
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
from cirag_jax.io import replacing
from cirag_jax.reports import pages
from cirag_jax.runtime.records import JournalReader, Record
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Config, Passage, Prediction, Sentence, Step, Triple, Unit

PAGE = "trace.html"
VERDICTS = ("right", "wrong", "unscored", "failed", "unfinished")


def report(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes ``trace.html`` for the run that ``config.run`` (configs/report.py) names.

    Returns:
      ``page`` (path), ``bytes``, ``num_questions`` and how many questions had each verdict.
    """
    if config.run is None:
        raise UserError(
            "--config.run=WORKDIR is required: a folder of launch/answer.py, launch/distill.py or "
            "launch/compare.py; or --config.runs, several of launch/answer.py."
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
    """Writes a run's page, aside, then renamed; returns the counts of `write_page`.

    ``run`` is a workdir of ``launch/answer.py`` or ``launch/distill.py``, or its
    ``journal.sqlite``; the title is by default the method's name and the workdir's. Exact match by
    ``profile`` says what is right.
    """
    path = pathlib.Path(run).expanduser()
    path = path / JOURNAL if path.is_dir() else path
    with JournalReader(path) as book:
        records, passages = list(book.records()), book.passages()
        method = book.settings.get("method")
    for record in records:
        if not isinstance(record.input, Mapping) or "question" not in record.input:
            raise UserError(f"{path} is not the journal of a run that answers questions.")
    title = title or f"{method or 'trace'}, {path.resolve().parent.name}"
    try:
        with replacing(page) as aside, aside.open("w", encoding="utf-8", newline="\n") as file:
            return write_page(file, title, records, passages, profile)
    except OSError as error:
        raise UserError(f"{page} cannot be written: {error.strerror or error}.") from None
    except sqlite.DAMAGE as error:
        raise sqlite.damaged(path, error) from None


def write_page(
    file: TextIO,
    title: str,
    records: Sequence[Record],
    passages: Mapping[str, Passage],
    profile: str = answers.DEFAULT,
) -> dict[str, int]:
    """Writes the page of ``records``, as `write_trace` does; ``passages`` by id."""
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

# What the list of questions shows and searches.
_LISTED = ("id", "question", "verdict", "granularity", "answer", "answers", "f1", "em")


def _question(record: Record, number: Mapping[str, int], profile: str) -> dict[str, Any]:
    """Everything about a question; passages as their numbers in the page."""
    given: Mapping[str, Any] = record.input
    outcome = record.result(Prediction)
    evidences = [tuple(map(str, fact)) for fact in given.get("evidences") or ()]
    pairs = {endpoints(head, tail) for head, _, tail in evidences}
    supporting = [str(passage_id) for passage_id in given.get("supporting") or ()]
    steps = outcome.steps if outcome else ()
    facts = [unit for step in steps for unit in step.kept if isinstance(unit, Triple)]
    kept = {endpoints(triple.head, triple.tail) for triple in facts}
    gold_sentences = [
        [number[i], sentence]
        for i, sentence in given.get("supporting_sentences") or ()
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
        **asked(record),
        **judged(record, outcome, profile),
        "error": record.error,
        "gold_passages": [number[i] for i in supporting if i in number],
        "gold_missing": [i for i in supporting if i not in number],
        "gold_sentences": gold_sentences,
        "gold_facts": [[*fact, endpoints(fact[0], fact[2]) in kept] for fact in evidences],
        "decomposition": given.get("decomposition") or [],
        "steps": [_step(step, number, is_gold) for step in steps],
        "attempts": [dataclasses.asdict(a) for a in (outcome.attempts if outcome else ())],
        "parse_errors": dict(outcome.parse_errors) if outcome else {},
        "calls": {kind: count for kind, count in record.calls.items() if count},
        "usage": dataclasses.asdict(record.usage),
        "seconds": record.seconds,
    }


def asked(record: Record) -> dict[str, Any]:
    """What a question is, as the pages show it; of every run on it the same."""
    given: Mapping[str, Any] = record.input
    return {
        "id": record.id,
        "question": str(given["question"]),
        "type": given.get("type"),
        "hops": given.get("hops"),
        "answers": [str(gold) for gold in given.get("answers") or ()],
    }


def judged(record: Record, outcome: Prediction | None, profile: str) -> dict[str, Any]:
    """Its answer and one of `VERDICTS`, by exact match of ``profile``."""
    golds = asked(record)["answers"]
    em = f1 = None
    # A run that only collects evidence for distillation reads nothing, which is no wrong answer.
    if outcome is not None and golds and outcome.attempts:
        em = answers.exact_match(outcome.answer, golds, profile)
        f1 = answers.f1(outcome.answer, golds, profile)
    return {
        "answer": outcome.answer if outcome else "",
        "granularity": outcome.granularity if outcome else None,
        "verdict": _verdict(record, em),
        "em": em,
        "f1": f1,
    }


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
    """Head, relation, tail, passage, sentence; of a sentence or a passage: null, null, its id."""
    match unit:
        case Triple():
            source = number.get(unit.passage_id) if unit.passage_id is not None else None
            return [unit.head, unit.relation, unit.tail, source, unit.sentence]
        case Sentence():
            return [None, None, unit.passage_id, number.get(unit.passage_id), unit.index]
    return [None, None, unit, number.get(unit), None]


def _passage(passage: Passage) -> dict[str, Any]:
    # The sentences to which triples point, which need not be the benchmark's.
    sentences = list(sentences_of(passage)) or [passage.text]
    return {"id": passage.id, "title": passage.title, "sentences": sentences}
