"""KiRAG's settings."""

import dataclasses
from typing import Literal

from cirag_jax.datasets.chains import UNIT_KINDS, UnitKind
from cirag_jax.errors import UserError
from cirag_jax.methods.common import reading
from cirag_jax.runtime.requests import Needs
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Count, Granularity, NonNegativeFloat, PositiveInt, UnitInterval
from cirag_jax.validation import check_fields

Ranking = Literal["score", "chain"]


@dataclasses.dataclass(frozen=True)
class KiragConfig:
    """KiRAG's switches; the defaults are the paper's (section 3.2, Appendix B.3).

    What its released code does otherwise is a field each (preset ``code``).

    Attributes:
      max_steps: L.
      num_passages: K_0, passages retrieved a step.
      num_candidates: N, units that the aligner passes on a step; 0: all.
      units: of the chain: triple, sentence (KiRAG-Sent) or passage (KiRAG-Doc).
      use_aligner: without it the constructor sees all units, in passage order ("w/o Aligner"), and
        the chain's passages are ranked first, for there are no scores.
      use_constructor: without it the aligner's best new unit is appended ("w/o Constructor").
      accumulate: the units of the passages of all steps are candidates (released code), not of this
        step's alone.
      retriever_query: what q_i is for the retriever: the question and the ``chain``, or the
        question and the ``last`` unit of it (released code).
      list_when_empty: an empty chain is written out in the aligner's query (released code).
      pool_size: above 0 the constructor sees so many of T_q, best first (released code: 100), 0:
        this step's candidates.
      num_demonstrations: training questions shown to the constructor, the most similar; 0, or none
        with a chain of triples: a worked example of ours.
      match_cutoff: least similarity at which a unit that is no candidate is taken for the closest
        one; 1: what is no candidate is dropped (paper).
      as_written: the chain grows by what the constructor wrote, candidate or not, a sentence where
        it wrote no unit (released code).
      stop: where the constructor's next step is the answer (``chain``), where it says an answer
        anywhere (``text``), or where it writes nothing (``empty``, released code).
      prefilled_opening: ask a constructor that names no candidate again, with the next triple
        begun for it.
      append_best: where it names none, append the aligner's best new unit. Ours.
      continues: the constructor continues its own turn; False: the chain ends the user's.
      boost: added to the scores of the chosen unit and of the first that holds the answer (released
        code: 0.5).
      ranking: passages by ``score``, or those of the ``chain`` first, in its order (ours).
      normalization: normalisation of triples that are read.
      reader: ``passages``, CIRAG's ``cascade`` over the chain, or ``nothing``: retrieval alone.
      num_read: K, passages that are read.
      reader_format: documents (KiRAG's), or as CIRAG's readers are trained: thought, chain, brief.
      granularities: steps of the cascade.
      force_answer, wide_refusal, grounded_answers, answer_tokens: as `CiragConfig` says.
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
                "use_aligner=false leaves no best unit: it needs use_constructor=true and "
                "append_best=false."
            )
        if self.reader == "cascade" and self.reader_format == "documents":
            raise UserError("reader=cascade needs reader_format=thought, chain or brief.")
        if not self.pools:
            raise UserError(
                f"granularities={self.granularities!r} leaves the cascade nothing to read of "
                f"units={self.units}."
            )

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities that the cascade has something of: those of the units and above."""
        first = UNIT_KINDS.index(self.units)
        return tuple(g for g in UNIT_KINDS[first:] if g in self.granularities)

    @property
    def needs(self) -> Needs:
        """What these switches leave to be opened."""
        constructor = ("constructor",) if self.use_constructor else ()
        continued = constructor if self.continues else ()
        return Needs(
            roles=(*constructor, *(() if self.reader == "nothing" else ("reader",))),
            abilities={role: ("continue_final",) for role in continued},
            rankers=("aligner",) if self.use_aligner else (),
            units=self.units if self.use_aligner else None,
            triples=self.units == "triple",
            demonstrations=self.use_constructor and self.shows_questions,
        )

    @property
    def shows_questions(self) -> bool:
        """Whether training questions are shown: annotations give chains of triples alone."""
        return self.num_demonstrations > 0 and self.units == "triple"
