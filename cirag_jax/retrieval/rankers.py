"""Rankers: scoring texts against queries, by an encoder, a cross-encoder or by words.

A ranker is given what a method has (strings, passages, triples) and writes it as its model reads
it: a `Write`, by default `text_of`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from cirag_jax.datasets.chains import UnitKind, passage_text, triple_text
from cirag_jax.errors import UserError, check_choice
from cirag_jax.io import is_training_workdir, say
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.models.io.tensor_files import check_finite
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encoders import Encoder, open_encoder_for
from cirag_jax.retrieval.pairs import score_groups
from cirag_jax.triples.normalization import Normalization, triple_key
from cirag_jax.types import Config, Passage, Text, Triple

KINDS = ("bi_encoder", "aligner", "cross_encoder", "bm25")
LENGTHS = ("query_max_length", "passage_max_length")

Write = Callable[[Text], str]


class Ranker(Protocol):
    """Scores each query's own texts; higher is better."""

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """For each query, float32 scores in the order of its texts."""
        ...


@dataclasses.dataclass(frozen=True)
class TripleText:
    """How a ranker's triples are written; one that was trained on triples is served the same text.

    Attributes:
      form: ``tuple`` of the normalised parts (HippoRAG, CIRAG's Figure 12); ``angle``,
        ``<head; relation; tail>`` as extracted (KiRAG), which aligners are trained on; ``plain``,
        the parts with dashes between them, as C2RAG writes a constraint (Lin of its Eq. 6).
      normalization: of the parts of a tuple.
    """

    form: Literal["tuple", "angle", "plain"] = "tuple"
    normalization: Normalization = "ascii"

    def __call__(self, triple: Triple) -> str:
        """The text of a triple."""
        if self.form == "angle":
            return triple_text(triple)
        if self.form == "plain":
            return " — ".join(part for part in (triple.head, triple.relation, triple.tail) if part)
        return repr(triple_key(triple, self.normalization))


def text_of(text: Text, write_triple: Callable[[Triple], str] = TripleText()) -> str:
    """A text as rankers read it: a passage with its title, a triple as ``write_triple`` has it."""
    match text:
        case Triple():
            return write_triple(text)
        case Passage():
            return passage_text(text)
    return text


def open_ranker(
    config: Config, name: str, open_encoder: Callable[[Config], Encoder] = open_encoder_for
) -> Ranker:
    """The ranker ``config.rankers.NAME`` (a `configs.retrievers.ranker` block).

    Args:
      config: with ``rankers`` and ``encoder``.
      name: which of the rankers.
      open_encoder: opens the encoder of a bi-encoder: that of ``config.encoder``, or one like it
        with a model of its own.
    """
    block = config.rankers[name]
    check_ranker(block, name)
    text, assumed = triple_text_of(config, name)
    if assumed:
        say(
            f"{block.model or config.encoder.model} does not say how it was trained to read "
            f"triples: config.rankers.{name} writes them in the form {text.form!r}"
        )
    write = functools.partial(text_of, write_triple=text)
    if block.kind == "bm25":
        return BM25Ranker(write)
    if block.kind == "cross_encoder":
        from cirag_jax.models.io.workdir import open_cross_encoder

        return CrossEncoderRanker(open_cross_encoder(block.model)[0], write)
    own = config.encoder.copy_and_resolve_references()
    own.model = block.model or own.model
    own.update({name: block[name] for name in LENGTHS if block[name] is not None})
    return BiEncoderRanker(open_encoder(own), write)


def triple_text_of(config: Config, name: str) -> tuple[TripleText, bool]:
    """How the ranker ``config.rankers.NAME`` writes triples, and whether that is only assumed.

    In the form that the config asks for; else in the one its model was trained on; else, where it
    is an aligner, in the form of KiRAG; else as CIRAG does.
    """
    block = config.rankers[name]
    if block.triple_text is not None:
        return TripleText(block.triple_text, block.normalization), False
    spec = "" if block.kind == "bm25" else str(block.model or config.encoder.model)
    if is_training_workdir(spec):
        from cirag_jax.models.io.workdir import ranker_meta

        meta = ranker_meta(spec)
        if "triple_text" in meta:
            trained_on = meta["triple_text"]
            return (TripleText(**trained_on) if trained_on else _default(block)), False
        if meta.get("units") == "triple":
            return TripleText("angle"), True
        return _default(block), meta["component"] == "cross_encoder"
    if block.kind == "aligner":
        return TripleText("angle"), True
    return _default(block), False


def _default(block: Config) -> TripleText:
    return TripleText("tuple", block.normalization)


def check_ranker(block: Config, name: str) -> None:
    """Raises UserError where a block cannot be right, before anything is opened."""
    field = f"config.rankers.{name}"
    check_choice(f"{field}.kind", block.kind, KINDS)
    check_choice(f"{field}.triple_text", block.triple_text, (None, "tuple", "angle", "plain"))
    if block.kind in ("aligner", "cross_encoder") and not block.model:
        raise UserError(f"{field}.kind={block.kind} needs {field}.model.")


def check_units(config: Config, name: str, units: UnitKind) -> None:
    """Raises UserError where ``config.rankers.NAME`` is an aligner of other units than ``units``.

    What does not say what it was trained on may rank anything.
    """
    block = config.rankers[name]
    if block.kind not in ("bi_encoder", "aligner"):
        return
    from cirag_jax.models.io.workdir import trained_units

    spec = str(block.model or config.encoder.model)
    trained = trained_units(spec)
    if trained not in (None, units):
        block = config.method.rpartition(".")[2]
        raise UserError(
            f"{spec} is an aligner of {trained}s, but config.{block}.units={units}: give "
            f"--config.{block}.units={trained}, or --config.rankers.{name}.model= one that "
            f"was trained with --config.data.units={units}."
        )


class BiEncoderRanker:
    """Inner products of embeddings.

    Args:
      encoder: embeds queries and texts; a `RememberingEncoder` does so once.
      write: a text as the encoder reads it.
    """

    def __init__(self, encoder: Encoder, write: Write = text_of):
        self._encoder = encoder
        self._write = write

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """Cosine similarities: for each query, float32 scores in the order of its texts."""
        written = [[self._write(text) for text in group] for group in texts]
        row: dict[str, int] = {}
        for group in written:
            for text in group:
                row.setdefault(text, len(row))
        vectors_ND = self._encoder.encode(list(row), "passage")
        query_QD = self._encoder.encode(list(queries), "query")
        return [
            vectors_ND[[row[text] for text in group]] @ query_D
            for query_D, group in zip(query_QD, written, strict=True)
        ]


class CrossEncoderRanker:
    """Logits of a cross-encoder; above 0 it takes a text for more likely relevant than not."""

    def __init__(self, model: PairEncoder, write: Write = text_of):
        self._model = model
        self._write = write

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """Raw logits: for each query, float32 scores in the order of its texts."""
        written = [[self._write(text) for text in group] for group in texts]
        scores = score_groups(self._model, None, queries, written)
        for score_N in scores:
            check_finite(score_N, self._model.source)
        return scores


class BM25Ranker:
    """BM25 over each query's own texts; a word's rarity is its rarity among them."""

    def __init__(self, write: Write = text_of):
        self._write = write

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """BM25 scores: for each query, float32 scores in the order of its texts."""
        scores = []
        for query, group in zip(queries, texts, strict=True):
            score_N = np.zeros(len(group), np.float32)
            if group:
                found = BM25([self._write(text) for text in group])
                row_1N, score_1N = found.search_scored([query], len(group))
                score_N[row_1N[0]] = score_1N[0]
            scores.append(score_N)
        return scores
