"""The state of one question, and the evidence found for its constraints."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from cirag_jax.methods.c2rag.constraints import CandidatePool
from cirag_jax.methods.c2rag.prompts import Constraint
from cirag_jax.methods.c2rag.settings import C2ragConfig
from cirag_jax.methods.common.evidence import passage_line, sentence_line
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.types import Passage


class Excerpt(NamedTuple):
    """A piece of evidence: a passage, or one sentence of it, and its score."""

    passage: Passage
    sentence: int | None
    score: float

    @property
    def line(self) -> str:
        """As the reader sees it."""
        if self.sentence is None:
            return passage_line(self.passage)
        return sentence_line(self.passage, self.sentence)


@dataclasses.dataclass
class State:
    """The state of one question.

    Attributes:
      question: q.
      config: the switches.
      passages: everything retrieved, by id, in order.
      graph: of U(q); None: the corpus's, which is asked for.
      plan: the constraints.
      pools: what was found in the graph, by place in the plan.
      texts: what was recovered from text, by place in the plan.
      text_bindings: bindings read from text.
      parse_errors: malformed output by kind.
    """

    question: str
    config: C2ragConfig
    passages: dict[str, Passage] = dataclasses.field(default_factory=dict)
    graph: EntityIndex | None = None
    plan: tuple[Constraint, ...] = ()
    pools: dict[int, CandidatePool] = dataclasses.field(default_factory=dict)
    texts: dict[int, tuple[Excerpt, ...]] = dataclasses.field(default_factory=dict)
    text_bindings: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    parse_errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def see(self, passages: Iterable[Passage]) -> None:
        """Notes passages."""
        self.passages.update((p.id, p) for p in passages if p.id not in self.passages)
