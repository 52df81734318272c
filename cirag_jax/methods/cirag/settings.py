"""The settings of CIRAG."""

import dataclasses
from typing import Literal

from cirag_jax.datasets.chains import UNIT_KINDS, UnitKind
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Ability
from cirag_jax.methods.cirag.cascade import CascadeConfig
from cirag_jax.methods.cirag.compact import Units
from cirag_jax.methods.cirag.prompts import PromptFormat
from cirag_jax.methods.common.reading_prompts import ReaderFormat
from cirag_jax.runtime.requests import Needs
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Count, Granularity, NonNegativeFloat, PositiveInt, UnitInterval
from cirag_jax.validation import check_fields

# Settings that change the integrator's prompt. A trained integrator needs its training values.
PROMPT_FIELDS = ("units", "normalization", "prompt_format", "few_shot")


@dataclasses.dataclass(frozen=True)
class CiragConfig(CascadeConfig):
    """CIRAG's settings; the defaults are the paper's (Appendix B.2).

    Attributes:
      max_steps: L, maximum number of rounds; 0 answers from the passages nearest to the question.
      num_passages: K, passages retrieved per round.
      units: units of the candidates: triple (paper), or sentence, which needs no extraction (as in
        KiRAG-Sent). With sentence, the cascade starts at sentences, and integrator=model needs
        prompt_format=compact.
      num_candidates: N, candidates per round.
      use_reranker: rank the candidates; off keeps all of them, in passage order.
      granularities: granularities that the cascade reads, in this order: triple, sentence, passage.
      force_answer: if the reader refuses at every granularity, repeat the last one (passages if
        its pool is empty) with a prompt that does not allow refusals. In the preset small, null
        means true, or false for questions about your own documents.
      wide_refusal: also treat paraphrases of "Unanswerable" as refusals.
      grounded_answers: also treat an answer as a refusal if it is neither yes nor no and does not
        occur word for word in the evidence (ours; small models seldom refuse). In the preset
        small, null means false, or true for questions about your own documents.
      prompt_format: multi_turn (one turn per round); paper (a single turn with the history last);
        or compact (ours: candidates are kept by number, which takes a third fewer tokens).
      normalization: normal form of triples: ascii (the paper's case study) or unicode.
      match_cutoff: minimum similarity for replacing a written fact that is no candidate with the
        most similar candidate.
      retry: request a missing question section once.
      on_repeat: action if the next query repeats an earlier query: ask (use it again, paper), stop,
        or chain (use the question and the kept facts as the query, ours).
      next_query: query of the next round: written (by the integrator, paper), or chain (the
        question and the kept facts; the integrator still decides when to stop; ours).
      only_new: drop candidates that earlier rounds kept (ours).
      prefilled_headers: prefill the headers of the response, which helps small integrators follow
        the format; the backend must be able to continue an assistant turn.
      few_shot: show the integrator a worked example (two in ``compact``); the paper shows none.
      integrator: model (paper); aligner (keeps the best candidates and searches with the question
        and the chain, as KiRAG does without its constructor); or top_k (a baseline: keeps the three
        best candidates and repeats the question).
      stop_below: with integrator=aligner, the rounds end if the best new candidate scores less than
        this; with -1, they never end early.
      keep: number of new facts that integrator=aligner keeps per round; the best fact extends the
        chain.
      link_bonus: if above 0, passages whose titles occur in the question or in kept facts are added
        to the retrieved passages, and their facts get this bonus in the ranking, until the chain
        has a fact of the passage (ours).
      reader_format: thought (the prompt has a worked example, the response reasons first); or, for
        trained readers, chain (the facts that lead to the answer come first) or brief (only the
        answer).
      decision_tokens: maximum number of new tokens of an integration response; 0 means the role's
        limit.
      answer_tokens: maximum number of new tokens of an answer; 0 means the role's limit.
      answer_logprobs: record the log-probabilities of answers, for the training of a router.
      router: workdir of a trained granularity router (configs/router.py), which skips
        granularities of the cascade (ours); null reads all of them, as the paper does.
      router_skip: a granularity is skipped if the router's probability that reading it is
        worthwhile is below this. The last granularity is never skipped.
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
    integrator: Literal["model", "aligner", "top_k"] = "model"
    stop_below: float = -1.0
    keep: PositiveInt = 1
    link_bonus: NonNegativeFloat = 0.0
    reader_format: ReaderFormat = "thought"
    decision_tokens: Count = 0
    answer_tokens: Count = 0
    answer_logprobs: bool = False
    router: str | None = None
    router_skip: UnitInterval = 0.5

    def __post_init__(self):
        check_fields(self)
        in_order = [unit for unit in UNIT_KINDS if unit in self.granularities]
        if not in_order or list(self.granularities) != in_order:
            raise UserError(
                f"granularities={self.granularities!r} must be one or more of "
                f"{', '.join(UNIT_KINDS)}, in this order."
            )
        by_model = self.units == "sentence" and self.integrator == "model"
        if by_model and self.prompt_format != "compact":
            raise UserError(
                "units=sentence needs integrator=aligner or top_k, or prompt_format=compact, not "
                f"{self.prompt_format}."
            )
        if not self.pools:
            raise UserError(
                f"granularities={self.granularities!r} needs sentence or passage with "
                "units=sentence, which collects no triples."
            )
        if (self.integrator == "aligner" or self.link_bonus) and not self.use_reranker:
            raise UserError("integrator=aligner and link_bonus need use_reranker=true.")

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities that can have evidence, in the order of the cascade."""
        has_triples = self.units == "triple"
        return tuple(unit for unit in self.granularities if unit != "triple" or has_triples)

    @property
    def needs(self) -> Needs:
        """Needs the reader; and the integrator, the ranker and triples only if there are rounds."""
        has_rounds = self.max_steps > 0
        asks_model = has_rounds and self.integrator == "model"
        abilities: dict[str, tuple[Ability, ...]] = {}
        if asks_model and self.prefilled_headers:
            abilities["integrator"] = ("continue_final",)
        if self.answer_logprobs or self.router is not None:
            abilities["reader"] = ("logprobs",)
        ranks = has_rounds and self.use_reranker
        return Needs(
            roles=("integrator", "reader") if asks_model else ("reader",),
            abilities=abilities,
            rankers=("triples",) if ranks else (),
            units=self.units if ranks else None,
            links=has_rounds and self.link_bonus > 0,
            router=self.router is not None,
            triples=has_rounds and self.units == "triple",
        )
