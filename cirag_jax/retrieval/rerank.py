"""Scoring texts against queries: by the bi-encoder, or by a cross-encoder."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.pairs import score_pairs


class Reranker(Protocol):
    """Scores each query's own texts; higher is better."""

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """For each query, float32 scores in the order of its texts."""
        ...


class BiEncoderReranker:
    """Inner products of embeddings; every distinct text is embedded once and remembered.

    Args:
      encoder: embeds queries and texts.
      max_texts: embeddings kept; above it, all are forgotten and needed ones embedded again. At 384
        dimensions a million take 1.5 GB.
    """

    def __init__(self, encoder: Encoder, max_texts: int = 1_000_000):
        self._encoder = encoder
        self._max_texts = max_texts
        self._row: dict[str, int] = {}
        self._vectors_ND = np.zeros((0, encoder.dim), np.float32)

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Cosine similarities: for each query, float32 scores in the order of its texts."""
        self._remember(list(dict.fromkeys(text for group in texts for text in group)))
        query_QD = self._encoder.encode(list(queries), "query")
        return [
            self._vectors_ND[[self._row[text] for text in group]] @ query_D
            for query_D, group in zip(query_QD, texts, strict=True)
        ]

    def _remember(self, texts: Sequence[str]) -> None:
        new = [text for text in texts if text not in self._row]
        if not new:
            return
        if len(self._row) + len(new) > self._max_texts:
            self._row, new = {}, list(texts)
        used = len(self._row)
        if used + len(new) > len(self._vectors_ND):  # Doubling: growth costs one copy in all.
            grown = np.zeros((max(2 * used, used + len(new)), self._encoder.dim), np.float32)
            grown[:used] = self._vectors_ND[:used]
            self._vectors_ND = grown
        self._vectors_ND[used : used + len(new)] = self._encoder.encode(new, "passage")
        self._row.update((text, used + offset) for offset, text in enumerate(new))


class CrossEncoderReranker:
    """Logits of a cross-encoder; above 0 it takes a text for more likely relevant than not.

    Args:
      model: the cross-encoder.
      max_length: tokens kept of a pair; None: the model's own limit.
      mesh: batches are split over it; None: one device.
    """

    def __init__(self, model: PairEncoder, max_length: int | None = None, mesh: Mesh | None = None):
        self._model = model
        self._max_length = max_length
        self._mesh = mesh
        self.identity: Mapping[str, Any] = {
            "model": model.source,
            "revision": model.revision,
            "dtype": model.config.dtype,
            "max_length": max_length or model.max_length,
        }

    @classmethod
    def open(
        cls,
        spec: str,
        *,
        dtype: str = "float32",
        max_length: int | None = None,
        mesh: Mesh | None = None,
    ) -> "CrossEncoderReranker":
        """Opens a training workdir (its best checkpoint), a model folder or a hub id.

        Raises:
          UserError: it cannot be opened, or is no cross-encoder.
        """
        from cirag_jax.models.io.workdir import open_cross_encoder

        model, _ = open_cross_encoder(spec, dtype=dtype, mesh=mesh)
        return cls(model, max_length, mesh)

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Raw logits: for each query, float32 scores in the order of its texts."""
        pairs = [
            (query, text) for query, group in zip(queries, texts, strict=True) for text in group
        ]
        logit_N = score_pairs(
            self._model, None, pairs, max_length=self._max_length, mesh=self._mesh
        )
        ends = np.cumsum([len(group) for group in texts], dtype=np.int64)
        return np.split(logit_N, ends)[: len(texts)]
