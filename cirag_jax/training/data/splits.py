"""Splits a dataset into training questions and dev questions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from cirag_jax.datasets import load
from cirag_jax.errors import UserError
from cirag_jax.types import Config, Dataset, Question

HELD_OUT_FOLDS = ("tune", "test")  # Folds of a training split that are used for evaluation.


class Questions(NamedTuple):
    """Training questions of a dataset, and dev questions, which select the best checkpoint."""

    dataset: Dataset
    train: tuple[Question, ...]
    dev: tuple[Question, ...]


def split_questions(dataset: Dataset, config: Config, at_least: int = 1) -> Questions:
    """Splits the questions of a dataset into at least ``at_least`` training questions and others.

    Dev questions are the questions of ``config.dev.split`` and ``config.dev.fold``. If both are
    null, dev questions are held-out training questions as in KiRAG, see `hold_out`. Training
    questions exclude `HELD_OUT_FOLDS` unless ``config.data.fold`` is set.
    """
    train = load.select_questions(dataset, config.data)
    if not config.data.fold:
        train = tuple(question for question in train if question.fold not in HELD_OUT_FOLDS)
    if config.dev.split or config.dev.fold:
        data: Config = ConfigDict({**config.data.to_dict(), "limit": config.dev.questions})
        data.split, data.fold = config.dev.split, config.dev.fold
        dev = load.select_questions(dataset, data, "config.dev.")
        clash = {q.id for q in train} & {q.id for q in dev}
        if clash:
            raise UserError(
                f"config.dev selects {len(clash)} of the training questions (first: {min(clash)}); "
                "choose another config.dev.split or config.dev.fold"
            )
        return Questions(dataset, train, dev)
    return Questions(dataset, *hold_out(train, config, at_least))


def hold_out(
    questions: Sequence[Question], config: Config, at_least: int = 1
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Holds out the last ``config.dev.questions`` of a seeded permutation of the questions.

    At least ``at_least`` questions must remain.
    """
    number = config.dev.questions
    if len(questions) < number + at_least:
        remedy = "add questions"
        if number and len(questions) > at_least:
            remedy += f" or set config.dev.questions to at most {len(questions) - at_least}"
        elif at_least > 1:
            remedy += " or lower config.batch_size" + " and config.dev.questions" * bool(number)
        raise UserError(
            f"training needs at least {number + at_least} questions, {number} to hold out "
            f"(config.dev.questions) and {at_least} per step, but there are {len(questions)}; "
            f"{remedy}"
        )
    order = np.random.default_rng(config.data.seed).permutation(len(questions))
    dev = set(order[len(questions) - number :].tolist())
    return (
        tuple(q for i, q in enumerate(questions) if i not in dev),
        tuple(q for i, q in enumerate(questions) if i in dev),
    )
