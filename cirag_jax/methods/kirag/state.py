"""The state of one question: chain, pool of units and the rankings that they induce."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from cirag_jax.datasets.chains import query_text
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.evidence import Candidates, Evidence, place_of
from cirag_jax.methods.kirag import prompts
from cirag_jax.methods.kirag.settings import KiragConfig
from cirag_jax.triples.normalization import normalise
from cirag_jax.types import Step, Unit

_CLOSED_ANSWERS = ("yes", "no")
_MIN_F1 = 0.6  # released code: above it a chain's text is taken for a unit of the pool


@dataclasses.dataclass
class PooledUnit:
    """A unit of T_q; equal texts of several passages are one.

    Attributes:
      unit: the first of them.
      passages: ids of the passages that state it.
      score: its best score at any step, and what the released code adds.
    """

    unit: Unit
    passages: dict[str, None]
    score: float


class Link(NamedTuple):
    """What a step adds to the chain.

    Attributes:
      text: as queries and prompts have it; empty: nothing.
      unit: the unit; None if the constructor wrote none of the pool.
      ends: whether the chain is complete.
      answer: what the constructor says the answer is.
      response: as it wrote it.
    """

    text: str
    unit: Unit | None
    ends: bool
    answer: str | None = None
    response: str = ""


class State:
    """The state of one question.

    Attributes:
      question: as it was asked.
      config: the settings.
      evidence: retrieved passages and the facts of the chain.
      units: the units of each retrieved passage, by its id.
      pool: T_q by text.
      chain: the texts of the chain.
      links: the units of the chain.
      steps: the steps so far.
      demonstrations: conversations about training questions.
      parse_errors: malformed output by kind.
    """

    def __init__(self, question: str, config: KiragConfig):
        self.question = question
        self.config = config
        self.evidence = Evidence(config.normalization)
        self.units: dict[str, tuple[Unit, ...]] = {}
        self.pool: dict[str, PooledUnit] = {}
        self.chain: list[str] = []
        self.links: list[Unit] = []
        self.steps: list[Step] = []
        self.demonstrations: tuple[tuple[Message, ...], ...] = ()
        self.parse_errors = collections.Counter[str]()

    @property
    def retriever_query(self) -> str:
        """q_i as the retriever gets it."""
        if self.config.retriever_query == "last":
            return " ".join([self.question, *self.chain[-1:]])
        return query_text(self.question, self.chain, self.config.units)

    @property
    def aligner_query(self) -> str:
        """q_i as the aligner gets it."""
        empty = self.config.list_when_empty
        return query_text(self.question, self.chain, self.config.units, list_when_empty=empty)

    def texts(self, candidates: Candidates) -> tuple[str, ...]:
        """The candidates as aligner and constructor read them."""
        return tuple(self.evidence.text(unit) for unit in candidates.facts)

    def merge(self, candidates: Candidates, sources: Mapping[str, Mapping[str, None]]) -> None:
        """Adds T_q^i to T_q: a unit keeps the best of its scores.

        Args:
          candidates: the units.
          sources: ids of the passages that state a text.
        """
        for text, unit, score in zip(self.texts(candidates), *candidates, strict=True):
            pooled = self.pool.setdefault(text, PooledUnit(unit, {}, score))
            pooled.passages.update(sources[text])
            pooled.score = max(pooled.score, score)

    def best_of_pool(self) -> Candidates:
        """The first ``pool_size`` of T_q."""
        best = sorted(self.pool.values(), key=lambda pooled: -pooled.score)
        best = best[: self.config.pool_size]
        return Candidates(
            tuple(pooled.unit for pooled in best), tuple(pooled.score for pooled in best)
        )

    def append(self, link: Link) -> None:
        """Extends the chain, and raises scores as the released code does."""
        if link.text:
            self.chain.append(link.text)
        if link.unit is not None:
            self.links.append(link.unit)
            self.evidence.keep([link.unit])
        if self.config.boost:
            self._boost(link)

    def nearest(self, text: str) -> PooledUnit | None:
        """The unit of T_q that a chain's text stands for by the released code's rule."""
        best = max(self.pool, key=lambda pooled: token_f1(pooled, text), default="")
        return self.pool[best] if token_f1(best, text) >= _MIN_F1 else None

    def _boost(self, link: Link) -> None:
        """Raises the chosen unit and the best one that holds the answer."""
        chosen = self.nearest(link.text)
        if chosen is not None:
            chosen.score += self.config.boost
        answer = prompts.answer_in(link.text) if link.text else link.answer
        answer = normalise(answer or "", "unicode")
        if not answer or answer in _CLOSED_ANSWERS:
            return
        for text, pooled in sorted(self.pool.items(), key=lambda item: -item[1].score):
            if f" {answer} " in f" {normalise(text, 'unicode')} ":
                pooled.score += self.config.boost
                return

    def ranked_passages(self) -> tuple[str, ...]:
        """D_q: each passage by its best unit (section 3.3), then the others as retrieved."""
        best: dict[str, float] = {}
        for pooled in self.pool.values():
            for passage in pooled.passages:
                best[passage] = max(best.get(passage, pooled.score), pooled.score)
        by_score = sorted(best, key=lambda passage: -best[passage])
        first: list[str] = []
        if self.config.ranking == "chain" or not self.config.use_aligner:
            first = [passage for passage, _ in map(place_of, self.links) if passage is not None]
        retrieved = (passage.id for passage in self.evidence.seen)
        return tuple(dict.fromkeys([*first, *by_score, *retrieved]))


def token_f1(text: str, other: str) -> float:
    """F1 of two texts' words."""
    a, b = (collections.Counter(normalise(t, "unicode").split()) for t in (text, other))
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 0.0
