"""What the steps of an aligner's searches choose from, to be learnt from.

The aligner and its head search for training questions. Where a gold passage is among a step's best
candidates beside others, there is something to learn: for a joint scorer (`training/joint.py`), and
for the next aligner, from a joint scorer (`training/soft_labels.py`).
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from cirag_jax.datasets.chains import query_text, units_of
from cirag_jax.errors import UserError
from cirag_jax.models.io.fingerprint import of_model
from cirag_jax.models.link_head import LinkHead
from cirag_jax.retrieval.bm25 import best_places
from cirag_jax.retrieval.candidates import Candidates
from cirag_jax.retrieval.linked import needed_link_head
from cirag_jax.training import link_head
from cirag_jax.training.mining import found_once
from cirag_jax.training.state import digest
from cirag_jax.types import Config, Dataset, Question

# A dataset, its questions that are trained on, and its dev questions.
Asked = tuple[Dataset, Sequence[Question], Sequence[Question]]


class Choice(NamedTuple):
    """What a step of a search chooses from: its best candidates by the head, best first.

    Attributes:
      question_id: whose search it is.
      query: question and chain.
      texts: of the candidates.
      score_K: the head's.
      is_gold_K: of passages that are gold and not in the chain.
    """

    question_id: str
    query: str
    texts: tuple[str, ...]
    score_K: np.ndarray
    is_gold_K: np.ndarray


def choices_of(
    config: Config, workdir: pathlib.Path, sets: Sequence[Asked]
) -> tuple[list[Choice], list[Choice]]:
    """What the searches for training and for dev questions choose from, where there is something to
    learn: a gold candidate and another one.
    """
    head = needed_link_head(config.checkpoint)
    # Weights of a checkpoint are hashed once, not for every set.
    told = [config.depth, config.corpus, config.query_max_length, config.unit_max_length]
    told += [of_model(config.checkpoint)]
    parts: tuple[list[Choice], list[Choice]] = ([], [])
    for dataset, *asked in sets:
        answerable = [[q for q in part if q.supporting] for part in asked]
        questions = [question for part in answerable for question in part]
        if not questions:
            continue
        ids = link_head.passage_ids(dataset, config.corpus, questions)
        units = [unit for id in ids for unit in units_of(dataset, id, head.units)]
        file = workdir / f"searched-{digest(told, questions, units)[:16]}.npy"
        shape = (len(questions) * head.steps, 1 + head.steps + 2 * config.depth)
        search = functools.partial(_search, config, dataset, questions, head)
        usable = functools.partial(_usable, len(questions), len(units), config.depth)
        for row_N in found_once(file, shape, search, usable):
            place, chain, best_K, score_K = _read(row_N, head.steps)
            if place < 0:
                continue
            question = questions[place]
            is_gold_K = np.isin(
                [units[unit].passage_id for unit in best_K], question.supporting or ()
            )
            if is_gold_K.all() or not is_gold_K.any():
                continue
            query = query_text(question.question, [units[u].text for u in chain], head.units)
            texts = tuple(units[unit].text for unit in best_K)
            part = parts[place >= len(answerable[0])]
            part.append(Choice(question.id, query, texts, score_K, is_gold_K))
    if not parts[0]:
        raise UserError("no search of a training question came upon a gold passage and another")
    return parts


def _search(
    config: Config,
    dataset: Dataset,
    questions: Sequence[Question],
    head: LinkHead,
    row_SN: np.ndarray,
) -> None:
    """Writes down what every step of the questions' searches puts first, a row each.

    A row is the place of the question, the chain, the best candidates and the bits of their
    float32 scores; -1 fills up.
    """
    encoder = link_head.open_aligner(config.checkpoint, config)
    where = ConfigDict({"corpus": config.corpus, "steps": head.steps})
    task = link_head.make_task(dataset, questions, (), head.units, encoder, where)
    rows = iter(row_SN)

    def keep(found: Candidates) -> None:
        row_N, score_R = next(rows), head.score([found.feature_RF])[0]
        best = best_places(score_R, config.depth)
        row_N[0] = found.question
        row_N[1 : 1 + len(found.chain)] = found.chain
        best_N, bits_N = np.split(row_N[1 + head.steps :], 2)
        best_N[: len(best)] = found.unit_R[best]
        bits_N[: len(best)] = score_R[best].astype(np.float32).view(np.int32)

    link_head.explore(task, questions, head.score, "searching", keep)


def _usable(num_questions: int, num_units: int, depth: int, row_SN: np.ndarray) -> bool:
    """Whether what was kept names questions and units that there are."""
    place_S, unit_SN = row_SN[:, 0], row_SN[:, 1:-depth]
    return bool(place_S.max() < num_questions and unit_SN.max() < num_units)


def _read(row_N: np.ndarray, steps: int) -> tuple[int, list[int], list[int], np.ndarray]:
    """What `_search` wrote: a question's place, its chain, the best candidates, their scores."""
    best_N, bits_N = np.split(row_N[1 + steps :], 2)
    best = best_N[best_N >= 0].tolist()
    chain_N = row_N[1 : 1 + steps]
    chain = chain_N[chain_N >= 0].tolist()
    return int(row_N[0]), chain, best, bits_N[: len(best)].view(np.float32)
