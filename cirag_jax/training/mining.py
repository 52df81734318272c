"""Hard negatives that an aligner finds itself: what its own searches would wrongly choose.

The passages of a question's context were gathered for the question. Behind its first hop, what
misleads an aligner is elsewhere: passages worded like the question, or linked to the chain, about
something else. One trained aligner searches for the training questions among all passages, and the
next one learns that what it scored highest there is wrong (as ANCE, Xiong et al., 2021, but along
chains). Mining again with that one refreshes them.
"""

import contextlib
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from cirag_jax import processes
from cirag_jax.datasets.chains import Chain, Unit, units_of
from cirag_jax.errors import UserError
from cirag_jax.evaluation.evidence import passages_elsewhere
from cirag_jax.models.io.fingerprint import of_model
from cirag_jax.models.io.workdir import trained_units
from cirag_jax.retrieval.candidates import Candidates
from cirag_jax.retrieval.linked import Score, find_link_head
from cirag_jax.retrieval.search import save_array
from cirag_jax.training import link_head
from cirag_jax.training.state import digest
from cirag_jax.types import Config, Dataset, Question


class Miner:
    """Searches with the aligner of ``config.mining.checkpoint``, and its head where it has one.

    What is found stays in ``workdir`` as ``mined-*.npy``, numbers of units, so that a training
    that goes on, perhaps elsewhere, has the same.
    """

    def __init__(self, config: Config, workdir: pathlib.Path):
        spec, kind = config.mining.checkpoint, config.data.units
        units = trained_units(spec)
        if units not in (None, kind):
            raise UserError(
                f"config.mining.checkpoint={spec} ranks {units}s, but config.data.units={kind}"
            )
        self._config, self._workdir = config, workdir
        self._encoder = link_head.open_aligner(spec, config)
        head = find_link_head(spec)
        self._score: Score = link_head.by_aligner if head is None else head.score

    def pools(
        self, dataset: Dataset, chains: Sequence[Chain], pools: Sequence[tuple[Unit, ...]]
    ) -> list[tuple[Unit, ...]]:
        """For every chain what its hard negatives are drawn from, instead of ``pools``.

        That is what was mined, and from ``pools`` the units of the question's gold passages. A
        chain for which nothing was found keeps its pool.
        """
        by_id = {question.id: question for question in dataset.questions}
        questions = [by_id[chain.question_id] for chain in chains]
        kind, config = self._config.data.units, self._config
        ids = link_head.passage_ids(dataset, config.head.corpus, questions)
        units = [unit for id in ids for unit in units_of(dataset, id, kind)]
        shape = (len(chains), config.head.steps * config.mining.per_step)

        def search(unit_QM: np.ndarray) -> None:
            task = link_head.make_task(dataset, questions, (), kind, self._encoder, config.head)
            for place, found in enumerate(self._search(task, questions)):
                unit_QM[place, : len(found)] = found

        file = self._workdir / f"mined-{self._digest(questions, units)}.npy"
        unit_QM = found_once(file, shape, search, lambda unit_QM: unit_QM.max() < len(units))
        return [
            _harder(question, pool, [units[unit] for unit in found if unit >= 0])
            for question, pool, found in zip(questions, pools, unit_QM.tolist(), strict=True)
        ]

    def _digest(self, questions: Sequence[Question], units: Sequence[Unit]) -> str:
        """Of all that mining depends on."""
        config = self._config
        settings = [config.mining.per_step, config.head.steps]
        settings += [config.query_max_length, config.unit_max_length]
        return digest([settings, of_model(config.mining.checkpoint)], questions, units)[:16]

    def _search(self, task: link_head.Task, questions: Sequence[Question]) -> list[list[int]]:
        """Units of each question that were likeliest at some step, and wrong; each once."""
        row = {id: place for place, id in enumerate(task.ids)}
        right = [[row[id] for id in _gold(question) if id in row] for question in questions]
        found: list[dict[int, None]] = [{} for _ in questions]

        def keep(candidates: Candidates) -> None:
            is_wrong_R = ~np.isin(candidates.row_R, right[candidates.question])
            unit_R = candidates.unit_R[is_wrong_R]
            order_R = np.argsort(-candidates.feature_RF[is_wrong_R, 0], kind="stable")
            best = unit_R[order_R[: self._config.mining.per_step]]
            found[candidates.question].update(dict.fromkeys(best.tolist()))

        link_head.explore(task, questions, self._score, "mining negatives", keep)
        return [list(units) for units in found]


def found_once(
    file: pathlib.Path,
    shape: tuple[int, ...],
    find: Callable[[np.ndarray], None],
    usable: Callable[[np.ndarray], bool],
) -> np.ndarray:
    """An int32 array that ``find`` fills, -1 where it leaves it; or what an earlier call has kept
    in ``file``, where that is ``usable``.

    Only the first process finds or reads, so that all have the same.
    """
    found = np.full(shape, -1, np.int32)

    def fill() -> None:
        if jax.process_index() or _read(file, found, usable):
            return
        find(found)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_array(file, found)

    # The others wait for hours, if need be; in the broadcast alone they could not.
    processes.together(fill)
    return np.asarray(multihost_utils.broadcast_one_to_all(found))


def _read(file: pathlib.Path, into: np.ndarray, usable: Callable[[np.ndarray], bool]) -> bool:
    """Copies what an earlier call has kept; False: nothing that can be used is there."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        found = np.load(file, allow_pickle=False)
        if (found.shape, found.dtype) == (into.shape, into.dtype) and usable(found):
            into[:] = found
            return True
    return False


def _gold(question: Question) -> set[str]:
    """Passages that are right: the gold ones, and those that hold the same."""
    elsewhere = passages_elsewhere(question)
    held = {id for sentences in elsewhere.values() for ids in sentences for id in ids}
    return {*(question.supporting or ()), *map(str, held)}


def _harder(question: Question, pool: tuple[Unit, ...], mined: Sequence[Unit]) -> tuple[Unit, ...]:
    if not mined:
        return pool
    gold = question.supporting or ()
    return tuple(dict.fromkeys([*(unit for unit in pool if unit.passage_id in gold), *mined]))
