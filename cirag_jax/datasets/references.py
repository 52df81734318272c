"""Reference extractions: passages with annotated entities and triples."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cirag_jax.datasets import load
from cirag_jax.datasets.jsonl import OPENIE, ends_of
from cirag_jax.datasets.records import read_lines
from cirag_jax.errors import UserError
from cirag_jax.types import Config, Dataset, NonEmptyStr, Passage, Question, Triple


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A passage with its annotated entities and triples, in their original spelling."""

    passage: Passage
    entities: tuple[str, ...]
    triples: tuple[Triple, ...]


class _Entities(msgspec.Struct):
    passage_id: NonEmptyStr
    entities: tuple[str, ...] | None = None


def select_references(
    data: Config, *, limit: int = 0, seed: int = 0
) -> tuple[tuple[Reference, ...], dict[str, int]]:
    """Selects the passages that occur only in the selected fold (or split), with references.

    A passage occurs in the folds and splits of the questions whose context contains it. Passages
    shared with another fold (or with another split, if ``data.split`` is set) are dropped, so no
    passage is used for both training and evaluation. Passages with an empty reference are dropped,
    because an empty list is more likely a failed extraction than a passage without facts.

    ``limit`` is the size of a random sample; 0 keeps all. ``seed`` is the seed of the order.

    Returns:
      The references in random order, and counts: ``passages`` in the selected contexts, passages
      ``without_triples`` (no reference), ``empty`` (an empty reference), ``shared`` with another
      fold or split, ``kept`` (all others), and ``sampled`` (the returned ones).
    """
    dataset = load.load_dataset(data)
    questions = load.select_questions(dataset, data)
    elsewhere = _contexts([q for q in dataset.questions if _is_other(q, data)])
    entities = _entities(data)
    counts = collections.Counter({"without_triples": 0, "empty": 0, "shared": 0})
    references = []
    for passage_id in _contexts(questions):
        counts["passages"] += 1
        exclusion = _exclusion(passage_id, dataset, elsewhere)
        counts[exclusion or "kept"] += 1
        if exclusion is None:
            triples = dataset.triples[passage_id]
            names = entities.get(passage_id) or tuple(ends_of(triples))
            references.append(Reference(dataset.corpus[passage_id], names, triples))
    if not references:
        raise UserError(
            f"no passage in the contexts of the {len(questions)} selected questions of "
            f"{dataset.name} has triples ({OPENIE} or config.data.triples) and occurs in no other "
            "fold or split"
        )
    order = np.random.default_rng(seed).permutation(len(references))
    sample = order[:limit] if limit else order
    counts["sampled"] = len(sample)
    return tuple(references[index] for index in sample), dict(counts)


def _exclusion(passage_id: str, dataset: Dataset, elsewhere: Mapping[str, None]) -> str | None:
    """Returns the reason to drop a passage, or None."""
    if passage_id not in dataset.triples:
        return "without_triples"
    if not dataset.triples[passage_id]:
        return "empty"
    return "shared" if passage_id in elsewhere else None


def _contexts(questions: Sequence[Question]) -> dict[str, None]:
    """Returns the distinct passage ids of the questions' contexts, in order."""
    return dict.fromkeys(name for question in questions for name in question.context or ())


def _is_other(question: Question, data: Config) -> bool:
    """Returns whether a question is outside the selected fold or split."""
    for field in ("split", "fold"):
        value = getattr(question, field)
        if data[field] and value is not None and value != data[field]:
            return True
    return False


def _entities(data: Config) -> dict[str, tuple[str, ...]]:
    """Returns the entities of each passage in an ``openie.jsonl``."""
    source = data.get("triples") or (Path(data.dir) / OPENIE if data.dir else "")
    file = Path(source).expanduser()
    if file.suffix != ".jsonl" or not file.is_file():
        return {}
    entities: dict[str, tuple[str, ...]] = {}
    for _, row in read_lines(file, _Entities):
        names = (*entities.get(row.passage_id, ()), *(row.entities or ()))
        entities[row.passage_id] = tuple(dict.fromkeys(names))
    return entities
