"""The state of one question while KiRAG answers it: the chain, the pool of units, and rankings."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from cirag_jax.datasets.chains import query_text
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.evidence import Candidates, Evidence, best_scores, location_of
from cirag_jax.methods.kirag import prompts
from cirag_jax.methods.kirag.settings import KiragConfig
from cirag_jax.triples.normalization import normalize
from cirag_jax.types import Step, Unit

_MIN_F1 = 0.6  # Minimum F1 to match a text of the chain with a unit of the pool (released code).


@dataclasses.dataclass
class PooledUnit:
    """A unit of the pool T_q; units with the same text are merged.

    Attributes:
      unit: the first unit with the text.
      passages: ids of the passages that contain the unit.
      score: the unit's best score at any step, plus the boost of the released code.
    """

    unit: Unit
    passages: dict[str, None]
    score: float


class ChainLink(NamedTuple):
    """The extension of the chain in one step.

    Attributes:
      text: text of the appended unit, as in queries and prompts; empty if nothing is appended.
      unit: the appended unit, or None if the text matches no unit of the pool.
      is_last: whether the chain is complete.
      answer: the answer in the constructor's response, or None.
      response: the constructor's response.
    """

    text: str
    unit: Unit | None
    is_last: bool
    answer: str | None = None
    response: str = ""


class State:
    """The state of one question.

    Attributes:
      question: the question q.
      config: the settings.
      evidence: retrieved passages and the units of the chain.
      units: passage id -> the units of the retrieved passage.
      pool: text -> candidate, for the candidates of all steps (T_q).
      chain: texts of the chain.
      chain_units: units of the chain.
      steps: the finished steps.
      demonstrations: conversations about training questions.
      parse_errors: number of malformed outputs of each kind.
    """

    def __init__(self, question: str, config: KiragConfig):
        self.question = question
        self.config = config
        self.evidence = Evidence(config.normalization)
        self.units: dict[str, tuple[Unit, ...]] = {}
        self.pool: dict[str, PooledUnit] = {}
        self.chain: list[str] = []
        self.chain_units: list[Unit] = []
        self.steps: list[Step] = []
        self.demonstrations: tuple[tuple[Message, ...], ...] = ()
        self.parse_errors = collections.Counter[str]()

    @property
    def retriever_query(self) -> str:
        """The retriever's query q_i."""
        if self.config.retriever_query == "last":
            return " ".join([self.question, *self.chain[-1:]])
        return query_text(self.question, self.chain, self.config.units)

    @property
    def aligner_query(self) -> str:
        """The aligner's query q_i."""
        list_when_empty = self.config.list_when_empty
        return query_text(
            self.question, self.chain, self.config.units, list_when_empty=list_when_empty
        )

    def texts(self, candidates: Candidates) -> tuple[str, ...]:
        """Returns the candidates as text for the aligner and the constructor."""
        return tuple(map(self.evidence.text, candidates.facts))

    def merge(self, candidates: Candidates, sources: Mapping[str, Mapping[str, None]]) -> None:
        """Adds the candidates T_q^i of a step to the pool T_q, whose units keep their best scores.

        ``sources`` maps the text of each candidate to the ids of its passages.
        """
        for text, unit, score in zip(self.texts(candidates), *candidates, strict=True):
            pooled = self.pool.setdefault(text, PooledUnit(unit, {}, score))
            pooled.passages.update(sources[text])
            pooled.score = max(pooled.score, score)

    def best_of_pool(self) -> Candidates:
        """Returns the ``config.pool_size`` best units of the pool T_q."""
        best = sorted(self.pool.values(), key=lambda pooled: -pooled.score)
        best = best[: self.config.pool_size]
        return Candidates(tuple(p.unit for p in best), tuple(p.score for p in best))

    def append(self, link: ChainLink) -> None:
        """Extends the chain and applies ``config.boost``."""
        if link.text:
            self.chain.append(link.text)
        if link.unit is not None:
            self.chain_units.append(link.unit)
            self.evidence.keep([link.unit])
        if self.config.boost:
            self._boost(link)

    def nearest(self, text: str) -> PooledUnit | None:
        """Returns the unit of the pool that best matches a unit of the chain, or None.

        As in the released code, a sentence in a chain of triples matches no unit.
        """
        if not prompts.is_unit(text, self.config.units):
            return None
        best = max(self.pool, key=lambda unit_text: token_f1(unit_text, text), default="")
        return self.pool[best] if token_f1(best, text) >= _MIN_F1 else None

    def _boost(self, link: ChainLink) -> None:
        """Raises the scores of the appended unit and of the best unit that contains the answer."""
        appended = self.nearest(link.text)
        if appended is not None:
            appended.score += self.config.boost
        answer = prompts.answer_in(link.text) if link.text else link.answer
        answer = normalize(answer or "", "unicode")
        if answer in ("", "yes", "no"):
            return
        for text, pooled in sorted(self.pool.items(), key=lambda item: -item[1].score):
            if f" {answer} " in f" {normalize(text, 'unicode')} ":
                pooled.score += self.config.boost
                return

    def ranked_passages(self) -> tuple[str, ...]:
        """Ranks passages by their best unit (section 3.3); other retrieved passages follow."""
        best = best_scores(
            (p, pooled.score) for pooled in self.pool.values() for p in pooled.passages
        )
        by_score = sorted(best, key=lambda passage: -best[passage])
        first: list[str] = []
        if self.config.ranking == "chain" or not self.config.use_aligner:
            sources = map(location_of, self.chain_units)
            first = [passage for passage, _ in sources if passage is not None]
        retrieved = (passage.id for passage in self.evidence.retrieved)
        return tuple(dict.fromkeys([*first, *by_score, *retrieved]))


def token_f1(text: str, other: str) -> float:
    """Returns the token-level F1 score of two texts."""
    a, b = (collections.Counter(normalize(t, "unicode").split()) for t in (text, other))
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 0.0
