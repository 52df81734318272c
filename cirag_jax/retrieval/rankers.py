"""Rankers, which score texts against queries with an encoder, a cross-encoder or BM25.

A ranker accepts strings, passages and triples. A `Write` function, by default `text_of`, converts
them to the text form that the ranker's model expects.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from cirag_jax.datasets.chains import UnitKind, passage_text, triple_text
from cirag_jax.errors import UserError
from cirag_jax.io import is_training_workdir, say
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.models.io.tensor_files import check_finite
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encoders import LENGTHS, Encoder, open_encoder_for
from cirag_jax.retrieval.pairs import score_groups
from cirag_jax.triples.normalization import Normalization, triple_key
from cirag_jax.types import ROLES, Config, Passage, Role, Text, Triple
from cirag_jax.validation import check_value

RankerKind = Literal["bi_encoder", "aligner", "cross_encoder", "bm25"]
TripleForm = Literal["tuple", "angle", "plain"]

Write = Callable[[Text], str]


class Ranker(Protocol):
    """Scores each query's own texts; higher is better."""

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """Returns float32 scores for each query, in the order of its texts."""
        ...


@dataclasses.dataclass(frozen=True)
class TripleText:
    """The text form of triples, which must match the training of the ranker's model.

    Attributes:
      form: ``tuple``: Python tuple of the normalized parts (HippoRAG, CIRAG's Figure 12).
        ``angle``: ``<head; relation; tail>`` as extracted (KiRAG), used to train aligners.
        ``plain``: the parts joined by dashes, as C2RAG writes a constraint (Lin(tau), Eq. 6).
      normalization: normalization of the parts in the form ``tuple``.
    """

    form: TripleForm = "tuple"
    normalization: Normalization = "ascii"

    def __call__(self, triple: Triple) -> str:
        """Returns the text of a triple."""
        if self.form == "angle":
            return triple_text(triple)
        if self.form == "plain":
            return " — ".join(part for part in (triple.head, triple.relation, triple.tail) if part)
        return repr(triple_key(triple, self.normalization))


def text_of(text: Text, write_triple: Callable[[Triple], str] = TripleText()) -> str:
    """Returns a passage with its title, a triple as written by ``write_triple``, or the string."""
    match text:
        case Triple():
            return write_triple(text)
        case Passage():
            return passage_text(text)
    return text


def open_ranker(
    config: Config, name: str, open_encoder: Callable[[Config], Encoder] = open_encoder_for
) -> Ranker:
    """Opens the ranker ``config.rankers.NAME`` (a `configs.retrievers.ranker` block).

    Args:
      config: a config with ``rankers`` and ``encoder``.
      name: name of the ranker.
      open_encoder: opens a bi-encoder from ``config.encoder`` with the ranker's model and lengths.
    """
    block = config.rankers[name]
    check_ranker(block, name)
    text, assumed = triple_text_of(config, name)
    if assumed:
        say(
            f"{block.model or config.encoder.model} does not record the form of its training "
            f"triples; config.rankers.{name} assumes {text.form!r}"
        )
    write = functools.partial(text_of, write_triple=text)
    if block.kind == "bm25":
        return BM25Ranker(write)
    if block.kind == "cross_encoder":
        from cirag_jax.models.io.workdir import open_cross_encoder

        return CrossEncoderRanker(open_cross_encoder(block.model, label=block.label)[0], write)
    return BiEncoderRanker(open_encoder(encoder_config(config, name)), write)


def encoder_config(config: Config, name: str) -> Config:
    """Returns ``config.encoder`` with the model and settings of the ranker ``config.rankers.NAME``.

    Instructions, dimensions and tasks of ``config.encoder`` do not apply to another model.
    """
    block, encoder = config.rankers[name], config.encoder.copy_and_resolve_references()
    if block.model not in (None, encoder.model):
        encoder.model, encoder.dimensions, encoder.tasks = block.model, None, None
        if block.kind == "aligner" and encoder.backend == "openai":
            encoder.backend = "flax"  # Aligners are trained here.
        encoder.instructions.update(dict.fromkeys(ROLES))
    encoder.update({name: block[name] for name in LENGTHS if block[name] is not None})
    texts = {role: block.instructions[role] for role in ROLES}
    encoder.instructions.update({role: text for role, text in texts.items() if text is not None})
    return encoder


