"""The Python API of retrieval: searches documents from Python, evaluators and pipelines."""

import os
import pathlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.commands import session, task
from cirag_jax.datasets import demo, documents, formats
from cirag_jax.datasets.chains import passage_text
from cirag_jax.datasets.corpus import WHOLE, build_corpus
from cirag_jax.errors import UserError
from cirag_jax.io import Closing
from cirag_jax.retrieval.encoders import Encoder, open_encoder_for, with_disk_cache
from cirag_jax.retrieval.index import open_retriever, read_manifest, refuse_large
from cirag_jax.retrieval.links import LinkWalk
from cirag_jax.retrieval.server_encoder import ServerEncoder
from cirag_jax.types import Dataset, Passage, PositiveInt, Role
from cirag_jax.validation import check_value

_COLUMNS = ("docno", "score", "rank")  # What PyTerrier expects of a retriever.


class Result(NamedTuple):
    """A passage that was found. Higher scores are better; some kinds only have negative ranks."""

    id: str
    score: float
    passage: Passage


class Retriever(Closing):
    """A search over passages, which threads can share: they search one after another.

    Use it in a ``with`` block, or call `close` to free the models.
    """

    def __init__(self, config: Any, dataset: Dataset, follow_links: bool = False):
        """Use `open` instead, unless you have a config with encoder and retriever blocks."""
        session.check_process()
        self._passages = build_corpus(dataset, (), WHOLE).passages
        session.enter_process()
        self._lock = threading.Lock()
        self._encoder: Encoder | None = None
        if config.retriever.kind != "bm25":
            self._encoder = open_encoder_for(config.encoder)
        encoder = None if self._encoder is None else with_disk_cache(self._encoder)
        self._walk: LinkWalk | None = None
        if follow_links:
            refuse_large(self._passages, "the search over title links")
            self._walk = LinkWalk(self._passages)
        self._index: Any = open_retriever(
            config.retriever, self._passages, encoder, triples=dataset.triples
        )

    @classmethod
    def open(
        cls,
        model: str | None = None,
        *,
        documents: str | os.PathLike[str] | Iterable[str] | None = None,
        index: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> "Retriever":
        """Loads an encoder and indexes the documents.

        Args:
          model: ``bm25``; ``links`` (a walk over title links from BM25's best passages);
            ``linked`` (follows a question's hops with the aligner of the setting encoder.model, a
            workdir of configs/aligner.py:linked); or an encoder: a training workdir, a model
            folder, shipped:NAME, package:NAME or a hub id. None is the model of ``index``, or bm25
            without one.
          documents: texts, or the path of a document, a folder of documents or a dataset of any
            known format; None is the built-in dataset.
          index: a workdir of launch/index.py, or the index in it, over the same passages.
          settings: config values of the blocks encoder and retriever by dotted key, such as
            ``{"encoder.dtype": "bfloat16"}``.
        """
        if not isinstance(model, str | None) or model == "":
            raise UserError(f"model must be a name or None, not {model!r}.")
        if not isinstance(settings, Mapping | None):
            raise UserError(f"settings must be a dictionary, not {settings!r}.")
        for key in settings or {}:
            if str(key).partition(".")[0] not in ("encoder", "retriever"):
                raise UserError(f"the setting {key!r} is of neither encoder nor retriever.")
        values: dict[str, Any] = {} if index is None else _index_values(os.fspath(index))
        if index is not None and model in ("links", "linked"):
            raise UserError(f"model={model!r} builds its index in memory; omit index.")
        if model is None and index is None:
            model = "bm25"
        if model in ("bm25", "links"):
            values.setdefault("retriever.kind", "bm25")
        elif model == "linked":
            if "encoder.model" not in (settings or {}):
                raise UserError(
                    "model='linked' needs the setting encoder.model: a workdir of "
                    "configs/aligner.py:linked, or an export of it."
                )
            values["retriever.kind"] = "linked"
        elif model is not None:
            values["encoder.model"] = model
        values |= settings or {}
        overrides = [f"{key}={value}" for key, value in values.items()]
        config = task.method_config("native_rag", "", overrides)
        if model in ("bm25", "links") and config.retriever.kind != "bm25":
            raise UserError(f"model={model!r} is no search of kind {config.retriever.kind}.")
        return cls(config, _read(documents), model == "links")

    @property
    def passages(self) -> Sequence[Passage]:
        """The passages that are searched."""
        return self._passages

    def texts(self) -> dict[str, str]:
        """Returns the text that is indexed of each passage, by id: the corpus of an evaluator."""
        return {passage.id: passage_text(passage) for passage in self._passages}

    def search(self, queries: Iterable[str], k: int = 10) -> list[list[Result]]:
        """Returns at most k results for each query, best first."""
        texts = session.listed(queries, "queries", "a list")
        texts = [session.own_question(text).question for text in texts]
        check_value("k", k, PositiveInt)
        k = min(k, len(self._passages))
        session.check_process()  # before the lock, which a fork may have copied while it was held
        with self._lock:
            self._check_open()
            if not texts:
                return []
            row_QK, score_QK = self._index.search(texts, k)
            if self._walk is not None:
                first = [[int(row) for row in row_K if row >= 0] for row_K in row_QK]
                ranked = self._walk.search(texts, first, k)
                row_QK = [np.array(rows, np.int32) for rows in ranked]
                score_QK = [-np.arange(1.0, len(rows) + 1) for rows in ranked]
        return [self._results(rows, scores) for rows, scores in zip(row_QK, score_QK, strict=True)]

    def _results(self, row_K: np.ndarray, score_K: np.ndarray) -> list[Result]:
        results = []
        for row, score in zip(row_K, score_K, strict=True):
            if row >= 0:  # Other places are empty.
                passage = self._passages[int(row)]
                results.append(Result(passage.id, float(score), passage))
        return results

    def run(self, queries: Mapping[str, str], k: int = 10) -> dict[str, dict[str, float]]:
        """Returns the scores of the results by query id and passage id, for `ir_measures`."""
        if not isinstance(queries, Mapping):
            raise UserError(f"queries must be a dictionary of texts, not {ascii(queries)[:80]}.")
        found = self.search(list(queries.values()), k)
        return {
            query: {result.id: result.score for result in results}
            for query, results in zip(queries, found, strict=True)
        }

    def transform(self, topics: Any, k: int = 1000) -> Any:
        """Searches for the topics of a PyTerrier pipeline: ``pt.apply.generic(r.transform)``.

        Args:
          topics: a pandas DataFrame with the columns ``qid`` and ``query``.
          k: number of results per query.

        Returns:
          A DataFrame with the topics' columns and ``docno``, ``score`` and ``rank`` (from 0).
        """
        try:
            import pandas as pd
        except ImportError:
            raise UserError(
                "Retriever.transform needs pandas, which is not installed; run: pip install pandas"
            ) from None
        if not isinstance(topics, pd.DataFrame) or not {"qid", "query"} <= set(topics.columns):
            raise UserError("topics must be a pandas DataFrame with the columns qid and query.")
        topics = topics.drop(columns=list(_COLUMNS), errors="ignore").drop_duplicates("qid")
        rows: list[Any] = topics.to_dict("records")
        found = self.search([row["query"] for row in rows], k)
        ranked = [
            {**row, "docno": result.id, "score": result.score, "rank": rank}
            for row, results in zip(rows, found, strict=True)
            for rank, result in enumerate(results)
        ]
        return pd.DataFrame(ranked, columns=[*topics.columns, *_COLUMNS])

    def sentence_model(self) -> "SentenceModel":
        """Returns the encoder as sentence-transformers' evaluators call one."""
        return SentenceModel(self)

    def encode(self, texts: Sequence[str], kind: Role = "passage") -> np.ndarray:
        """Returns unit-length vectors, float32 [N, D]; ``kind`` is query or passage."""
        session.check_process()
        with self._lock:
            self._check_open()
            if self._encoder is None:
                raise UserError("a search with BM25 has no encoder; use Retriever.run instead.")
            return self._encoder.encode(texts, kind)

    def close(self) -> None:
        """Frees the models."""
        if session.is_own_process():  # elsewhere, the lock may be held forever
            with self._lock:
                if isinstance(self._encoder, ServerEncoder):
                    self._encoder.close()
                self._encoder = self._index = self._walk = None

    def _check_open(self) -> None:
        if self._index is None:
            raise UserError("the retriever is closed; open it again with Retriever.open.")


class _NoCard:
    """Stands for the model card in which evaluators store their metrics."""

    def set_evaluation_metrics(self, *_: object) -> None:
        pass


class SentenceModel:
    """The encoder of a `Retriever`, for sentence-transformers' InformationRetrievalEvaluator."""

    similarity_fn_name = "cosine"

    def __init__(self, retriever: Retriever):
        self._retriever = retriever
        self.model_card_data = _NoCard()

    def encode_query(self, sentences: Any, **options: Any) -> Any:
        """Embeds queries, see `encode`."""
        return self.encode(sentences, kind="query", **options)

    def encode_document(self, sentences: Any, **options: Any) -> Any:
        """Embeds passages, see `encode`."""
        return self.encode(sentences, **options)

    def encode(
        self,
        sentences: str | Sequence[str],
        *,
        kind: Role = "passage",
        prompt: str | None = None,
        prompt_name: str | None = None,
        convert_to_tensor: bool = False,
        truncate_dim: int | None = None,
        **_: object,
    ) -> Any:
        """Returns unit-length vectors, float32 [N, D], or [D] of a single string.

        Other options of sentence-transformers, such as the batch size, are ignored.
        """
        if prompt is not None or prompt_name is not None:
            raise UserError("the encoder has its own prompts; set encoder.instructions instead.")
        is_single = isinstance(sentences, str)
        vectors_ND = self._retriever.encode([sentences] if is_single else list(sentences), kind)
        if truncate_dim is not None:
            vectors_ND = vectors_ND[:, :truncate_dim]
            vectors_ND = vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)
        vectors = vectors_ND[0] if is_single else vectors_ND
        if not convert_to_tensor:
            return vectors
        import torch  # The evaluators, which ask for tensors, need it anyway.

        return torch.tensor(vectors)

    def similarity(self, first: Any, second: Any) -> Any:
        """Returns the cosines of two matrices of unit-length vectors."""
        return first @ second.T


def _index_values(path: str) -> dict[str, Any]:
    """Returns the settings of an index of launch/index.py."""
    folder = pathlib.Path(path).expanduser()
    folder = folder / "index" if (folder / "index").is_dir() else folder
    manifest = read_manifest(folder)
    values = {"retriever.folder": str(folder), "retriever.kind": manifest["kind"]}
    names = ("backend", "model", "dtype", "query_max_length", "passage_max_length")
    encoder = manifest.get("encoder") or {}
    if encoder.get("backend") == "openai":
        names = ("backend", "model")
    return values | {f"encoder.{name}": encoder[name] for name in names if name in encoder}


def _read(source: str | os.PathLike[str] | Iterable[str] | None) -> Dataset:
    if source is None:
        return demo.build()
    if not isinstance(source, (str, os.PathLike)):
        return documents.from_texts(session.listed(source, "documents", "a path or a list"))
    path = pathlib.Path(os.fsdecode(source))
    if "\0" not in str(path) and not formats.is_own(path) and path.is_dir():
        return formats.read(path, questions=False)
    return documents.read_documents(os.fsdecode(source))
