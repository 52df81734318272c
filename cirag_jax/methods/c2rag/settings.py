"""The settings of C2RAG."""

import dataclasses
from typing import Annotated, Literal, get_args

from msgspec import Meta

from cirag_jax.errors import UserError
from cirag_jax.io import say
from cirag_jax.llm.types import Ability
from cirag_jax.methods.c2rag import prompts
from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.reading import NO_MINIMUM
from cirag_jax.runtime.requests import Needs
from cirag_jax.triples.entity_index import Match
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields

# Rules of the function `cirag_jax.methods.c2rag.constraints.shares`.
Rule = Literal["always_shift", "shift_if_nonpositive", "softmax"]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclasses.dataclass(frozen=True)
class C2ragConfig:
    """C2RAG's settings. Defaults are the paper's values, or ours where the paper gives none.

    Names such as "w/o Check" and NoC2RAG-1 are ablations in the paper.

    Attributes:
      num_passages: number of passages U(q) retrieved for the question; MuSiQue gives 20 per
        question.
      kg_scope: graph of the triples of U(q) (per_question, paper) or of all passages (corpus,
        released code).
      normalization: normal form in which names are compared: unicode or ascii.
      num_variants: m, number of wordings that the planner writes per relation, including the first.
      max_constraints: k, maximum number of constraints; a longer plan is unusable.
      num_examples: number of worked examples in the planner's prompt.
      plan_schema: force the plan into its JSON schema (not supported by every backend).
      plan_retries: how often an unusable plan is requested again.
      plan_failure: fallback for an unusable plan: question (the question is the only constraint),
        or empty (the reader gets no evidence; released code).
      num_anchors: E, number of graph entities matched to each name.
      anchor_match: similarity of names: coverage (Eq. 3) or ratio (difflib's; released code).
      num_relations: R, number of candidates selected by their relation (Eq. 5).
      num_structural: K_s, number of candidates selected by the reranker (Eq. 6), at most
        ``num_relations``.
      lin_relation: relation in Lin(tau), the text of a constraint: canonical (without variants), or
        variants (with its variants).
      sufficiency: criterion for a resolved constraint: neff (Eq. 8 and 9); score (the best
        candidate scores at least ``min_score``, which must be set; w/o Dist); off (any candidate;
        w/o Check).
      gamma: maximum N_eff, the number of competing candidates, of a resolved constraint.
      min_score: minimum score of the best candidate, with sufficiency=score or neff.
      neff_unit: compute N_eff over the triples of each constraint (constraint, paper), or over the
        entities of each unknown (variable, released code).
      neff_rule: conversion of scores to probabilities for N_eff: always_shift (Eq. 7),
        shift_if_nonpositive (released code) or softmax (ours).
      floor_at_zero: treat negative scores as 0 (released code).
      binding_end: end of a candidate that binds an unknown: slot (the unknown's place in the
        constraint, Eq. 13), or other_end (the end that is not an anchor; released code).
      intersect: bind an unknown only to names that all its constraints share, if there are any (Eq.
        14); off binds it to the names of any constraint.
      max_bound: maximum number of names per unknown; 0 means no limit.
      consistent_only: keep only candidates that agree with the bindings.
      propagation: fixpoint (repeat until nothing new is grounded) or single_pass (released code).
      ground_constants: look up constraints without unknowns in the graph (released code); off
        looks them up in text.
      bind_from_text: let the planner read names of unknowns from recovered text, as in the paper's
        case study but not in its section 3.3.
      resolved_evidence: evidence of a candidate: its source passage (passage), the first sentence
        of the source with both names (sentence, released code), or the source if it has both names
        (naming_passage, released code for MuSiQue).
      fetch_sources: with kg_scope=corpus, also read sources outside U(q); if off, candidates that
        only such sources state have no evidence (released code).
      recover_if_empty: look up a resolved constraint in text if its evidence is empty.
      recovery_unit: unit of recovered text: passage, or sentence (released code).
      num_dense: K'_t, passages retrieved for a constraint that is looked up in text. They come from
        U(q) if only the question's own context is searched (Eq. 11), otherwise from the corpus
        (ours).
      num_texts: K_t, number of texts that the reranker keeps; the texts are the num_dense passages
        or their sentences.
      recovery_question: include the question in the query that reranks texts (Eq. 12).
      max_texts: maximum number of texts per block for the reader; 0 means no limit.
      recall_order: rank passages by their best score (score), or in the order of the plan (plan,
        released code). Scores of different rankers are not comparable, so with score, passages
        with scores of several rankers are ranked by their place among the passages of their ranker.
      reader_format: blocks (Eq. 16), or a format of CIRAG's reader, with the passages but without
        the plan: thought, chain, brief.
      use_constraints: off uses the graph's triples most similar to Lin(tau) as candidates (w/o
        Constraint).
      use_relations: off keeps candidates with any relation, and hides relations from the reranker
        (w/o Relation).
      use_placeholders: off hides unknowns from the rerankers (w/o Placeholder).
      typed_variables: off names unknowns ?v1, ?v2, ... (w/o Typed-Var).
      rerank_structural: off selects candidates by their relation's similarity (w/o Rerank (Con)).
      rerank_texts: off selects texts by the retriever's score (w/o Rerank (Rel)).
      plain_hops: number of constraints, counted from the first, that are looked up as with
        use_constraints=false and not checked (NoC2RAG-1, NoC2RAG-1&2).
    """

    num_passages: PositiveInt = 20
    kg_scope: Literal["per_question", "corpus"] = "per_question"
    normalization: Normalization = "unicode"
    num_variants: PositiveInt = 3
    max_constraints: PositiveInt = 8
    num_examples: Annotated[int, Meta(ge=0, le=prompts.NUM_EXAMPLES)] = prompts.NUM_EXAMPLES
    plan_schema: bool = False
    plan_retries: Count = 1
    plan_failure: Literal["question", "empty"] = "question"
    num_anchors: PositiveInt = 3
    anchor_match: Match = "coverage"
    num_relations: PositiveInt = 8
    num_structural: PositiveInt = 3
    lin_relation: Literal["canonical", "variants"] = "canonical"
    sufficiency: Literal["neff", "score", "off"] = "neff"
    gamma: float = 1.5
    min_score: float = NO_MINIMUM
    neff_unit: Literal["constraint", "variable"] = "constraint"
    neff_rule: Rule = "always_shift"
    floor_at_zero: bool = False
    binding_end: Literal["slot", "other_end"] = "slot"
    intersect: bool = True
    max_bound: Count = 0
    consistent_only: bool = True
    propagation: Literal["fixpoint", "single_pass"] = "fixpoint"
    ground_constants: bool = False
    bind_from_text: bool = False
    resolved_evidence: Literal["passage", "sentence", "naming_passage"] = "passage"
    fetch_sources: bool = True
    recover_if_empty: bool = False
    recovery_unit: Literal["passage", "sentence"] = "passage"
    num_dense: PositiveInt = 8
    num_texts: PositiveInt = 3
    recovery_question: bool = True
    max_texts: Count = 0
    recall_order: Literal["score", "plan"] = "score"
    reader_format: Literal["blocks", reading_prompts.ReaderFormat] = "blocks"
    use_constraints: bool = True
    use_relations: bool = True
    use_placeholders: bool = True
    typed_variables: bool = True
    rerank_structural: bool = True
    rerank_texts: bool = True
    plain_hops: Count = 0

    def __post_init__(self):
        check_fields(self)
        if not (self.use_relations or self.rerank_structural):
            raise UserError(
                "use_relations=false needs rerank_structural=true; without both, candidates have "
                "no score."
            )
        if self.kg_scope == "corpus" and not (self.use_constraints and not self.plain_hops):
            raise UserError(
                "use_constraints=false or plain_hops above 0 needs kg_scope=per_question."
            )
        if self.sufficiency == "score" and self.min_score <= NO_MINIMUM:
            raise UserError(
                "sufficiency=score needs min_score, the minimum score of the best candidate (0 is "
                "a usual threshold for cross-encoders)."
            )
        if self.use_relations and self.num_structural > self.num_relations:
            say(
                f"WARNING: num_structural={self.num_structural} has the effect of "
                f"{self.num_relations}, because num_relations={self.num_relations} candidates are "
                "left by the selection of relations"
            )
        if self.sufficiency == "neff":
            self._warn()

    def _warn(self) -> None:
        """Warns if N_eff cannot separate resolved from unresolved constraints."""
        if self.gamma < 1:
            say(f"WARNING: gamma={self.gamma} resolves no constraint, because N_eff is at least 1")
        elif self.neff_rule == "always_shift" and (
            self.num_structural < 3 or self.gamma >= self.num_structural - 1
        ):
            say(
                f"WARNING: num_structural={self.num_structural} and gamma={self.gamma} resolve "
                "nearly every constraint, because neff_rule=always_shift gives the lowest "
                "candidate no weight"
            )

    @property
    def needs(self) -> Needs:
        """Needs the planner, the reader, and the rankers that the settings enable."""
        abilities: tuple[Ability, ...] = ("json_schema",) if self.plan_schema else ()
        rankers = {
            "relations": self.use_relations,
            "triples": self.rerank_structural,
            "passages": self.rerank_texts,
        }
        is_coarse = not self.use_constraints or self.plain_hops > 0
        return Needs(
            roles=("planner", "reader"),
            abilities={"planner": abilities} if abilities else {},
            rankers=tuple(
                name for name, used in rankers.items() if used or (is_coarse and name != "passages")
            ),
            triples=True,
            entities=self.normalization if self.kg_scope == "corpus" else None,
        )
