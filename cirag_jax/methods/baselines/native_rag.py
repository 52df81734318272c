"""NativeRAG: one retrieval with the question, one reading. What every method must beat."""

import collections
import dataclasses
from collections.abc import Sequence

from cirag_jax.datasets.chains import UnitKind
from cirag_jax.errors import UserError
from cirag_jax.methods.common.evidence import (
    Evidence,
    Fact,
    place_of,
    places_of,
    rank_passages,
    rank_sentences,
    triple_line,
)
from cirag_jax.methods.common.reading import ReaderFormat, read, search
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Extract, Extracted, Needs, Program, Rank, Ranked
from cirag_jax.triples.normalization import Normalization, merge_sources
from cirag_jax.types import Count, Passage, PositiveInt, Prediction, Question, Step, Triple
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class NativeRagConfig:
    """NativeRAG's settings (FlashRAG's naive generation).

    Attributes:
      num_passages: passages retrieved, which recall looks at.
      reader_format: documents (FlashRAG's prompt), or as for CIRAG's reader: thought, chain, brief.
      num_read: how many of the units the reader gets; the CIRAG paper's NativeRAG reads all ten.
      units: passage; or sentence or triple: those of the passages, ranked by the question (the
        retriever's row of CIRAG's Table 5).
      rerank_from: above 0: so many passages are retrieved, and the best num_passages of them kept
        (DualRAG's NativeRAG: 50).
      min_score: what a reranked passage must score above.
      normalization: normalisation by which triples are equal.
    """

    num_passages: PositiveInt = 10
    num_read: PositiveInt = 10
    reader_format: ReaderFormat = "documents"
    units: UnitKind = "passage"
    rerank_from: Count = 0
    min_score: float = 0.0
    normalization: Normalization = "ascii"

    def __post_init__(self):
        check_fields(self)
        if self.units == "passage" and self.num_read > self.num_passages:
            raise UserError(
                f"num_read={self.num_read} must not exceed num_passages={self.num_passages}."
            )
        if self.rerank_from and self.rerank_from < self.num_passages:
            raise UserError("rerank_from must be 0, or at least num_passages.")
        if self.units != "passage" and self.reader_format == "documents":
            raise UserError(f"units={self.units} needs reader_format=thought, chain or brief.")

    @property
    def needs(self) -> Needs:
        """A ranker only where something is ranked."""
        rankers = [
            *(["passages"] if self.rerank_from else []),
            *(["units"] if self.units != "passage" else []),
        ]
        return Needs(
            roles=("reader",),
            rankers=tuple(rankers),
            units=None if self.units == "passage" else self.units,
            triples=self.units == "triple",
        )


def native_rag(asked: Question, config: NativeRagConfig) -> Program[Prediction]:
    """Retrieves once, reads once."""
    question, errors = asked.question, collections.Counter[str]()
    found = yield from search(question, config.num_passages, config.rerank_from, config.min_score)
    step, evidence = Step(question, tuple(p.id for p in found.passages)), found.passages
    facts: Sequence[Fact] = ()
    if config.units != "passage":
        ranked, scores = yield from _units(question, found.passages, config)
        step, facts = dataclasses.replace(step, candidates=ranked, scores=scores), ranked
        pool = Evidence(config.normalization)
        pool.see(found.passages)
        evidence = [_line(fact, pool) for fact in facts[: config.num_read]]
    attempt = yield from read(
        question, config.units, evidence[: config.num_read], config.reader_format, errors
    )
    return Prediction(
        attempt.answer,
        config.units,
        passages=rank_passages(facts, [step]),
        sentences=rank_sentences(facts),
        triples=tuple(fact for fact in facts if isinstance(fact, Triple)),
        steps=(step,),
        attempts=(attempt,),
        parse_errors=dict(errors),
    )


METHOD = Method(native_rag, NativeRagConfig)


def _units(
    question: str, passages: Sequence[Passage], config: NativeRagConfig
) -> Program[tuple[tuple[Fact, ...], tuple[float, ...]]]:
    """The passages' sentences or triples, best first, with their scores."""
    if config.units == "triple":
        extracted: Extracted = yield Extract(tuple(passages))
        stated = (triple for triples in extracted.triples for triple in triples or ())
        facts = tuple(fact.triple for fact in merge_sources(stated, config.normalization))
        best: Ranked[Triple] = yield Rank(question, facts, 0, "units")
        return best.texts, best.scores
    places = places_of(passages)
    ranked: Ranked[str] = yield Rank(question, tuple(places), 0, "units")
    return tuple(places[text] for text in ranked.texts), ranked.scores


def _line(fact: Fact, pool: Evidence) -> str:
    """A unit as the reader sees it."""
    if isinstance(fact, Triple):
        return triple_line(fact, pool.normalization)
    passage_id, index = place_of(fact)
    assert passage_id is not None and index is not None  # of a sentence
    return pool.sentence((passage_id, index))
