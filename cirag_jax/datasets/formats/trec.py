"""TREC's run files and qrels, as read and written by trec_eval and ir_measures.

A line of a run is ``question Q0 passage rank score tag``, one of qrels is ``question 0 passage
relevance``. Columns are separated by white space, so white space in an id is written as %XX.
"""

import collections
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from cirag_jax.datasets.formats.files import Source
from cirag_jax.errors import UserError
from cirag_jax.io import write_text
from cirag_jax.types import Question

RUN, QRELS = "run.trec", "qrels.trec"  # The files that we write.
SUFFIXES = (".qrels", ".txt", ".trec")


def write_run(path: Path, rankings: Mapping[str, Sequence[str]], tag: str) -> None:
    """Writes ranked passage ids by question id; scores fall from the number of passages to 1."""
    write_text(
        path,
        (
            f"{escape(question)} Q0 {escape(passage)} {rank} {len(ranked) + 1 - rank} {tag}\n"
            for question, ranked in rankings.items()
            for rank, passage in enumerate(dict.fromkeys(ranked), start=1)
        ),
    )


def write_qrels(path: Path, questions: Iterable[Question]) -> None:
    """Writes the gold passages of the questions that have any."""
    write_text(
        path,
        (
            f"{escape(question.id)} 0 {escape(passage)} 1\n"
            for question in questions
            for passage in dict.fromkeys(question.supporting or ())
        ),
    )


def read_run(
    path: Path, questions: Collection[str] = (), passages: Collection[str] = ()
) -> dict[str, list[str]]:
    """Returns ranked passage ids by question id, best first, as trec_eval orders them.

    trec_eval ignores ranks, sorts by score, and sorts equal scores by id, descending. ``questions``
    and ``passages`` are known ids, to which ids with %XX are mapped back.
    """
    source = Source(path)
    if not source.path.is_file() or len(source.tables) != 1:
        raise UserError(f"{path} must be a file.")
    (scored,) = source.tables
    names, known = _originals(questions), _originals(passages)
    scores: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for place, columns in source.columns(scored):
        if len(columns) != 6:
            raise UserError(
                f"{place}: has {len(columns)} columns; a run has 6 (question, Q0, passage, rank, "
                "score, tag)."
            )
        question, _, passage, _, score, _ = columns
        of_question = scores[names.get(question, question)]
        passage = known.get(passage, passage)
        if passage in of_question:
            raise UserError(f"{place}: ranks passage {passage!r} of question {question!r} twice.")
        of_question[passage] = _number(place, "score", score)
    if not scores:
        raise UserError(f"{path} is empty.")
    return {
        question: sorted(found, key=lambda name: (found[name], name), reverse=True)
        for question, found in scores.items()
    }


def judgements(source: Source, table: str) -> Iterator[tuple[str, str, str, float]]:
    """Yields the place, question, passage and relevance of every line of qrels."""
    for place, columns in source.columns(table):
        if len(columns) != 4:
            raise UserError(
                f"{place}: has {len(columns)} columns; qrels have 4 (question, 0, passage, "
                "relevance)."
            )
        question, _, passage, score = columns
        yield place, question, passage, _number(place, "relevance", score)


def escape(name: str) -> str:
    """Returns an id without white space; other ids are unchanged."""
    if not any(char.isspace() for char in name):
        return name
    return "".join(quote(char) if char.isspace() or char == "%" else char for char in name)


def _originals(names: Collection[str]) -> dict[str, str]:
    changed = ((escape(name), name) for name in names)
    return {escaped: name for escaped, name in changed if escaped != name}


def _number(place: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(f"{place}: {name} must be a number, not {text!r}.")
    return value
