"""From ``config.data`` to a dataset and the questions it selects."""

import pathlib
from collections.abc import Sequence

import numpy as np

from cirag_jax.datasets import demo, jsonl
from cirag_jax.datasets.corpus import Corpus, build_corpus
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.types import Config, Dataset, Question


def load_dataset(data: Config, *, corpus: bool = True, questions: bool = True) -> Dataset:
    """The dataset folder ``data.dir`` (see `jsonl.read_dataset`), or the built-in dataset where it
    is null.
    """
    if data.dir:
        return jsonl.read_dataset(pathlib.Path(data.dir), corpus=corpus, questions=questions)
    return demo.build()


def load_datasets(data: Config) -> tuple[Dataset, ...]:
    """The dataset folders of ``data.dir`` where it is a tuple; else the one of `load_dataset`."""
    folders = data.dir if isinstance(data.dir, tuple | list) else (data.dir,)
    return tuple(jsonl.read_dataset(pathlib.Path(f)) if f else demo.build() for f in folders)


def select_corpus(dataset: Dataset, questions: Sequence[Question], data: Config) -> Corpus:
    """The passages that these questions search, as ``data.corpus`` says (`build_corpus`)."""
    return build_corpus(dataset, questions, data.corpus, data.seed)


def select_questions(dataset: Dataset, data: Config) -> tuple[Question, ...]:
    """The questions that ``data.split``, ``.fold``, ``.setting``, ``.only_with_triples`` leave.

    ``data.limit`` then keeps the first N (0 keeps all), or with ``data.random`` N drawn by
    ``data.seed``, in their order; a smaller draw is part of a larger one with the same seed.
    """
    check_at_least(0, data, "limit", prefix="config.data.")
    questions: Sequence[Question] = dataset.questions
    for field in ("split", "fold", "setting"):
        wanted = data[field]
        if not wanted:
            continue
        kept = [q for q in questions if getattr(q, field) == wanted]
        if not kept:
            seen = sorted({str(getattr(q, field)) for q in questions})
            raise UserError(
                f"config.data.{field}={wanted} leaves no question of {dataset.name}; "
                f"values there: {', '.join(seen)}"
            )
        questions = kept
    if data.only_with_triples:
        questions = [
            q for q in questions if q.context and all(p in dataset.triples for p in q.context)
        ]
        if not questions:
            raise UserError(
                f"config.data.only_with_triples leaves no question of {dataset.name}: none has "
                "triples (openie.jsonl) for every passage of its context"
            )
    if not data.limit or data.limit >= len(questions):
        return tuple(questions)
    if not data.random:
        return tuple(questions[: data.limit])
    drawn = np.random.default_rng(data.seed).permutation(len(questions))[: data.limit]
    return tuple(questions[index] for index in sorted(drawn))
