"""Loads the dataset of ``config.data`` and selects its questions."""

import pathlib
from collections.abc import Sequence

import numpy as np

from cirag_jax.datasets import demo, jsonl
from cirag_jax.datasets.corpus import Corpus, build_corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.types import Config, Dataset, Question


def load_dataset(data: Config, *, corpus: bool = True, questions: bool = True) -> Dataset:
    """Loads the dataset folder ``data.dir``, or the built-in dataset if it is null."""
    if data.dir:
        return jsonl.read_dataset(pathlib.Path(data.dir), corpus=corpus, questions=questions)
    return demo.build()


def load_datasets(data: Config) -> tuple[Dataset, ...]:
    """Loads ``data.dir``, which may be a tuple of folders; see `load_dataset`."""
    folders = data.dir if isinstance(data.dir, tuple | list) else (data.dir,)
    return tuple(jsonl.read_dataset(pathlib.Path(f)) if f else demo.build() for f in folders)


def select_corpus(dataset: Dataset, questions: Sequence[Question], data: Config) -> Corpus:
    """Returns the passages that ``questions`` search under the corpus policy ``data.corpus``."""
    return build_corpus(dataset, questions, data.corpus, data.seed)


def select_questions(
    dataset: Dataset, data: Config, prefix: str = "config.data."
) -> tuple[Question, ...]:
    """Selects questions by ``data.split``, ``.fold``, ``.setting`` and ``.only_with_triples``.

    ``data.limit`` then keeps the first N questions; 0 keeps all. With ``data.random``, it keeps N
    random questions in their original order. For the same ``data.seed``, a larger sample contains
    every smaller one. ``prefix`` precedes the names of fields in messages.
    """
    check_at_least(0, data, "limit", prefix="config.data.")
    questions: Sequence[Question] = dataset.questions
    for field in ("split", "fold", "setting"):
        value = data[field]
        if not value:
            continue
        kept = [q for q in questions if getattr(q, field) == value]
        if not kept:
            values = sorted({str(getattr(q, field) or "null") for q in questions})
            raise UserError(
                f"{prefix}{field}={value} matches no question of {dataset.name}; "
                f"available values: {', '.join(values)}"
            )
        questions = kept
    if data.only_with_triples:
        questions = [
            q for q in questions if q.context and all(p in dataset.triples for p in q.context)
        ]
        if not questions:
            raise UserError(
                f"config.data.only_with_triples matches no question of {dataset.name}: none has "
                "triples (openie.jsonl) for every passage of its context"
            )
    if not data.limit or data.limit >= len(questions):
        return tuple(questions)
    if not data.random:
        return tuple(questions[: data.limit])
    drawn = np.random.default_rng(data.seed).permutation(len(questions))[: data.limit]
    return tuple(questions[index] for index in sorted(drawn))
