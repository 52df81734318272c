"""HippoRAG 2: triples near the question, recognition memory, personalized PageRank.

Gutiérrez et al., "From RAG to Memory" (ICML 2025). The graph is `cirag_jax.retrieval.graph`.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

from cirag_jax.errors import UserError
from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.cirag.prompts import parse_facts, render_facts
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.reading import ReaderFormat, read, render_reader
from cirag_jax.methods.common.reading_prompts import EXAMPLE_QUERY
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import (
    Generate,
    Generated,
    Link,
    Linked,
    Needs,
    Program,
    Retrieve,
    Retrieved,
    Walk,
)
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import (
    Count,
    NonNegativeFloat,
    PositiveInt,
    Prediction,
    Question,
    Step,
    Triple,
    UnitInterval,
)
from cirag_jax.validation import check_at_most, check_fields


@dataclasses.dataclass(frozen=True)
class Hipporag2Config:
    """HippoRAG 2's settings, with the defaults of its code.

    Attributes:
      num_triples: triples that the question is linked to.
      recognition: who decides which of these triples are relevant: model (the paper), or score
        (ours, for small models: triples with a cosine of at least min_score).
      min_score: see recognition; -1 keeps all triples. The default was chosen for MiniLM on
        MuSiQue (configs/retrieval.py).
      match_cutoff: difflib's ratio from which a triple that the model writes is one of the linked
        triples; the code has 0.
      num_passages: number of retrieved passages.
      num_read: number of retrieved passages that the reader reads.
      num_entities: entities at which the walk starts; 0 is all entities of the relevant triples.
      num_seeds: passages at which the walk starts; 0 is all.
      passage_weight: weight of the best passage as a start of the walk.
      restart: probability of a restart at each step of the walk (1 - damping).
      normalization: normal form of entities and triples.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought (as in HippoRAG),
        chain, brief.
    """

    num_triples: PositiveInt = 5
    recognition: Literal["model", "score"] = "model"
    min_score: float = 0.55
    match_cutoff: UnitInterval = 0.8
    num_passages: PositiveInt = 10
    num_read: PositiveInt = 5
    num_entities: Count = 5
    num_seeds: Count = 0
    passage_weight: NonNegativeFloat = 0.05
    restart: UnitInterval = 0.5
    normalization: Normalization = "ascii"
    reader_format: ReaderFormat = "thought"

    def __post_init__(self):
        check_fields(self)
        if not 0 < self.restart < 1:
            raise UserError(f"restart={self.restart} must lie between 0 and 1.")
        check_at_most(self, "num_passages", "num_read")

    @property
    def needs(self) -> Needs:
        """Needs the graph, the reader, and a model that recognizes triples unless scores do."""
        recognizer = ("recognizer",) if self.recognition == "model" else ()
        return Needs(roles=(*recognizer, "reader"), triples=True, graph=True)


def hipporag2(question: Question, config: Hipporag2Config) -> Program[Prediction]:
    """Answers a question: searches the graph once and reads the best passages."""
    errors = collections.Counter[str]()
    retrieved, step = yield from search_graph(question.question, config, errors)
    passages = retrieved.passages[: config.num_read]
    attempt = yield from read(question.question, "passage", passages, config.reader_format, errors)
    return Prediction(
        attempt.answer,
        "passage",
        step.passages,
        triples=tuple(dict.fromkeys([*step.kept, *step.candidates])),
        steps=(step,),
        attempts=(attempt,),
        parse_errors=dict(errors),
    )


def _render(config: Hipporag2Config) -> None:
    recognition_messages("", (), config.normalization)
    render_reader(config.reader_format, "passage")


METHOD = Method(hipporag2, Hipporag2Config, _render)


def search_graph(
    query: str, config: Hipporag2Config, errors: collections.Counter[str]
) -> Program[tuple[Retrieved, Step[Triple]]]:
    """Returns the best passages: those of a walk, or without a relevant triple the nearest."""
    linked: Linked = yield Link(query, config.num_triples)
    if not linked.triples:
        errors["no_triples"] += 1
    kept, response = yield from recognize(query, linked, config, errors)
    if kept:
        weights = relative_scores(linked)
        retrieved: Retrieved = yield Walk(
            query,
            kept,
            tuple(weights[triple] for triple in kept),
            config.num_passages,
            config.num_entities,
            config.num_seeds,
            config.passage_weight,
            config.restart,
        )
    else:
        retrieved = yield Retrieve(query, config.num_passages)
    step = Step(query, retrieved.ids, linked.triples, linked.scores, kept=kept, response=response)
    return retrieved, step


def recognize(
    query: str, linked: Linked, config: Hipporag2Config, errors: collections.Counter[str]
) -> Program[tuple[tuple[Triple, ...], str]]:
    """Returns the relevant ones of the linked triples, and the model's response (recognition)."""
    if config.recognition == "score" or not linked.triples:
        pairs = zip(linked.triples, linked.scores, strict=True)
        return tuple(triple for triple, score in pairs if score >= config.min_score), ""
    messages = recognition_messages(query, linked.triples, config.normalization)
    response: Generated = yield Generate(messages, "recognizer")
    kept, problems = parse_facts(
        PROMPT.read(response.text),
        linked.triples,
        config.normalization,
        config.match_cutoff,
        response.finish_reason == "length",
    )
    errors.update(f"recognition_{problem}" for problem in problems)
    return kept, response.text


def relative_scores(linked: Linked) -> dict[Triple, float]:
    """Maps each linked triple to its score, scaled to [0, 1] over all triples of the corpus."""
    width = max(linked.scores, default=0.0) - linked.lowest
    return {
        triple: (score - linked.lowest) / width if width > 0 else 1.0
        for triple, score in zip(linked.triples, linked.scores, strict=True)
    }


# -------------------------------------------------------------------------------------- prompts

PROMPT = Prompt("recognizer", labels={"question": "Question:", "facts": "Facts:"}, keys=("fact",))
_INSTRUCTION = (
    "You are given a question and facts that a search has found for it. Each fact is a list of "
    "subject, relation and object. Keep the facts that help to answer the question, also those "
    "that are only a step toward the answer, and copy them exactly. Facts about other things are "
    'dropped. Answer with one JSON object and nothing else: {"fact": [["subject", "relation", '
    '"object"]]}. If no fact helps, write {"fact": []}.'
)
_EXAMPLE = (
    Triple("Mira Solheim", "born in", "Lindvik"),
    Triple("Mira Solheim", "profession", "cellist"),
    Triple("Solheim", "is a", "village"),
    Triple("Lindvik", "town in", "Norway"),
)


def recognition_messages(
    query: str, triples: Sequence[Triple], normalization: Normalization
) -> tuple[Message, ...]:
    """Returns the conversation that requests the relevant ones of ``triples``."""

    def turn(question: str, facts: Sequence[Triple]) -> Message:
        listed = render_facts(facts, normalization)
        return Message("user", f"Question: {one_line(question)}\nFacts: {listed}")

    kept = render_facts([_EXAMPLE[0], _EXAMPLE[3]], normalization)
    example = (turn(EXAMPLE_QUERY, _EXAMPLE), Message("assistant", kept))
    return PROMPT.conversation(_INSTRUCTION, example, turn(query, triples))
