"""NativeRAG: one retrieval with the question, one reading. What every method must beat."""

import dataclasses

from cirag_jax.errors import UserError
from cirag_jax.methods.evidence import passage_line
from cirag_jax.prompts import rag as prompts
from cirag_jax.prompts import reading
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program, Retrieve, Retrieved
from cirag_jax.types import Attempt, Prediction, Question, Step


@dataclasses.dataclass(frozen=True)
class NativeRagConfig:
    """NativeRAG's settings (FlashRAG's naive generation).

    Attributes:
      num_passages: passages retrieved, which recall looks at.
      reader_format: documents (FlashRAG's prompt), or as for CIRAG's reader: thought, chain, brief.
      num_read: how many of them the reader gets; the CIRAG paper's NativeRAG reads all ten.
    """

    needs = Needs(roles=("reader",))

    num_passages: int = 10
    num_read: int = 10
    reader_format: str = "documents"

    def __post_init__(self):
        if not 1 <= self.num_read <= self.num_passages:
            raise UserError("num_read must lie between 1 and num_passages.")
        if self.reader_format != "documents":
            reading.check_reader_format(self.reader_format)


def native_rag(asked: Question, config: NativeRagConfig) -> Program[Prediction]:
    """Retrieves once, reads once."""
    question = asked.question
    found: Retrieved = yield Retrieve(question, config.num_passages)
    read = found.passages[: config.num_read]
    texts = tuple(passage_line(passage) for passage in read)
    if config.reader_format == "documents":
        messages, parse = prompts.reading_messages(question, read), prompts.parse_short_answer
    else:
        messages = reading.answer_messages(
            question, "passage", texts, may_refuse=False, reader_format=config.reader_format
        )
        parse = lambda text: reading.parse_answer(text, question=question)[0]  # noqa: E731
    response: Generated = yield Generate(messages, "reader")
    answer, problem = parse(response.text), ""
    if not answer:
        problem = "answer_empty"
    elif response.finish_reason == "length" and len(response.text.strip().splitlines()) == 1:
        problem = "answer_truncated"
    ids = tuple(passage.id for passage in found.passages)
    return Prediction(
        answer,
        "passage",
        passages=ids,
        steps=(Step(question, ids),),
        attempts=(Attempt("passage", texts, response.text, answer, bool(answer)),),
        parse_errors={problem: 1} if problem else {},
    )
