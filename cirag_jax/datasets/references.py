"""Reference extractions: passages with the entities and triples that somebody listed for them."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cirag_jax.datasets import load
from cirag_jax.datasets.jsonl import OPENIE
from cirag_jax.datasets.records import read_lines
from cirag_jax.errors import UserError
from cirag_jax.types import Config, Dataset, NonEmptyStr, Passage, Question, Triple


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A passage, and what is stated to be in it, surfaces as they were written."""

    passage: Passage
    entities: tuple[str, ...]
    triples: tuple[Triple, ...]


class _Entities(msgspec.Struct):
    passage_id: NonEmptyStr
    entities: tuple[str, ...] | None = None


def select_references(
    data: Config, *, limit: int = 0, seed: int = 0
) -> tuple[tuple[Reference, ...], dict[str, int]]:
    """The passages of one fold (or split) alone, with their references.

    A passage belongs to the questions in whose context it stands. One that also stands in the
    context of a question of another fold (of another split, where ``data.split`` chooses) belongs
    to neither: it is trained on nowhere and measured on nowhere. So is one whose reference lists
    nothing, since a list that an extractor left empty is likelier a failure than a finding.

    ``limit`` takes a sample of so many passages, by ``seed``; 0: all.

    Returns:
      The references in a seeded order, and counts: ``passages`` of the selected contexts,
      ``without_triples`` (no reference), ``empty`` (a reference of nothing), ``shared`` with
      another fold, ``kept`` of the rest, ``sampled`` of these.
    """
    dataset = load.load_dataset(data)
    chosen = load.select_questions(dataset, data)
    theirs = _contexts([q for q in dataset.questions if _is_other(q, data)])
    entities = _entities(data)
    counts = collections.Counter({"without_triples": 0, "empty": 0, "shared": 0})
    found = []
    for name in _contexts(chosen):
        counts["passages"] += 1
        why = _why_not(name, dataset, theirs)
        counts[why or "kept"] += 1
        if why is None:
            triples = dataset.triples[name]
            listed = entities.get(name) or _ends(triples)
            found.append(Reference(dataset.corpus[name], listed, triples))
    if not found:
        raise UserError(
            f"no passage in the contexts of the {len(chosen)} selected questions of {dataset.name} "
            f"has triples ({OPENIE}) and belongs to them alone"
        )
    order = np.random.default_rng(seed).permutation(len(found))
    sample = order[:limit] if limit else order
    counts["sampled"] = len(sample)
    return tuple(found[index] for index in sample), dict(counts)


def _why_not(name: str, dataset: Dataset, theirs: Mapping[str, None]) -> str | None:
    if name not in dataset.triples:
        return "without_triples"
    if not dataset.triples[name]:
        return "empty"
    return "shared" if name in theirs else None


def _contexts(questions: Sequence[Question]) -> dict[str, None]:
    """Passage ids of their contexts, in order, each once."""
    return dict.fromkeys(name for question in questions for name in question.context or ())


def _is_other(question: Question, data: Config) -> bool:
    """Whether a question is of another fold or split than the one that was asked for."""
    for field in ("split", "fold"):
        value = getattr(question, field)
        if data[field] and value is not None and value != data[field]:
            return True
    return False


def _entities(data: Config) -> dict[str, tuple[str, ...]]:
    """The entities that the file lists, by passage."""
    file = Path(data.dir or "").expanduser() / OPENIE
    if not data.dir or not file.is_file():
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for _, row in read_lines(file, _Entities):
        known = (*found.get(row.passage_id, ()), *(row.entities or ()))
        found[row.passage_id] = tuple(dict.fromkeys(known))
    return found


def _ends(triples: Sequence[Triple]) -> tuple[str, ...]:
    """Heads and tails: the entities of a file that lists none."""
    return tuple(dict.fromkeys(name for triple in triples for name in (triple.head, triple.tail)))
