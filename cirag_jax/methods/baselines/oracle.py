"""Oracle: the reader reads the gold evidence. What no retrieval can beat with the same reader."""

import collections
import dataclasses
from collections.abc import Sequence

from cirag_jax.datasets.annotations import fill
from cirag_jax.datasets.chains import UnitKind
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from cirag_jax.methods.common.evidence import sentence_line, triple_line
from cirag_jax.methods.common.reading import ReaderFormat, read
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Fetch, Needs, Program, Retrieved
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Passage, Prediction, Question, Step, Triple
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class OracleConfig:
    """The oracle's settings.

    Attributes:
      units: of the gold evidence that is read: passage, sentence (of a set that annotates none: the
        whole passages' sentences) or triple (evidence triples, or sub-questions with answers).
      normalization: of triples as the reader sees them.
      reader_format: documents (FlashRAG's prompt), or as for CIRAG's reader: thought, chain, brief.
    """

    units: UnitKind = "passage"
    normalization: Normalization = "ascii"
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        check_fields(self)
        if self.units != "passage" and self.reader_format == "documents":
            raise UserError(f"units={self.units} needs reader_format=thought, chain or brief.")

    @property
    def needs(self) -> Needs:
        """Gold; and the gold passages, by their ids, where not only triples are read."""
        reads_text = self.units != "triple"
        return Needs(roles=("reader",), corpus=reads_text, search=False, gold=True)


def oracle(asked: Question, config: OracleConfig) -> Program[Prediction]:
    """Reads what the benchmark annotates as evidence; without any, the reader answers alone."""
    errors = collections.Counter[str]()
    gold = tuple(dict.fromkeys(asked.supporting or ()))
    triples: tuple[Triple, ...] = ()
    places: tuple[tuple[str, int], ...] = ()
    if config.units == "triple":
        triples = _triples(asked)
        evidence: Sequence[Passage] | Sequence[str] = [
            triple_line(triple, config.normalization) for triple in triples
        ]
    else:
        found = Retrieved((), ())
        if gold:
            found = yield Fetch(gold)
        evidence = found.passages
        if config.units == "sentence":
            known = {passage.id: passage for passage in found.passages}
            places = _places(asked, known)
            evidence = [sentence_line(known[name], index) for name, index in places]
    if not evidence:
        errors["question_without_gold"] += 1
    attempt = yield from read(asked.question, config.units, evidence, config.reader_format, errors)
    step = Step(asked.question, gold, notes={"gold": len(evidence)})
    return Prediction(
        attempt.answer,
        config.units,
        passages=gold,
        sentences=places,
        triples=triples,
        steps=(step,),
        attempts=(attempt,),
        parse_errors=dict(errors),
    )


METHOD = Method(oracle, OracleConfig)


def _places(asked: Question, known: dict[str, Passage]) -> tuple[tuple[str, int], ...]:
    """Supporting sentences; of a gold passage in which none is annotated, all."""
    annotated = asked.supporting_sentences or ()
    inside = {passage_id for passage_id, _ in annotated}
    rest = [
        (passage_id, index)
        for passage_id, passage in known.items()
        if passage_id not in inside
        for index in range(len(sentences_of(passage)))
    ]
    places = (
        (passage_id, index)
        for passage_id, index in (*annotated, *rest)
        if passage_id in known and index < len(sentences_of(known[passage_id]))
    )
    return tuple(dict.fromkeys(places))


def _triples(asked: Question) -> tuple[Triple, ...]:
    """The evidence triples; of a decomposition, each sub-question with its answer."""
    if asked.evidences:
        return tuple(Triple(*parts) for parts in asked.evidences)
    answers = {index: step.answer for index, step in enumerate(asked.decomposition or ())}
    found = []
    for step in asked.decomposition or ():
        head, _, relation = fill(step.question, answers).partition(" >> ")
        found.append(Triple(head, relation, step.answer))
    return tuple(found)
