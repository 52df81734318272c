"""Files of reasoning chains: those of ``configs/chains.py``, and KiRAG's training file.

KiRAG's ``train_aligner.json`` is a list of questions with ``supporting_triples``, the chain, and
``hard_negative_triples``, lists of negatives by document. The triples are objects with ``text``.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from cirag_jax.datasets.chains import Chain, Unit, triple_text
from cirag_jax.datasets.records import convert, field_error, read_lines
from cirag_jax.errors import UserError
from cirag_jax.io import read_json, say, write_lines
from cirag_jax.types import Dataset, NonEmptyStr, Question, Triple, UnitInterval

FILE = "chains.jsonl"


class ChainRecord(msgspec.Struct, kw_only=True):
    """A line of ``chains.jsonl``: a chain from which the reader answered correctly.

    Attributes:
      steps: the triples of the chain, in order.
      rank: number of more probable chains, which gave no correct answer.
      probability: the chain's probability.
      answer: the reader's answer.
    """

    question_id: NonEmptyStr
    question: NonEmptyStr
    steps: tuple[Triple, ...]
    rank: int = 0
    probability: UnitInterval = 0.0
    answer: str = ""


class _Text(msgspec.Struct):
    text: NonEmptyStr
    title: str = ""


class _KiragRecord(msgspec.Struct):
    id: NonEmptyStr
    question: NonEmptyStr
    supporting_triples: list[_Text]
    hard_negative_triples: dict[str, list[_Text]] = {}


class FileChain(NamedTuple):
    """A chain from a file, and its negatives; None are those of the question's passages."""

    question_id: str
    steps: tuple[Unit, ...]
    negatives: tuple[Unit, ...] | None = None


def write_chains(path: Path, chains: Iterable[ChainRecord]) -> None:
    """Writes one chain per line, atomically."""
    write_lines(path, map(msgspec.to_builtins, chains))


def read_chains(source: str) -> dict[str, FileChain]:
    """Reads chains by question id from a workdir of ``configs/chains.py``, or one of the files.

    Raises `UserError` for other files, among them pickles, which are never read.
    """
    path = Path(source).expanduser()
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"config.data.chains: {path} does not exist; launch/distill.py --config=configs/"
            "chains.py writes it."
        )
    readers = {".jsonl": _own_chains, ".json": _kirag_chains}
    if path.suffix not in readers:
        raise UserError(
            f"config.data.chains: {path} must be a {FILE} or KiRAG's train_aligner.json; other "
            "files, such as pickles, are not read."
        )
    chains: dict[str, FileChain] = {}
    for place, chain in readers[path.suffix](path):
        if chain.question_id in chains:
            raise field_error(place, "question id", f"repeats {chain.question_id!r}")
        texts = collections.Counter(step.text for step in chain.steps)
        repeated = next((text for text, count in texts.items() if count > 1), None)
        if not texts or repeated is not None:
            problem = "is empty" if repeated is None else f"repeats {repeated!r}"
            raise field_error(place, "the chain", problem)
        chains[chain.question_id] = chain
    if not chains:
        raise UserError(f"config.data.chains: {path} has no chains.")
    return chains


def _own_chains(path: Path) -> Iterator[tuple[str, FileChain]]:
    for place, record in read_lines(path, ChainRecord):
        for step in record.steps:
            if step.passage_id is None:
                raise field_error(place, "steps", "has a triple without a passage")
        units = tuple(Unit(triple_text(step), str(step.passage_id)) for step in record.steps)
        yield place, FileChain(record.question_id, units)


def _kirag_chains(path: Path) -> Iterator[tuple[str, FileChain]]:
    records = read_json(path)
    if not isinstance(records, list):
        raise UserError(f"{path}: expected KiRAG's list of questions.")
    for number, value in enumerate(records, start=1):
        place = f"{path}: question {number}"
        record = convert(place, value, _KiragRecord)
        negatives = (_unit(t) for group in record.hard_negative_triples.values() for t in group)
        units = tuple(map(_unit, record.supporting_triples))
        yield place, FileChain(record.id, units, tuple(negatives))


def _unit(triple: _Text) -> Unit:
    return Unit(triple.text, triple.title)


def chains_of_files(
    chains: Mapping[str, FileChain], dataset: Dataset, questions: Iterable[Question]
) -> tuple[list[Chain], dict[str, tuple[Unit, ...]]]:
    """Returns the chains of the questions that have one, and the negatives of the chains.

    A step follows the step before it, except in comparison questions, whose steps have no order.
    """
    asked = list(questions)
    found = [(q, chains[q.id]) for q in asked if q.id in chains]
    if asked and not found:
        raise UserError(
            f"config.data.chains has no chain of the {len(asked)} questions of {dataset.name}; its "
            f"first question is {next(iter(chains))!r}, not {asked[0].id!r}."
        )
    say(
        f"{dataset.name}: {len(found)} of {len(asked)} questions have a chain in config.data.chains"
    )
    result = []
    for question, chain in found:
        comparison = question.type == "comparison"
        parents = tuple(
            () if comparison or not step else (step - 1,) for step in range(len(chain.steps))
        )
        result.append(Chain(question.id, question.question, chain.steps, parents, comparison))
    return result, {q.id: c.negatives for q, c in found if c.negatives is not None}
