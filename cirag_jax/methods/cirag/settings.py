"""CIRAG's switches."""

import dataclasses
from typing import Literal

from cirag_jax.datasets.chains import UNIT_KINDS, UnitKind
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Ability
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.prompts import PromptFormat
from cirag_jax.methods.common.reading_prompts import ReaderFormat
from cirag_jax.runtime.requests import Needs
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Count, Granularity, NonNegativeFloat, PositiveInt, UnitInterval
from cirag_jax.validation import check_fields

# The fields that say how the integrator's conversations read: a student is asked as it was trained.
PROMPT_FIELDS = ("units", "normalization", "prompt_format", "few_shot")


@dataclasses.dataclass(frozen=True)
class CiragConfig:
    """CIRAG's switches; the defaults are the paper's (its Appendix B.2 and our specification).

    Attributes:
      max_steps: L, rounds of construction-integration; 0: answer from the first retrieval alone.
      num_passages: K, passages retrieved a round.
      units: of the candidates: triple, or sentence where nobody extracted triples (as KiRAG-Sent);
        the cascade then begins at sentences, and a language model needs prompt_format=compact.
      num_candidates: N, candidates a round.
      use_reranker: without it all of them are candidates, in passage order.
      granularities: steps of the cascade, any subset of triple, sentence, passage, in this order.
      force_answer: where every granularity refuses, ask the last one again without letting it
        refuse (the passages, where its pool is empty).
      wide_refusal: also take paraphrases of "Unanswerable" for a refusal.
      grounded_answers: also take for a refusal an answer whose words the evidence does not have in
        a row, unless it is yes or no: small models seldom refuse. Ours.
      prompt_format: multi_turn, paper (one turn, history last), or compact (ours: candidates are
        kept by number, in two thirds of the tokens).
      normalization: normalisation of triples: ascii (the paper's case study) or unicode.
      match_cutoff: least similarity at which a fact that is no candidate is taken for one.
      retry: ask once more for a missing question section.
      on_repeat: what follows a next query that was asked before: ask it again (paper), ``stop``, or
        ask the question with what was kept (``chain``, ours): the same query finds the same.
      next_query: what a round searches with: the query that the integrator has written (paper), or
        the question and what was kept (``chain``, ours), whatever it writes; it still says when to
        stop.
      only_new: facts kept in earlier rounds are no candidates again. Ours.
      prefilled_headers: write the headers for the integrator and have it fill the sections one
        by one; small models then keep the format. A server must support continuing an
        assistant's turn.
      few_shot: show the integrator a worked example (two in ``compact``), which the paper's prompt
        has not.
      keep_above: above 0: every candidate is kept whose number has at least this share of the
        probability, which is divided among all numbers and "none"; compact format only. 0: those
        that the integrator writes.
      integrator: model; or, without a language model, aligner: in every round keep the candidate
        that the ranker, an aligner, puts first, and search with question and chain (KiRAG without
        its constructor); or what a trained integrator must beat: top_k keeps the three best and
        asks the question again, with next_query=chain the question with what was kept.
      stop_below: the aligner stops where its best new candidate scores less; -1: never.
      keep: new facts that the aligner keeps a round; the best of a round extends the chain.
      link_bonus: above 0: the passages that the question and the kept facts name by their titles
        are searched beside the retrieved ones, and their facts score so much more until the chain
        has been there. Ours.
      reader_format: thought (an example, reasoning before the answer); as readers are trained,
        chain (the facts that lead to the answer, then the answer) or brief (the answer alone).
      decision_tokens: most tokens of an integration response; 0: the role's.
      answer_tokens: most tokens of an answer; 0: the role's.
    """

    max_steps: Count = 4
    num_passages: PositiveInt = 10
    units: Units = "triple"
    num_candidates: PositiveInt = 30
    use_reranker: bool = True
    granularities: tuple[UnitKind, ...] = UNIT_KINDS
    force_answer: bool = False
    wide_refusal: bool = False
    grounded_answers: bool = False
    prompt_format: PromptFormat = "multi_turn"
    normalization: Normalization = "ascii"
    match_cutoff: UnitInterval = 0.8
    retry: bool = True
    on_repeat: Literal["ask", "stop", "chain"] = "ask"
    next_query: Literal["written", "chain"] = "written"
    only_new: bool = False
    prefilled_headers: bool = False
    few_shot: bool = False
    keep_above: UnitInterval = 0.0
    integrator: Literal["model", "aligner", "top_k"] = "model"
    stop_below: float = -1.0
    keep: PositiveInt = 1
    link_bonus: NonNegativeFloat = 0.0
    reader_format: ReaderFormat = "thought"
    decision_tokens: Count = 0
    answer_tokens: Count = 0

    def __post_init__(self):
        check_fields(self)
        in_order = [unit for unit in UNIT_KINDS if unit in self.granularities]
        if not in_order or list(self.granularities) != in_order:
            raise UserError(
                f"granularities={self.granularities!r} must be some of {', '.join(UNIT_KINDS)}, "
                "in this order."
            )
        if self.keep_above and (self.prompt_format != "compact" or self.prefilled_headers):
            raise UserError("keep_above needs prompt_format=compact, without prefilled_headers.")
        by_model = self.units == "sentence" and self.integrator == "model"
        if by_model and self.prompt_format != "compact":
            raise UserError(
                f"units=sentence needs prompt_format=compact, not {self.prompt_format}, or "
                "integrator=aligner or top_k."
            )
        if not self.pools:
            raise UserError("units=sentence has no triples to read: granularities needs another.")
        if (self.integrator == "aligner" or self.link_bonus) and not self.use_reranker:
            raise UserError("integrator=aligner needs use_reranker; so does link_bonus.")

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities that can hold something, in the order of the cascade."""
        return tuple(
            unit for unit in self.granularities if unit != "triple" or self.units == "triple"
        )

    @property
    def needs(self) -> Needs:
        """Without rounds there are no triples, so nothing to rank or to integrate."""
        rounds = self.max_steps > 0
        asks = rounds and self.integrator == "model"
        abilities: dict[str, tuple[Ability, ...]] = {}
        if asks and self.keep_above:
            abilities["integrator"] = ("continue_final", "score")
        elif asks and self.prefilled_headers:
            abilities["integrator"] = ("continue_final",)
        ranks = rounds and self.use_reranker
        return Needs(
            roles=("integrator", "reader") if asks else ("reader",),
            abilities=abilities,
            rankers=("triples",) if ranks else (),
            units=self.units if ranks else None,
            links=rounds and self.link_bonus > 0,
            triples=rounds and self.units == "triple",
        )
