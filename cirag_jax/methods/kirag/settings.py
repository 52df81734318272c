"""The settings of KiRAG."""

import dataclasses
from typing import Literal

from cirag_jax.datasets.chains import UNIT_KINDS, UnitKind
from cirag_jax.errors import UserError
from cirag_jax.methods.cirag.cascade import CascadeConfig
from cirag_jax.methods.common import reading
from cirag_jax.runtime.requests import Needs
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Count, Granularity, NonNegativeFloat, PositiveInt, UnitInterval
from cirag_jax.validation import check_fields

Ranking = Literal["score", "chain"]


@dataclasses.dataclass(frozen=True)
class KiragConfig(CascadeConfig):
    """KiRAG's settings, with the paper's defaults (section 3.2, Appendix B.3).

    The preset ``code`` has the values of the released code.

    Attributes:
      max_steps: L, maximum number of steps.
      num_passages: K_0, passages retrieved per step.
      num_candidates: N, number of units that the aligner selects per step; 0 selects all.
      units: units of the chain: triple, sentence (KiRAG-Sent) or passage (KiRAG-Doc).
      use_aligner: select candidates with the aligner; off shows the constructor all units, in
        passage order, and ranks the passages of the chain first ("w/o Aligner").
      use_constructor: extend the chain with the constructor; off appends the aligner's best new
        unit ("w/o Constructor").
      accumulate: select candidates from the passages of all steps (released code), not only from
        the current step's passages.
      retriever_query: query of the retriever: the question with the full chain (chain), or with
        only the chain's last unit (last, released code).
      list_when_empty: write an empty list into the aligner's query if the chain is empty (released
        code).
      pool_size: show the constructor this number of the best candidates of all steps (released
        code: 100); 0 shows the candidates of the current step.
      num_demonstrations: number of similar training questions shown to the constructor. With 0, or
        if no question has an annotated chain of triples, our worked example is shown.
      match_cutoff: minimum similarity for replacing a written unit that is not a candidate by the
        most similar candidate; 1 drops such units (paper).
      as_written: append the constructor's first unit even if it is not a candidate, or the
        constructor's first sentence if it wrote no unit (released code).
      stop: the steps end if nothing is appended; and also if the constructor's next step is the
        answer (chain) or its response contains an answer (text); empty adds no condition (released
        code).
      prefilled_opening: if the constructor names no candidate, repeat the request with the opening
        bracket of a triple prefilled.
      append_best: if the constructor names no candidate, append the aligner's best new unit (ours).
      continues: put the chain into an assistant turn that the constructor continues; off puts it at
        the end of the user turn.
      boost: value added to the scores of the appended unit and of the best unit that contains the
        answer (released code: 0.5).
      ranking: rank passages by score (score), or the passages of the chain first (chain, ours).
      normalization: normal form of triples that the reader reads.
      reader: input of the reader: passages (the best-ranked), cascade (the chain, by CIRAG's
        cascade), or nothing (retrieval only).
      num_read: K, number of passages that the reader reads.
      reader_format: documents (KiRAG's prompt), or a format of CIRAG's reader: thought, chain,
        brief.
      granularities: granularities that the cascade reads.
      force_answer, wide_refusal, grounded_answers, answer_tokens: as in `CiragConfig`.
    """

    max_steps: PositiveInt = 5
    num_passages: PositiveInt = 10
    num_candidates: Count = 20
    units: UnitKind = "triple"
    use_aligner: bool = True
    use_constructor: bool = True
    accumulate: bool = False
    retriever_query: Literal["chain", "last"] = "chain"
    list_when_empty: bool = False
    pool_size: Count = 0
    num_demonstrations: Count = 5
    match_cutoff: UnitInterval = 1.0
    as_written: bool = False
    stop: Literal["chain", "text", "empty"] = "chain"
    prefilled_opening: bool = False
    append_best: bool = False
    continues: bool = True
    boost: NonNegativeFloat = 0.0
    ranking: Ranking = "score"
    normalization: Normalization = "ascii"
    reader: Literal["passages", "cascade", "nothing"] = "passages"
    num_read: PositiveInt = 3
    reader_format: reading.ReaderFormat = "documents"
    granularities: tuple[UnitKind, ...] = UNIT_KINDS
    force_answer: bool = True
    wide_refusal: bool = False
    grounded_answers: bool = False
    answer_tokens: Count = 0

    def __post_init__(self):
        check_fields(self)
        if not self.use_aligner and (not self.use_constructor or self.append_best):
            raise UserError(
                "use_aligner=false needs use_constructor=true and append_best=false, because "
                "without an aligner there is no best unit."
            )
        if self.reader == "cascade" and self.reader_format == "documents":
            raise UserError("reader=cascade needs reader_format=thought, chain or brief.")
        if not self.pools:
            raise UserError(
                f"granularities={self.granularities!r} has no granularity that the cascade can "
                f"read with units={self.units}."
            )

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities that the cascade can read if the chain consists of ``units``."""
        first = UNIT_KINDS.index(self.units)
        return tuple(g for g in UNIT_KINDS[first:] if g in self.granularities)

    @property
    def needs(self) -> Needs:
        """The models and data that the enabled components need."""
        constructor = ("constructor",) if self.use_constructor else ()
        reader = () if self.reader == "nothing" else ("reader",)
        # Only chains of triples are annotated.
        shows_questions = self.num_demonstrations > 0 and self.units == "triple"
        return Needs(
            roles=(*constructor, *reader),
            abilities=dict.fromkeys(constructor if self.continues else (), ("continue_final",)),
            rankers=("aligner",) if self.use_aligner else (),
            units=self.units if self.use_aligner else None,
            triples=self.units == "triple",
            demonstrations=self.use_constructor and shows_questions,
        )
