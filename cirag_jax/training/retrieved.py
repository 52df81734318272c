"""Hard negatives from passages that are retrieved for each prefix of a chain.

In KiRAG (Appendix B.3), the query is the question with the partial chain. Ten passages are
retrieved, and the negatives are units of these passages.
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
from cirag_jax.models.io.fingerprint import model_identity
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval.encoders import FlaxEncoder
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.retrieval.search import save_array
from cirag_jax.training.data.pools import PrefixPools, has_others
from cirag_jax.training.state import digest
from cirag_jax.types import Config, Dataset, Question


def prefix_pools(
    config: Config,
    workdir: pathlib.Path,
    dataset: Dataset,
    chains: Sequence[Chain],
    pools: Sequence[tuple[Unit, ...]],
) -> list[PrefixPools]:
    """Returns the units of the retrieved passages for each prefix of each chain.

    The encoder ``config.retrieved.model`` retrieves ``config.retrieved.passages`` from all
    passages; the query is the question with the prefix. Passages that repeat a gold sentence are
    dropped. If no unit can be a negative, the prefix gets its chain's pool from ``pools`` instead.

    The retrieved rows are stored as ``retrieved-*.npy`` in ``workdir``, so that a resumed run has
    the same negatives.
    """
    kind = config.data.units
    queries = [text for chain in chains for text in _queries(chain, kind)]
    passages = list(dataset.corpus.values())
    settings = [config.retrieved.passages, config.query_max_length]
    settings += [model_identity(config.retrieved.model)]
    texts = [(passage.id, passage_text(passage)) for passage in passages]
    file = workdir / f"retrieved-{digest(settings, queries, texts)[:16]}.npy"
    row_QK = np.full((len(queries), min(config.retrieved.passages, len(passages))), -1, np.int32)

    def retrieve() -> None:
        if jax.process_index() or _read(file, row_QK, len(passages)):
            return
        row_QK[:] = _search(config, dataset, queries, row_QK.shape[1])
        file.parent.mkdir(parents=True, exist_ok=True)
        save_array(file, row_QK)

    processes.together(retrieve)  # Other processes wait here; a broadcast would time out.
    rows = iter(np.asarray(multihost_utils.broadcast_one_to_all(row_QK)).tolist())
    ids, by_id = list(dataset.corpus), {question.id: question for question in dataset.questions}
    prefix_pools: list[PrefixPools] = []
    for chain, pool in zip(chains, pools, strict=True):
        repeats = _repeats(by_id[chain.question_id])
        chain_pools = []
        for _ in chain.steps:
            kept = [ids[row] for row in next(rows) if ids[row] not in repeats]
            units = tuple(unit for id in kept for unit in units_of(dataset, id, kind))
            chain_pools.append(units if has_others(units, chain) else pool)
        prefix_pools.append(tuple(chain_pools))
    return prefix_pools


def _queries(chain: Chain, kind: UnitKind) -> list[str]:
    """Returns the aligner's query for every prefix of the annotated order."""
    texts = [unit.text for unit in chain.steps]
    return [query_text(chain.question, texts[:length], kind) for length in range(len(texts))]


def _search(config: Config, dataset: Dataset, queries: Sequence[str], k: int) -> np.ndarray:
    encoder, _ = open_encoder(config.retrieved.model)
    retriever = FlaxEncoder(encoder, query_max_length=config.query_max_length)
    passages = list(dataset.corpus.values())
    with bar("encoding, to retrieve negatives", len(passages), "passage") as progress:
        index = PassageIndex.in_memory(passages, retriever, progress=progress.update)
    return index.search(queries, k)[0]


def _repeats(question: Question) -> set[str]:
    """Returns the ids of passages that repeat a gold sentence but are not gold themselves.

    An example is an overlapping chunk of the same document.
    """
    substitutes = passage_substitutes(question).values()
    ids = {str(id) for sentences in substitutes for ids in sentences for id in ids}
    return ids - {*(question.supporting or ())}


def _read(file: pathlib.Path, into_QK: np.ndarray, num_passages: int) -> bool:
    """Reads the rows of an earlier call; returns False if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        rows_QK = np.load(file, allow_pickle=False)
        fits = (rows_QK.shape, rows_QK.dtype) == (into_QK.shape, into_QK.dtype)
        if fits and rows_QK.min() >= 0 and rows_QK.max() < num_passages:
            into_QK[:] = rows_QK
            return True
    return False
