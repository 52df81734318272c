"""C2RAG's switches."""

import dataclasses
from typing import Annotated, Literal, get_args

from msgspec import Meta

from cirag_jax.errors import UserError
from cirag_jax.io import say
from cirag_jax.llm.types import Ability
from cirag_jax.methods.c2rag import prompts
from cirag_jax.methods.common import reading_prompts
from cirag_jax.runtime.requests import Needs
from cirag_jax.triples.entity_index import Match
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields

# How scores become shares; see `cirag_jax.methods.c2rag.constraints.shares`.
Rule = Literal["always_shift", "shift_if_nonpositive", "softmax"]
RULES: tuple[Rule, ...] = get_args(Rule)

_NO_SCORE = -1e9  # Any score reaches it.


@dataclasses.dataclass(frozen=True)
class C2ragConfig:
    """C2RAG's switches; the defaults are the paper's, what it leaves open our specification's.

    Attributes:
      num_passages: passages retrieved for the question, U(q); 20 is a whole context of MuSiQue.
      kg_scope: the graph: per_question (the triples of U(q), as the paper) or corpus (of all
        passages, as the released code).
      normalization: normal form in which names are the same: unicode or ascii.
      num_variants: m, wordings of a relation that the planner gives, the first one included.
      max_constraints: k; a longer plan cannot be used.
      num_examples: worked examples that the planner sees.
      plan_schema: force the plan into its JSON schema (backends that can).
      plan_retries: how often a plan that cannot be used is asked for again.
      plan_failure: where it still cannot: question (one textual constraint, q itself) or empty (the
        reader gets no evidence; released code).
      num_anchors: E, entities that a name is anchored at.
      anchor_match: coverage (Eq. 3) or ratio (released code: difflib's).
      num_relations: R, candidates kept by their relation (Eq. 5).
      num_structural: K_s, candidates kept by the reranker (Eq. 6).
      lin_relation: Lin(tau) has the relation alone (canonical) or the variants with it (variants).
      sufficiency: what decides whether candidates suffice: neff (Eq. 8 and 9), score (the best
        reaches ``min_score``, which must then be given: w/o Dist), none (whatever there is: w/o
        Check).
      gamma: most effective candidates.
      min_score: least score of the best candidate, of sufficiency=score and beside neff.
      neff_unit: N_eff is taken over the triples of a constraint (paper) or over the entities of an
        unknown (released code).
      neff_rule: always_shift (Eq. 7), shift_if_nonpositive (released code) or softmax (ours).
      floor_at_zero: negative scores count as 0 (released code).
      binding_end: slot (Eq. 13) or other_end (released code: the end that is no anchor).
      intersect: constraints on the same unknown must agree, where they can (Eq. 14); off: union.
      max_bound: names that an unknown is bound to at most; 0: all.
      consistent_only: evidence is of the candidates that fit the bindings alone.
      propagation: fixpoint (until nothing new is grounded) or single_pass (once; released code).
      ground_constants: look constraints without unknowns up in the graph (released code); off: in
        text.
      bind_from_text: let the planner read an unknown's name from recovered text, as the paper's
        case study does and its section 3.3 forbids.
      resolved_evidence: of a candidate: passage (its source), sentence (the source's first that
        has both names; released code), or naming_passage (a source that has both; released code,
        MuSiQue).
      fetch_sources: of kg_scope=corpus: read sources that are not in U(q), too; off: a candidate
        that only other passages state has no evidence (released code).
      recover_if_empty: look a resolved constraint up in text where its evidence is empty.
      recovery_unit: passage, or sentence (released code).
      num_dense: K'_t, passages retrieved for a constraint that is looked up in text: from U(q)
        where a question searches its own context alone (Eq. 11), else from all passages (ours).
      num_texts: K_t, of these, or of their sentences, kept by the reranker.
      recovery_question: the reranker of texts reads the question with the constraint (Eq. 12).
      max_texts: texts of a block that the reader sees; 0: all.
      recall_order: passages are ranked by their best score, or in the order of the plan (released
        code).
      reader_format: blocks (Eq. 16) or, the passages each once without the plan, as readers are
        trained: thought, chain, brief.
      use_constraints: off: candidates are the triples of the graph most similar to Lin(tau)
        (w/o Constraint).
      use_relations: off: no candidate is dropped for its relation, and the reranker sees entities
        alone (w/o Relation).
      use_placeholders: off: the rerankers do not see unknowns (w/o Placeholder).
      typed_variables: off: unknowns are called ?v1, ?v2, ... (w/o Typed-Var).
      rerank_structural: off: candidates are kept by their relation's similarity (w/o Rerank (Con)).
      rerank_texts: off: texts are kept by the retriever's score (w/o Rerank (Rel)).
      plain_hops: so many first constraints are looked up as without ``use_constraints``, and
        unchecked (NoC2RAG-1, NoC2RAG-1&2).
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
    sufficiency: Literal["neff", "score", "none"] = "neff"
    gamma: float = 1.5
    min_score: float = _NO_SCORE
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
                "use_relations=false and rerank_structural=false leave candidates without a score."
            )
        if self.kg_scope == "corpus" and not (self.use_constraints and not self.plain_hops):
            raise UserError("without constraints, kg_scope must be per_question.")
        if self.sufficiency == "score" and self.min_score <= _NO_SCORE:
            raise UserError(
                "sufficiency=score needs min_score, the least score of the best candidate (0 is "
                "where a cross-encoder takes it for relevant)."
            )
        if self.sufficiency == "neff":
            self._warn()

    def _warn(self) -> None:
        """Says where the check cannot tell anything (errata 15 and 16 of our specification)."""
        if self.gamma < 1:
            say(f"WARNING: no candidates are fewer than one: gamma={self.gamma} resolves nothing")
        elif self.neff_rule == "always_shift" and (
            self.num_structural < 3 or self.gamma >= self.num_structural - 1
        ):
            say(
                f"WARNING: neff_rule=always_shift gives the lowest candidate no weight: with "
                f"num_structural={self.num_structural} and gamma={self.gamma} nearly everything "
                "is resolved"
            )

    @property
    def needs(self) -> Needs:
        """The relations' ranker is the dense one; where nothing is reranked, no other is opened."""
        abilities: tuple[Ability, ...] = ("json_schema",) if self.plan_schema else ()
        rankers = {
            "relations": self.use_relations,
            "triples": self.rerank_structural,
            "passages": self.rerank_texts,
        }
        coarse = not self.use_constraints or self.plain_hops > 0
        return Needs(
            roles=("planner", "reader"),
            abilities={"planner": abilities} if abilities else {},
            rankers=tuple(n for n, used in rankers.items() if used or (coarse and n != "passages")),
            triples=True,
            entities=self.normalization if self.kg_scope == "corpus" else None,
        )
