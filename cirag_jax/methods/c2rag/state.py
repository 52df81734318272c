"""The state of one question while C2RAG answers it, and the texts found for its constraints."""

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
    """An evidence text with its score: a passage, or one of its sentences (by index)."""

    passage: Passage
    sentence: int | None
    score: float

    @property
    def line(self) -> str:
        """The text in the form of the reader's prompt."""
        if self.sentence is None:
            return passage_line(self.passage)
        return sentence_line(self.passage, self.sentence)


@dataclasses.dataclass
class State:
    """The state of one question. Constraints are identified by their index in the plan.

    Attributes:
      question: the question q.
      config: the settings.
      passages: all retrieved passages by id, in order.
      graph: the graph of U(q); None with kg_scope=corpus, where requests search the corpus's graph.
      plan: the constraints of the plan P.
      pools: candidates found in the graph, by constraint.
      texts: texts found by textual recovery, by constraint.
      text_bindings: bindings read from text.
      parse_errors: number of malformed outputs of each kind.
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

    def add_retrieved(self, passages: Iterable[Passage]) -> None:
        """Records retrieved passages."""
        self.passages.update((p.id, p) for p in passages if p.id not in self.passages)
