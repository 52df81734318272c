"""Hard negatives from the passages that a retriever finds for each prefix of a chain.

KiRAG (Appendix B.3) trains on what its own first step yields: the question and the partial chain
retrieve ten passages, and the negatives are units of these.
"""

import contextlib
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from cirag_jax import processes
from cirag_jax.datasets.chains import Chain, Unit, UnitKind, passage_text, query_text, units_of
from cirag_jax.evaluation.evidence import passage_substitutes
from cirag_jax.io import bar
from cirag_jax.models.io.fingerprint import of_model
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval.encoders import FlaxEncoder
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.retrieval.search import save_array
from cirag_jax.training.data.pools import PrefixPools
from cirag_jax.training.state import digest
from cirag_jax.types import Config, Dataset, Question


def prefix_pools(
    config: Config,
    workdir: pathlib.Path,
    dataset: Dataset,
    chains: Sequence[Chain],
    own: Sequence[tuple[Unit, ...]],
) -> list[PrefixPools]:
    """For each chain and each of its prefixes, the units of ``config.retrieved.passages`` passages.

    The encoder ``config.retrieved.model`` finds them among all passages, by the question and the
    prefix. Passages that repeat a gold sentence are left out. A prefix without any negative among
    them has its chain's pool of ``own``.

    The rows of the passages stay in ``workdir`` as ``retrieved-*.npy``, so that a resumed training
    has the same negatives.
    """
    kind = config.data.units
    queries = [text for chain in chains for text in _queries(chain, kind)]
    passages = list(dataset.corpus.values())
    settings = [config.retrieved.passages, config.query_max_length]
    settings += [of_model(config.retrieved.model)]
    texts = [(passage.id, passage_text(passage)) for passage in passages]
    file = workdir / f"retrieved-{digest(settings, queries, texts)[:16]}.npy"
    row_QK = np.full((len(queries), min(config.retrieved.passages, len(passages))), -1, np.int32)

    def retrieve() -> None:
        if jax.process_index() or _read(file, row_QK, len(passages)):
            return
        row_QK[:] = _search(config, dataset, queries, row_QK.shape[1])
        file.parent.mkdir(parents=True, exist_ok=True)
        save_array(file, row_QK)

    processes.together(retrieve)  # The others wait here: a broadcast alone would time out.
    rows = iter(np.asarray(multihost_utils.broadcast_one_to_all(row_QK)).tolist())
    ids, by_id = list(dataset.corpus), {question.id: question for question in dataset.questions}
    found: list[PrefixPools] = []
    for chain, pool in zip(chains, own, strict=True):
        repeats = _repeats(by_id[chain.question_id])
        of_chain = []
        for _ in chain.steps:
            kept = [ids[row] for row in next(rows) if ids[row] not in repeats]
            units = tuple(unit for id in kept for unit in units_of(dataset, id, kind))
            of_chain.append(units if {*units} - {*chain.steps} else pool)
        found.append(tuple(of_chain))
    return found


def _queries(chain: Chain, kind: UnitKind) -> list[str]:
    """The aligner's query for every prefix: the first h steps in the order of the annotation."""
    texts = [unit.text for unit in chain.steps]
    return [query_text(chain.question, texts[:length], kind) for length in range(len(texts))]


def _search(config: Config, dataset: Dataset, queries: Sequence[str], k: int) -> np.ndarray:
    """The rows of the k nearest passages of every query."""
    encoder, _ = open_encoder(config.retrieved.model)
    embeds = FlaxEncoder(encoder, query_max_length=config.query_max_length)
    with bar("encoding, to retrieve negatives", len(dataset.corpus), "passage") as shown:
        index = PassageIndex.in_memory(list(dataset.corpus.values()), embeds, progress=shown.update)
    return index.search(queries, k)[0]


def _repeats(question: Question) -> set[str]:
    """Passages that hold a gold sentence and are not gold themselves: overlapping chunks, say."""
    elsewhere = passage_substitutes(question).values()
    holding = {str(id) for sentences in elsewhere for ids in sentences for id in ids}
    return holding - {*(question.supporting or ())}


def _read(file: pathlib.Path, into_QK: np.ndarray, num_passages: int) -> bool:
    """Copies the rows of an earlier call; False where the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        found = np.load(file, allow_pickle=False)
        fits = (found.shape, found.dtype) == (into_QK.shape, into_QK.dtype)
        if fits and found.min() >= 0 and found.max() < num_passages:
            into_QK[:] = found
            return True
    return False