def triple_text_of(config: Config, name: str) -> tuple[TripleText, bool]:
    """Returns how ``config.rankers.NAME`` writes triples, and whether that form is only assumed.

    The form in the config has priority over the form recorded by the model's training. If neither
    exists, the default is KiRAG's form for aligners and CIRAG's form for other rankers.
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
    """Validates a ranker's block without opening the ranker."""
    field = f"config.rankers.{name}"
    check_value(f"{field}.kind", block.kind, RankerKind)
    check_value(f"{field}.triple_text", block.triple_text, TripleForm | None)
    if block.kind in ("aligner", "cross_encoder") and not block.model:
        raise UserError(f"{field}.kind={block.kind} needs {field}.model.")
    given = [role for role, text in (block.get("instructions") or {}).items() if text is not None]
    if given and block.kind in ("cross_encoder", "bm25"):
        raise UserError(
            f"{field}.instructions.{given[0]} needs {field}.kind=bi_encoder or aligner, not "
            f"{block.kind}; leave it null."
        )


def check_units(config: Config, name: str, units: UnitKind) -> None:
    """Raises UserError if ``config.rankers.NAME`` is an aligner that was trained on other units.

    A model that does not record its units may rank any units.
    """
    block = config.rankers[name]
    if block.kind not in ("bi_encoder", "aligner"):
        return
    from cirag_jax.models.io.workdir import trained_units

    spec = str(block.model or config.encoder.model)
    trained = trained_units(spec)
    if trained in (None, units):
        return
    method = config.method.rpartition(".")[2]
    wanted, remedy = f"the method's Needs.units is {units}", ""
    if config[method].get("units") == units:
        wanted = f"config.{method}.units={units}"
        remedy = f"--config.{method}.units={trained}, "
    ranker = f"--config.rankers.{name}"
    raise UserError(
        f"{spec} is an aligner for {trained}s, but {wanted}; set {remedy}{ranker}.kind=bm25, or "
        f"{ranker}.model to an aligner trained with --config.data.units={units}."
    )


class BiEncoderRanker:
    """Scores texts by inner products of embeddings.

    Args:
      encoder: embeds queries and texts; a `MemoizingEncoder` embeds each only once.
      write: converts a text to the form that the encoder expects.
    """

    def __init__(self, encoder: Encoder, write: Write = text_of):
        self._encoder = encoder
        self._write = write

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """Returns cosine similarities; see `Ranker.score`."""
        written = [[(_role(text), self._write(text)) for text in group] for group in texts]
        # Texts of one role are adjacent, because each role is embedded separately.
        distinct = sorted({entry: None for group in written for entry in group}, key=_first)
        row = {entry: index for index, entry in enumerate(distinct)}
        blocks = [
            self._encoder.encode([text for _, text in entries], role)
            for role, entries in itertools.groupby(distinct, _first)
        ]
        vectors_ND = np.concatenate(blocks or [np.zeros((0, self._encoder.dim), np.float32)])
        query_QD = self._encoder.encode(list(queries), "query")
        return [
            vectors_ND[[row[entry] for entry in group]] @ query_D
            for query_D, group in zip(query_QD, written, strict=True)
        ]


_first = operator.itemgetter(0)


def _role(text: Text) -> Role:
    return "triple" if isinstance(text, Triple) else "passage"


class CrossEncoderRanker:
    """Scores texts by a cross-encoder's logits; above 0, a text is probably relevant."""

    def __init__(self, model: PairEncoder, write: Write = text_of):
        self._model = model
        self._write = write

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """Returns logits; see `Ranker.score`."""
        written = [[self._write(text) for text in group] for group in texts]
        scores = score_groups(self._model, None, queries, written)
        for score_N in scores:
            check_finite(score_N, self._model.source)
        return scores


class BM25Ranker:
    """Scores texts by BM25; the frequency of words is counted over the query's own texts."""

    def __init__(self, write: Write = text_of):
        self._write = write

    def score(self, queries: Sequence[str], texts: Sequence[Sequence[Text]]) -> list[np.ndarray]:
        """Returns BM25 scores; see `Ranker.score`."""
        return [self._score(*pair) for pair in zip(queries, texts, strict=True)]

    def _score(self, query: str, texts: Sequence[Text]) -> np.ndarray:
        if not texts:
            return np.zeros(0, np.float32)
        index = BM25([self._write(text) for text in texts])
        return index.scores(index.words([query])[0])
