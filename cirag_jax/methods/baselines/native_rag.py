"""NativeRAG: retrieves passages for the question and reads them, in a single round."""

import collections
import dataclasses
from collections.abc import Sequence

from cirag_jax.datasets.chains import UnitKind
from cirag_jax.errors import UserError
from cirag_jax.methods.common.evidence import (
    rank_passages,
    rank_sentences,
    sentence_line,
    sentences_by_text,
    triple_line,
)
from cirag_jax.methods.common.reading import ReaderFormat, SearchConfig, read, render_reader, search
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Extract, Extracted, Needs, Program, Rank, Ranked
from cirag_jax.triples.normalization import Normalization, merge_sources
from cirag_jax.types import (
    Count,
    Passage,
    PositiveInt,
    Prediction,
    Question,
    Sentence,
    Step,
    Triple,
)
from cirag_jax.validation import check_at_most


@dataclasses.dataclass(frozen=True)
class NativeRagConfig(SearchConfig):
    """NativeRAG's settings, with the defaults of FlashRAG's naive generation.

    Attributes:
      num_passages: number of retrieved passages.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
      num_read: number of units that the reader reads (all ten in the CIRAG paper).
      units: units that the reader reads: passage; or the passages' units of kind sentence or
        triple, ranked against the question (the retriever row in CIRAG's Table 5).
      rerank_from: passages retrieved for reranking, which keeps the best num_passages; 0 disables
        reranking (DualRAG's NativeRAG: 50).
      min_score: reranked passages with this score or less are dropped.
      normalization: normal form in which triples are compared.
    """

    num_passages: PositiveInt = 10
    num_read: PositiveInt = 10
    reader_format: ReaderFormat = "documents"
    units: UnitKind = "passage"
    rerank_from: Count = 0
    min_score: float = 0.0
    normalization: Normalization = "ascii"

    def __post_init__(self):
        super().__post_init__()
        if self.units == "passage":
            check_at_most(self, "num_passages", "num_read")
        if self.rerank_from and self.rerank_from < self.num_passages:
            raise UserError(
                f"rerank_from={self.rerank_from} must be 0 or at least "
                f"num_passages={self.num_passages}."
            )
        if self.units != "passage" and self.reader_format == "documents":
            raise UserError(f"units={self.units} needs reader_format=thought, chain or brief.")

    @property
    def needs(self) -> Needs:
        """Needs the reader, and rankers for passages or units if the settings rank them."""
        return Needs(
            roles=("reader",),
            rankers=(
                *(("passages",) if self.rerank_from else ()),
                *(("units",) if self.units != "passage" else ()),
            ),
            units=None if self.units == "passage" else self.units,
            triples=self.units == "triple",
        )


def native_rag(question: Question, config: NativeRagConfig) -> Program[Prediction]:
    """Answers a question by retrieving once and reading once."""
    query, errors = question.question, collections.Counter[str]()
    retrieved = yield from search(query, config)
    step, lines = Step(query, retrieved.ids), retrieved.passages
    facts: tuple[Triple | Sentence, ...] = ()
    if config.units != "passage":
        facts, scores = yield from _rank_units(query, retrieved.passages, config)
        step = dataclasses.replace(step, candidates=facts, scores=scores)
        by_id = {passage.id: passage for passage in retrieved.passages}
        lines = [
            triple_line(fact, config.normalization)
            if isinstance(fact, Triple)
            else sentence_line(by_id[fact.passage_id], fact.index)
            for fact in facts
        ]
    attempt = yield from read(
        query, config.units, lines[: config.num_read], config.reader_format, errors
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


METHOD = Method(
    native_rag, NativeRagConfig, lambda config: render_reader(config.reader_format, config.units)
)


def _rank_units(
    query: str, passages: Sequence[Passage], config: NativeRagConfig
) -> Program[tuple[tuple[Triple | Sentence, ...], tuple[float, ...]]]:
    """Returns the passages' sentences or triples, best first, with their scores."""
    if config.units == "triple":
        extracted: Extracted = yield Extract(tuple(passages))
        triples = (triple for triples in extracted.triples for triple in triples or ())
        facts = tuple(fact.triple for fact in merge_sources(triples, config.normalization))
        best: Ranked[Triple] = yield Rank(query, facts, 0, "units")
        return best.texts, best.scores
    sentences = sentences_by_text(passages)
    ranked: Ranked[str] = yield Rank(query, tuple(sentences), 0, "units")
    return tuple(sentences[text] for text in ranked.texts), ranked.scores
