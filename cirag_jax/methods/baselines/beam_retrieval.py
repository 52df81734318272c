"""Beam retrieval over chains of passages, after BeamDR (Zhao et al., NAACL 2021).

BeamDR trains its own encoder for question and chain. This version uses the configured encoder.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from cirag_jax.datasets.chains import passage_text, query_text
from cirag_jax.methods.common.evidence import best_scores
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.reading import ReaderFormat, read, render_reader
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Needs, Program, Retrieve, Retrieved
from cirag_jax.types import Passage, PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class BeamRetrievalConfig:
    """The settings of beam retrieval.

    Attributes:
      max_hops: maximum number of passages in a chain.
      num_chains: chains kept per hop.
      num_passages: passages retrieved to extend a chain.
      num_read: number of passages that the reader reads; the passages of the best chains come
        first.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
    """

    needs = Needs(roles=("reader",))

    max_hops: PositiveInt = 2
    num_chains: PositiveInt = 5
    num_passages: PositiveInt = 10
    num_read: PositiveInt = 5
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        check_fields(self)


class PassageChain(NamedTuple):
    """A chain of passages in order of retrieval, and the sum of their scores."""

    passages: tuple[Passage, ...] = ()
    score: float = 0.0


def beam_retrieval(question: Question, config: BeamRetrievalConfig) -> Program[Prediction]:
    """Answers a question: extends the best chains hop by hop, then reads their passages."""
    beam, steps, errors = [PassageChain()], [], collections.Counter[str]()
    for _ in range(config.max_hops):
        # Aligners are trained on queries of this form.
        queries = [
            query_text(question.question, [passage_text(p) for p in chain.passages], "passage")
            for chain in beam
        ]
        responses: Sequence[Retrieved] = yield [
            Retrieve(query, config.num_passages + len(chain.passages))
            for query, chain in zip(queries, beam, strict=True)
        ]
        longer = [
            PassageChain((*chain.passages, passage), chain.score + score)
            for chain, retrieved in zip(beam, responses, strict=True)
            for passage, score in zip(retrieved.passages, retrieved.scores, strict=True)
            if passage not in chain.passages
        ]
        if not longer:
            break
        beam = sorted(longer, key=lambda chain: -chain.score)[: config.num_chains]
        steps.append(_step(queries, responses, beam))
    ranked = list(dict.fromkeys(passage for chain in beam for passage in chain.passages))
    passages = ranked[: config.num_read]
    attempt = yield from read(question.question, "passage", passages, config.reader_format, errors)
    others = (passage_id for step in steps for passage_id in step.passages)
    return passage_prediction(
        dict.fromkeys([*(passage.id for passage in ranked), *others]), steps, [attempt], errors
    )


METHOD = Method(
    beam_retrieval,
    BeamRetrievalConfig,
    lambda config: render_reader(config.reader_format, "passage"),
)


def _step(
    queries: Sequence[str], responses: Sequence[Retrieved], beam: Sequence[PassageChain]
) -> Step[str]:
    best = best_scores(
        (passage.id, score)
        for retrieved in responses
        for passage, score in zip(retrieved.passages, retrieved.scores, strict=True)
    )
    first, *more = queries
    chains = [{"passages": [p.id for p in c.passages], "score": c.score} for c in beam]
    return Step(
        first,
        tuple(sorted(best, key=lambda passage_id: -best[passage_id])),
        more_queries=tuple(more),
        kept=tuple(dict.fromkeys(c.passages[-1].id for c in beam)),
        notes={"chains": chains},
    )
