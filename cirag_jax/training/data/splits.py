"""Which questions of a dataset are trained on, and which choose the checkpoint."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from cirag_jax.datasets import load
from cirag_jax.errors import UserError
from cirag_jax.types import Config, Dataset, Question

_HELD_OUT = ("tune", "test")  # Folds of a training split that others evaluate on.


class Questions(NamedTuple):
    """The questions of one dataset: those to train on, and those that choose the checkpoint."""

    dataset: Dataset
    train: tuple[Question, ...]
    dev: tuple[Question, ...]


def split_questions(dataset: Dataset, config: Config) -> Questions:
    """Train and dev questions of one of the datasets.

    Dev is ``config.dev.split`` and ``.fold`` where one is named; otherwise
    ``config.dev.questions`` of the training questions themselves, the last of a seeded
    permutation, as KiRAG does. Where no fold is named, those that others evaluate on are left out.
    """
    train = load.select_questions(dataset, config.data)
    if not config.data.fold:
        train = tuple(question for question in train if question.fold not in _HELD_OUT)
    if config.dev.split or config.dev.fold:
        wanted: Config = ConfigDict({**config.data.to_dict(), "limit": config.dev.questions})
        wanted.split, wanted.fold = config.dev.split, config.dev.fold
        dev = load.select_questions(dataset, wanted)
        clash = {q.id for q in train} & {q.id for q in dev}
        if clash:
            raise UserError(
                f"config.dev selects {len(clash)} of the training questions (first: {min(clash)}); "
                "choose another config.dev.split or config.dev.fold"
            )
        return Questions(dataset, train, dev)
    return Questions(dataset, *hold_out(train, config))


def hold_out(
    questions: Sequence[Question], config: Config
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Training questions, and the last ``config.dev.questions`` of a seeded permutation."""
    number = config.dev.questions
    if number >= len(questions):
        raise UserError(
            f"config.dev.questions={number} would leave none of the {len(questions)} questions to "
            "train on"
        )
    order = np.random.default_rng(config.data.seed).permutation(len(questions))
    dev = set(order[len(questions) - number :].tolist())
    return (
        tuple(q for i, q in enumerate(questions) if i not in dev),
        tuple(q for i, q in enumerate(questions) if i in dev),
    )
