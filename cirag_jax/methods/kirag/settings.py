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
    """KiRAG's settings; the defaults are the paper's (section 3.2, Appendix B.3).

    The preset ``code`` has the values of the released code where it differs.

    Attributes:
      max_steps: L, maximum number of steps.
      num_passages: K_0, passages retrieved per step.
      num_candidates: N, units that the aligner selects per step; 0 is all.
      units: units of the chain: triple, sentence (KiRAG-Sent) or passage (KiRAG-Doc).
      use_aligner: select candidates with the aligner; off shows the constructor all units, in
        passage order, and ranks the passages of the chain first ("w/o Aligner").
      use_constructor: extend the chain with the constructor; off appends the aligner's best new
        unit ("w/o Constructor").
      accumulate: candidates come from the passages of all steps (released code), not only from
        those of the current step.
      retriever_query: the retriever's query: the question and the ``chain``, or the question and
        the ``last`` unit of the chain (released code).
      list_when_empty: write an empty list into the aligner's query if the chain is empty (released
        code).
      pool_size: show the constructor this number of the best units of T_q (released code: 100); 0
        shows it the candidates of the current step.
      num_demonstrations: number of similar training questions shown to the constructor; with 0, or
        if none has an annotated chain of triples, a worked example of ours is shown.
      match_cutoff: minimum similarity at which a unit that is not a candidate is replaced by the
        most similar candidate; 1 drops it (paper).
      as_written: append what the constructor wrote even if it is not a candidate, and a sentence if
        it wrote no unit (released code).
      stop: stop when the constructor's next step is the answer (``chain``), when its response
        contains an answer (``text``), or when it is empty (``empty``, released code).
      prefilled_opening: if the constructor names no candidate, ask it again with the opening
        bracket of a triple prefilled.
      append_best: if the constructor names no candidate, append the aligner's best new unit (ours).
      continues: the constructor continues an assistant turn that holds the chain; off puts the
        chain at the end of the user turn.
      boost: added to the scores of the appended unit and of the best unit that contains the answer
        (released code: 0.5).
      ranking: rank passages by ``score``, or those of the ``chain`` first (ours).
      normalization: normal form of triples that the reader reads.
      reader: read the ranked ``passages``, read the chain with CIRAG's ``cascade``, or ``nothing``
        (only retrieval).
      num_read: K, number of passages that the reader reads.
      reader_format: documents (KiRAG's), or a format of CIRAG's readers: thought, chain, brief.
      granularities: steps of the cascade.
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
                f"granularities={self.granularities!r} leaves the cascade nothing to read with "
                f"units={self.units}."
            )

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities of the cascade that a chain of ``units`` can fill."""
        first = UNIT_KINDS.index(self.units)
        return tuple(g for g in UNIT_KINDS[first:] if g in self.granularities)

    @property
    def needs(self) -> Needs:
        """The needs of the enabled components."""
        constructor = ("constructor",) if self.use_constructor else ()
        reader = () if self.reader == "nothing" else ("reader",)
        # Annotations give only chains of triples.
        shows_questions = self.num_demonstrations > 0 and self.units == "triple"
        return Needs(
            roles=(*constructor, *reader),
            abilities=dict.fromkeys(constructor if self.continues else (), ("continue_final",)),
            rankers=("aligner",) if self.use_aligner else (),
            units=self.units if self.use_aligner else None,
            triples=self.units == "triple",
            demonstrations=self.use_constructor and shows_questions,
        )
