"""Oracle: the reader gets the gold evidence, which gives an upper bound for any retrieval."""

import collections
import dataclasses
from collections.abc import Sequence

from cirag_jax.datasets.annotations import fill
from cirag_jax.datasets.chains import UnitKind
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from cirag_jax.methods.common.evidence import sentence_line, triple_line
from cirag_jax.methods.common.reading import ReaderFormat, read, render_reader
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Fetch, Needs, Program, Retrieved
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Passage, Prediction, Question, Step, Triple
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class OracleConfig:
    """The oracle's settings.

    Attributes:
      units: units of the gold evidence: passage; sentence (all sentences of a gold passage if none
        is annotated); or triple (evidence triples, or sub-questions with their answers).
      normalization: normal form of triples that the reader reads.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
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
        """Needs the annotations, and the corpus unless the reader reads only triples."""
        reads_text = self.units != "triple"
        return Needs(roles=("reader",), corpus=reads_text, search=False, gold=True)


def oracle(question: Question, config: OracleConfig) -> Program[Prediction]:
    """Answers a question from its annotated evidence, which may be empty."""
    errors = collections.Counter[str]()
    gold = tuple(dict.fromkeys(question.supporting or ()))
    triples: tuple[Triple, ...] = ()
    sentences: tuple[tuple[str, int], ...] = ()
    if config.units == "triple":
        triples = _triples(question)
        evidence: Sequence[Passage] | Sequence[str] = [
            triple_line(triple, config.normalization) for triple in triples
        ]
    else:
        fetched = Retrieved((), ())
        if gold:
            fetched = yield Fetch(gold)
        evidence = fetched.passages
        if config.units == "sentence":
            passages = {passage.id: passage for passage in fetched.passages}
            sentences = _sentences(question, passages)
            evidence = [sentence_line(passages[p], index) for p, index in sentences]
    if not evidence:
        errors["question_without_gold"] += 1
    attempt = yield from read(
        question.question, config.units, evidence, config.reader_format, errors
    )
    step = Step(question.question, gold, notes={"gold": len(evidence)})
    return Prediction(
        attempt.answer,
        config.units,
        passages=gold,
        sentences=sentences,
        triples=triples,
        steps=(step,),
        attempts=(attempt,),
        parse_errors=dict(errors),
    )


METHOD = Method(
    oracle, OracleConfig, lambda config: render_reader(config.reader_format, config.units)
)


def _sentences(question: Question, passages: dict[str, Passage]) -> tuple[tuple[str, int], ...]:
    """Returns annotated sentences, and all sentences of gold passages without annotations."""
    annotated = question.supporting_sentences or ()
    with_annotations = {passage_id for passage_id, _ in annotated}
    rest = [
        (passage_id, index)
        for passage_id, passage in passages.items()
        if passage_id not in with_annotations
        for index in range(len(sentences_of(passage)))
    ]
    sentences = (
        (passage_id, index)
        for passage_id, index in (*annotated, *rest)
        if passage_id in passages and index < len(sentences_of(passages[passage_id]))
    )
    return tuple(dict.fromkeys(sentences))


def _triples(question: Question) -> tuple[Triple, ...]:
    """Returns the evidence triples, or triples from the sub-questions and their answers."""
    if question.evidences:
        return tuple(Triple(*parts) for parts in question.evidences)
    decomposition = question.decomposition or ()
    answers = {index: step.answer for index, step in enumerate(decomposition)}
    triples = []
    for step in decomposition:
        head, _, relation = fill(step.question, answers).partition(" >> ")
        triples.append(Triple(head, relation, step.answer))
    return tuple(triples)
